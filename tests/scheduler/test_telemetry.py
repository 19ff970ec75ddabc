"""Telemetry of preemption: every counter by hand, and the lines by reason, mode, policy, client and epoch."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from parity.commands.telemetry import command as telemetry
from scheduler import sessions
from scheduler.limits import Layout
from scheduler.policy.reservation import reservation_error
from scheduler.records import Allocation, ServiceLevel
from tests.scheduler.serving import OPTIMISTIC, Serving, request


def test_reclaimed_bytes_are_those_of_cells_that_nobody_else_holds() -> None:
    """b shares a prefix of 4 with what a left, and adds 3 rows of its own before it is preempted."""
    serving = Serving(cells=30, stages=2, cell_bytes=100, prefix_block_tokens=4, max_num_batched_tokens=20)
    serving.submit(request("a", [1, 2, 3, 4], 1))
    serving.step()
    serving.submit(request("b", [1, 2, 3, 4, 5, 6], 9))
    serving.step(2)
    assert (serving.view("b").computed, serving.view("b").cached) == (7, 4)
    serving.scheduler.preempt("b", serving.now_ms)
    record = serving.step()
    (taken,) = record.preemptions
    kept_by_entries = 6  # the whole prompt of b became a prefix, too, and stays resident
    assert (taken.released_rows, taken.freed_cells) == (7, (7 - kept_by_entries,) * 2)
    assert (record.released_rows, record.reclaimed_bytes) == (7, 2 * 100)

    alone = Serving(cells=30, cell_bytes=100, prefix_cache=False, max_num_batched_tokens=20)
    alone.submit(request("b", 6, 9))
    alone.step(2)
    alone.scheduler.preempt("b", alone.now_ms)
    record = alone.step()
    assert (record.released_rows, record.reclaimed_bytes) == (7, 700)


def test_objectives_missed_after_a_resume_are_counted_from_the_original_clocks() -> None:
    """One step takes 10 ms. ``b`` emits at 0 and 10 ms, is suspended, rebuilds at 20 ms and emits at 30 ms:
    20 ms after its last token, 5 too many. Nothing else is late, and what was never suspended is not counted.
    """
    serving = Serving(cells=30, prefix_cache=False)
    tight = ServiceLevel(tbt_ms=15.0)
    serving.submit(request("a", 3, 9, slo=ServiceLevel(ttft_ms=-1.0)), request("b", 3, 9, slo=tight))
    serving.step(2)
    serving.scheduler.preempt("b", serving.now_ms)
    late = [serving.step().late_after_resume for _ in range(5)]
    assert late == [0, 1, 0, 0, 0]
    first = Serving(cells=30, prefix_cache=False, max_num_batched_tokens=2)
    first.submit(request("c", 3, 9, slo=ServiceLevel(ttft_ms=35.0)))
    first.step()  # two of three rows of the prompt; due at 35 ms
    first.scheduler.preempt("c", first.now_ms)
    assert [first.step().late_after_resume for _ in range(3)] == [0, 0, 0]
    assert first.view("c").first_emitted_ms == 20.0


def test_latency_of_a_resume_counts_from_the_suspension_and_repeated_ones_are_told_apart() -> None:
    serving = Serving(cells=30, prefix_cache=False)
    serving.submit(request("a", 3, 9, client_id="x"), request("b", 3, 9, client_id="y"))
    serving.step(2)
    serving.scheduler.preempt("b", 13.0)
    record = serving.step()  # at 20 ms
    assert (record.resumed, record.resume_latency_ms, record.preempted_again) == (1, 7.0, 0)
    serving.step()
    serving.scheduler.preempt("b", serving.now_ms)
    record = serving.step()
    assert (record.preempted, record.preempted_again) == (1, 1)
    assert [item.epoch for line in serving.records for item in line.preemptions] == [1, 2]


def test_a_result_that_comes_after_the_cancel_is_stale_and_counted_once() -> None:
    serving = Serving(cells=30, prefix_cache=False)
    serving.submit(request("a", 3, 9), request("b", 3, 9))
    serving.step()
    flight = serving.launch()
    serving.scheduler.cancel("b", serving.now_ms)
    record = serving.commit(flight)
    assert (record.stale_receipts, record.cancelled, record.decode_tokens) == (1, 1, 1)
    serving.run()
    assert serving.totals.values["stale_receipts"] == 1


def test_a_session_whose_cells_lie_too_high_rebuilds_its_tail_or_falls_back_to_recompute() -> None:
    """``a`` and ``b`` take cells in turn, one row a step; when ``a`` has ended, cells are left between those
    of ``b`` and too few above them. A recurrent state has no tail that could be rebuilt alone.
    """
    for recurrent in (False, True):
        serving = Serving(
            cells=11, prefix_cache=False, options=OPTIMISTIC, max_chunk_tokens=1, recurrent=recurrent
        )
        serving.submit(request("b", 4, 8), request("a", 3, 2))
        serving.run()
        serving.check_all_as_alone()
        totals = serving.totals.values
        assert totals["preempted"] == totals["preempted_own_cells_too_high"] == 1
        assert (totals["rebuilt_lower"], totals["preemption_fallbacks"]) == (not recurrent, recurrent)


def test_counts_by_reason_mode_policy_client_and_epoch_come_out_of_the_log(tmp_path: Path) -> None:
    serving = Serving(cells=30, prefix_cache=False)
    serving.submit(request("a", 3, 9, client_id="x"), request("b", 3, 9, client_id="y"))
    serving.step(2)
    for _ in range(2):
        serving.scheduler.preempt("b", serving.now_ms)
        serving.scheduler.preempt("a", serving.now_ms)
        serving.step(2)
    log = tmp_path / "steps.jsonl"
    log.write_text("\n".join(record.to_json() for record in serving.records))
    result = CliRunner().invoke(telemetry, [str(log), "--preemptions"], standalone_mode=False)
    lines = [json.loads(line) for line in result.output.splitlines()]
    same = {"reason": "asked", "mode": "recompute", "policy": "fcfs"}
    assert lines == [
        {**same, "client": client, "epoch": epoch, "count": 1, "released_rows": rows}
        for client, epoch, rows in (("x", 1, 4), ("x", 2, 5), ("y", 1, 4), ("y", 2, 5))
    ]


def test_every_entry_has_an_estimate_a_wish_and_the_answer_of_the_memory() -> None:
    """10 cells, two sessions that may write 4 + 3 - 1 = 6 rows each: the second one's wish is never made
    while the first one's rows are kept free, since 6 + 6 > 10.
    """
    serving = Serving(cells=10, prefix_cache=False, layout=Layout.STOCK)
    serving.submit(request("a", 4, 3), request("b", 4, 3))
    serving.run()
    answers = [item for flight, _ in serving.trace for item in flight.allocations]
    assert [(item.request.request_id, item.request.rows, item.allocation) for item in answers] == [
        ("a", 6, Allocation.GRANTED),
        ("b", 6, Allocation.GRANTED),
    ]
    intents = {
        intent.request_id: intent.estimate for flight, _ in serving.trace for intent in flight.plan.intents
    }
    assert {name: (item.reserved_rows, item.hard_rows) for name, item in intents.items()} == {
        "a": (0, 10),
        "b": (0, 10),
    }
    assert reservation_error(intents["a"].rows, 4 + 3 - 1) == 0


def test_service_of_departed_clients_is_not_kept_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "MAX_DEPARTED_CLIENTS", 2)
    serving = Serving(cells=30, prefix_cache=False)
    serving.submit(request("long", 3, 20, client_id="stays"))
    for name in "abcd":
        serving.submit(request(name, 3, 1, client_id=name))
        serving.step()
    table = serving.scheduler.table
    assert sorted(table.service) == ["c", "d", "stays"]
    serving.submit(request("c2", 3, 1, client_id="c"))
    serving.step()
    assert table.service["c"] == 6, "a client that comes back in time keeps what it had"
    serving.run()
    assert sorted(table.service) == ["c", "stays"]


def test_what_a_resume_finds_of_its_own_is_no_prefix_hit() -> None:
    serving = Serving(cells=30, prefix_block_tokens=1)
    serving.submit(request("a", 6, 9))
    serving.step(2)
    serving.scheduler.preempt("a", serving.now_ms)
    assert serving.step().resumed == 1 and serving.view("a").cached > 0
    totals = serving.totals.values
    assert (totals["prefix_hits"], totals["prefix_misses"], totals["prefix_tokens_saved"]) == (0, 1, 0)
