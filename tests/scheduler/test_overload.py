"""Overload: refusals are typed and carry numbers, everything else waits, and
pressure never changes an answer.
"""

from __future__ import annotations

import pytest

from scheduler.limits import Layout, PoolLimits, StepLimits
from scheduler.records import SamplingParams
from tests.scheduler.serving import OPTIMISTIC, Serving, request

LAYOUTS = [
    {"layout": Layout.UNIFIED},
    {"layout": Layout.STOCK},
    {"layout": Layout.UNIFIED, "recurrent": True},
    {"layout": Layout.UNIFIED, "stages": 2},
    {"layout": Layout.UNIFIED, "window": 3},
]


@pytest.mark.parametrize("fields", LAYOUTS, ids=str)
@pytest.mark.parametrize(("rows", "accepted"), [(23, True), (24, True), (25, False)])
def test_a_session_of_the_pools_size_runs_and_one_row_more_is_refused(
    rows: int, accepted: bool, fields: dict
) -> None:
    serving = Serving(cells=24, **fields)
    (refusal,) = serving.submit(request("one", rows - 4, 5))
    if not accepted:
        assert (refusal.retryable, refusal.needed, refusal.available) == (False, 25, 24)
        assert "needs 25 cells" in refusal.reason
        del serving.requests["one"]
    serving.submit(request("other", 5, 3))
    serving.run()
    serving.check_all_as_alone()
    assert ("one" in serving.ends) is accepted
    assert serving.totals.values["refused"] == (not accepted)


def test_streams_refuse_what_no_stream_can_hold() -> None:
    serving = Serving(layout=Layout.STREAMS, cells=64, ids=4)
    assert serving.submit(request("fits", 12, 5)) == [None]
    (refusal,) = serving.submit(request("wide", 12, 6))
    assert (refusal.needed, refusal.available) == (17, 16)


@pytest.mark.parametrize("fields", LAYOUTS, ids=str)
@pytest.mark.parametrize("options", [{}, OPTIMISTIC], ids=["reserving", "optimistic"])
def test_one_and_a_half_pools_of_demand_complete_as_alone(options: dict, fields: dict) -> None:
    serving = Serving(cells=40, options=options, max_num_batched_tokens=9, **fields)
    sampling = SamplingParams(temperature=1.0, seed=4)
    assert serving.submit(*[request(f"s{i}", 7, 9, sampling=sampling) for i in range(4)]) == [None] * 4
    assert sum(item.num_rows for item in serving.requests.values()) == 60
    serving.run()
    serving.check_all_as_alone()
    assert len(serving.ends) == 4
    if options:
        assert serving.totals.values["preempted"] > 0
        assert serving.totals.values["recompute_tokens"] > 0


def test_pool_exactly_full_is_used_to_the_last_cell() -> None:
    serving = Serving(cells=30)
    serving.submit(*[request(f"s{i}", 6, 5) for i in range(3)])
    serving.run()
    serving.check_all_as_alone()
    assert serving.totals.values["cells_used"] == 30
    assert serving.totals.values["preempted"] == 0


def test_one_row_over_the_pool_waits() -> None:
    serving = Serving(cells=30)
    serving.submit(request("a", 6, 5), request("b", 6, 5), request("c", 7, 5))
    serving.step()
    assert list(serving.scheduler.table.waiting) == ["c"]
    serving.run()
    serving.check_all_as_alone()


def test_full_queue_refuses_retryably_and_takes_the_request_later() -> None:
    serving = Serving(cells=20, max_waiting=2, max_num_seqs=1)
    refusals = serving.submit(*[request(f"s{i}", 4, 3) for i in range(4)])
    assert [refusal is None for refusal in refusals] == [True, True, False, False]
    assert refusals[2].retryable and "queue is full with 2" in refusals[2].reason
    serving.step()
    assert serving.submit(serving.requests["s2"]) == [None]
    del serving.requests["s3"]
    serving.run()
    serving.check_all_as_alone()
    assert sorted(serving.ends) == ["s0", "s1", "s2"]


def test_next_chunk_that_does_not_fit_parks_and_loses_nothing() -> None:
    serving = Serving(
        cells=24, options=OPTIMISTIC, max_chunk_tokens=8, max_num_batched_tokens=10, prefix_cache=False
    )
    serving.submit(request("d0", 2, 9), request("d1", 2, 9))
    serving.step()
    serving.submit(request("long", 20, 2))
    serving.run()
    serving.check_all_as_alone()


def test_large_request_behind_a_stream_of_small_ones_is_served() -> None:
    serving = Serving(cells=40, prefix_cache=False)
    serving.submit(*[request(f"a{i}", 5, 4) for i in range(4)], request("large", 30, 8))
    for index in range(60):
        serving.submit(request(f"b{index}", 5, 4))
        serving.step()
        if "large" in serving.ends:
            break
    assert "large" in serving.ends
    assert list(serving.scheduler.table.waiting)[0] == "b0", "the stream waits behind it"
    serving.run()
    serving.check_all_as_alone()


def test_three_requests_with_a_budget_of_two_all_advance_within_a_bound() -> None:
    serving = Serving(cells=60, max_num_seqs=2, max_num_batched_tokens=2)
    serving.submit(*[request(f"s{i}", 3, 6) for i in range(3)])
    bound = sum(item.num_rows for item in serving.requests.values())
    serving.run(most=bound)
    serving.check_all_as_alone()


@pytest.mark.parametrize("fields", [{}, {"recurrent": True}])
def test_full_hit_preempted_before_its_first_token_still_answers(fields: dict) -> None:
    serving = Serving(prefix_block_tokens=4, max_chunk_tokens=4, **fields)
    prompt = tuple(range(13))
    serving.submit(request("donor", prompt, 2))
    while not serving.scheduler.is_idle:
        serving.step()
    serving.submit(request("hit", prompt, 4))
    flight = serving.launch()
    assert flight.plan.chunks[0].start == 12
    serving.scheduler.preempt("hit", serving.now_ms)
    serving.commit(flight)
    for _ in range(3):
        serving.scheduler.preempt("hit", serving.now_ms)
        serving.step()
    serving.run()
    serving.check_all_as_alone()


def test_original_clocks_never_restart() -> None:
    serving = Serving(cells=80)
    serving.submit(request("s", 4, 8, arrival_ms=0.0))
    serving.step(3)
    before = serving.view("s")
    serving.scheduler.preempt("s", serving.now_ms)
    serving.step(4)
    after = serving.view("s")
    assert after.epoch == before.epoch + 1 and after.emitted > before.emitted
    assert (after.submitted_ms, after.first_emitted_ms) == (before.submitted_ms, before.first_emitted_ms)
    assert after.request.arrival_ms == 0.0


@pytest.mark.parametrize("hidden", [1, 2, 7, 20])
def test_hidden_output_length_never_changes_a_plan_before_it_shows(hidden: int) -> None:
    def plans(length: int) -> list[bytes]:
        stops = {f"s{i}": (4 + i + (length if i == 1 else 20) - 1, 7) for i in range(3)}
        serving = Serving(cells=50, stops=stops, max_num_batched_tokens=6)
        serving.submit(*[request(f"s{i}", 4 + i, 20, stop_token_ids=(7,)) for i in range(3)])
        made = []
        while "s1" not in serving.ends and not serving.scheduler.is_idle:
            serving.step()
            made.append(repr(serving.trace[-1][0].plan).encode())
        return made

    short, long = plans(hidden), plans(20)
    assert short == long[: len(short)]
    assert len(short) >= hidden


@pytest.mark.parametrize(
    "bad",
    [
        {"max_num_batched_tokens": 0},
        {"max_num_seqs": 0},
        {"max_waiting": 0},
        {"prefix_block_tokens": 0},
        {"max_chunk_tokens": 0},
        {"max_idle_steps": 0},
    ],
)
def test_impossible_step_limits_are_named(bad: dict) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        StepLimits(**bad)


@pytest.mark.parametrize(
    "bad",
    [
        {"num_cells": 0},
        {"num_sequences": 0},
        {"num_sequences": 257},
        {"max_call_rows": 1},
        {"num_sequences": 1},
    ],
)
def test_impossible_pool_limits_are_refused(bad: dict) -> None:
    with pytest.raises(ValueError):
        PoolLimits(**bad)
