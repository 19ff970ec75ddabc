"""Numbers of chunked prefill, and the batch shapes of SARATHI, Sarathi-Serve and ORCA."""

from __future__ import annotations

import pytest

from parity.checkers.rows import causal_pairs, history_rows, piggybacked_decodes, prefill_chunks
from parity.records import Fault, FaultKind
from parity.run.runner import Replay, replay
from parity.suites.workloads import intervals, play, rows_per_step, session, workload

ROW_BYTES = 131_072  # the profile that the source document declares for its byte figures


def pairs_of(chunks: list[tuple[int, ...]]) -> list[int]:
    return [causal_pairs(start, stop) for start, stop in chunks]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 6, 12])
def test_twelve_rows_have_78_causal_pairs_whatever_the_chunk(size: int) -> None:
    played = play(session(12, 1), policy="sarathi", options={"chunk_tokens": size})
    chunks = prefill_chunks(played.run, 0)
    assert [stop - start for start, stop in chunks] == [size] * (12 // size) + (
        [12 % size] if 12 % size else []
    )
    assert sum(pairs_of(chunks)) == 78


def three_decodes_and_a_prompt_of_ten() -> Replay:
    decodes = [session(1, 20, first_token=2000 + 100 * i) for i in range(3)]
    return play(
        *decodes,
        session(10, 1, at=3),
        policy="sarathi",
        options={"chunk_tokens": 4},
        max_num_batched_tokens=8,
    )


def test_ten_rows_as_4_4_2_have_10_26_19_pairs_and_12_rows_read_again() -> None:
    chunks = prefill_chunks(three_decodes_and_a_prompt_of_ten().run, 3)
    assert chunks == [(0, 4), (4, 8), (8, 10)]
    assert pairs_of(chunks) == [10, 26, 19]
    assert sum(pairs_of(chunks)) == 55
    assert history_rows(chunks) == 12


def test_all_three_decodes_ride_with_every_chunk() -> None:
    mixed = [step for step in rows_per_step(three_decodes_and_a_prompt_of_ten()) if "s3" in step]
    assert mixed == [{"s3": rows, "s0": 1, "s1": 1, "s2": 1} for rows in (4, 4, 2)]


def test_sixteen_rows_by_four_have_136_pairs_24_rows_read_again_and_four_riders() -> None:
    decodes = [session(1, 20, first_token=2000 + 100 * i) for i in range(4)]
    played = play(
        *decodes,
        session(16, 1, at=4),
        policy="sarathi",
        options={"chunk_tokens": 4},
        max_num_batched_tokens=8,
        max_num_seqs=8,
    )
    chunks = prefill_chunks(played.run, 4)
    assert len(chunks) == 4
    assert sum(pairs_of(chunks)) == 136
    assert history_rows(chunks) == 24
    assert history_rows(chunks) * ROW_BYTES == 3 * 1024 * 1024
    assert [len(step) - 1 for step in rows_per_step(played) if "s4" in step] == [4, 4, 4, 4]


@pytest.mark.parametrize(
    ("decodes", "budget", "seqs", "chunk", "prompt"),
    [
        (4, 8, 8, 4, 16),
        (4, 6, 8, 4, 16),
        (4, 4, 8, 4, 16),
        (6, 16, 4, 4, 16),
        (5, 9, 16, 6, 3),
        (2, 64, 16, 8, 8),
    ],
)
def test_sarathi_piggybacks_the_minimum_of_decodes_rows_and_sequences_left(
    decodes: int, budget: int, seqs: int, chunk: int, prompt: int
) -> None:
    # The decodes are spread so that they have all started; one sequence is kept for the prompt.
    decodes = min(decodes, seqs - 1)
    started = [session(1, 80, first_token=2000 + 100 * i) for i in range(decodes)]
    played = play(
        *started,
        session(prompt, 1, at=40),
        policy="sarathi",
        options={"chunk_tokens": chunk},
        max_num_batched_tokens=budget,
        max_num_seqs=seqs,
    )
    first = next(step for step in rows_per_step(played) if f"s{decodes}" in step)
    assert first[f"s{decodes}"] == min(chunk, prompt)
    assert len(first) - 1 == piggybacked_decodes(
        decodes, chunk=chunk, prompt=prompt, budget=budget, seqs=seqs
    )


def test_sarathi_has_one_chunk_per_step_however_many_prompts_wait() -> None:
    played = play(
        *[session(9, 3, first_token=2000 + 100 * i) for i in range(4)],
        policy="sarathi",
        options={"chunk_tokens": 4},
    )
    for traced in played.run.trace:
        assert (
            sum(
                c.stop <= 9 and traced.flight.views[c.request_id].emitted == 0
                for c in traced.flight.plan.chunks
            )
            <= 1
        )


def test_4096_rows_by_640_are_six_chunks_and_one_of_256_with_128_rows_left() -> None:
    played = play(
        session(4096, 1),
        policy="sarathi",
        options={"chunk_tokens": 640},
        max_num_batched_tokens=768,
        pool_cells=5000,
    )
    sizes = [stop - start for start, stop in prefill_chunks(played.run, 0)]
    assert sizes == [640] * 6 + [256]
    ledger = played.run.trace[0].flight.plan.ledger
    assert ledger.max_num_batched_tokens - ledger.num_tokens == 128


def test_sarathi_serve_runs_all_decodes_then_the_partial_prefill_within_tau_then_new_ones() -> None:
    decodes = [session(1, 20, first_token=2000 + 100 * i) for i in range(3)]
    played = play(
        *decodes,
        session(10, 2, at=3, first_token=4000),
        session(4, 1, at=3, first_token=5000),
        policy="sarathi_serve",
        options={"tau": 8},
    )
    assert rows_per_step(played)[3:6] == [
        {"s0": 1, "s1": 1, "s2": 1, "s3": 5},
        {"s0": 1, "s1": 1, "s2": 1, "s3": 5},
        {"s0": 1, "s1": 1, "s2": 1, "s3": 1, "s4": 4},
    ]


def test_sarathi_serve_never_leaves_a_decode_out_while_a_prefill_runs() -> None:
    played = play(
        *[session(7, 9, at=2 * i, first_token=2000 + 100 * i) for i in range(6)],
        policy="sarathi_serve",
        options={"tau": 9},
    )
    emitting: set[str] = set()
    for traced in played.run.trace:
        step = {c.request_id for c in traced.flight.plan.chunks}
        assert len(emitting - step) == 0
        emitting = {
            f"s{i}"
            for i, steps in played.run.emitted_at.items()
            if steps[0] <= traced.step and len([s for s in steps if s <= traced.step]) < 9
        }


def test_orca_stops_at_the_first_that_does_not_fit_and_never_skips_to_a_smaller_one() -> None:
    played = play(
        session(4, 5),
        session(4, 5, first_token=2000),
        session(1, 1, first_token=3000),
        policy="orca",
        pool_cells=12,
    )
    steps = intervals(played)
    assert [name for name, _, _ in steps[0]] == ["s0"]  # s1 needs 8 rows of the 4 left; s2 would fit
    assert all("s2" not in [name for name, _, _ in step] for step in steps[:5])
    assert [name for name, _, _ in steps[5]] == ["s1", "s2"]


def test_orca_reserves_the_declared_maximum_although_the_output_turns_out_short() -> None:
    played = play(
        session(4, 9, hidden=3),
        session(4, 9, hidden=3, first_token=2000),
        policy="orca",
        options={"slots": 20},
    )
    steps = [sorted(step) for step in rows_per_step(played)]
    assert steps == [["s0"], ["s0"], ["s0"], ["s1"], ["s1"], ["s1"]]  # 12 + 12 rows declared, 6 + 6 realised


def test_orca_batches_at_most_max_bs_requests_by_arrival() -> None:
    played = play(
        *[session(2, 3, first_token=2000 + 100 * i) for i in range(5)], policy="orca", max_num_seqs=3
    )
    assert [name for name, _, _ in intervals(played)[0]] == ["s0", "s1", "s2"]
    assert max(map(len, intervals(played))) == 3


def test_orca_runs_a_prompt_in_one_iteration_and_waits_until_it_fits_whole() -> None:
    played = play(session(5, 3), session(6, 1, first_token=2000), policy="orca", max_num_batched_tokens=8)
    assert [rows for _, *rows in map(tuple, [step[0] for step in intervals(played)[:1]])] == [[0, 5]]
    chunks = prefill_chunks(played.run, 1)
    assert chunks == [(0, 6)]


def test_orca_stops_at_the_first_that_its_slots_do_not_hold() -> None:
    """s1 would exceed the reserved slots; s2 would not, but comes after it."""
    played = play(
        session(4, 5),
        session(4, 5, first_token=2000),
        session(1, 2, first_token=3000),
        policy="orca",
        options={"slots": 12},
    )
    steps = [sorted(step) for step in rows_per_step(played)]
    assert steps[:5] == [["s0"]] * 5
    assert steps[5] == ["s1", "s2"]


def test_orca_reserves_prompt_and_max_tokens_of_each_first_selection() -> None:
    """Two declare 4 + 9 = 13 tokens each: 26 slots hold both, 25 one (24 rows would fit)."""
    pair = session(4, 9), session(4, 9, first_token=2000)
    for slots, first in ((26, ["s0", "s1"]), (25, ["s0"])):
        played = play(*pair, policy="orca", options={"slots": slots})
        assert sorted(rows_per_step(played)[0]) == first
    for cells, first in ((26, ["s0", "s1"]), (25, ["s0"])):
        assert sorted(rows_per_step(play(*pair, policy="orca", pool_cells=cells))[0]) == first


def test_orca_refuses_at_the_door_what_exceeds_its_slots_alone() -> None:
    played = replay(
        workload(session(4, 9), session(4, 8, first_token=2000), policy="orca", options={"slots": 12})
    )
    assert played.run.problems == []
    refusal = played.run.refusals[0]
    assert (refusal.retryable, refusal.needed, refusal.available) == (False, 13, 12)
    assert sorted(played.outputs) == [1]


def test_orca_lets_a_request_whose_last_token_needs_no_row_take_the_whole_pool() -> None:
    played = play(session(4, 9), session(1, 1, first_token=2000), policy="orca", pool_cells=12)
    assert [sorted(step) for step in rows_per_step(played)] == [["s0"]] * 9 + [["s1"]]


def test_orca_keeps_the_reservation_of_a_suspended_request_to_its_end() -> None:
    """s0 is suspended in step 1; s1 arrives with it: 9 + 4 slots are more than 12."""
    preempted = (Fault(kind=FaultKind.PREEMPT, step=2, session=0),)
    played = play(
        session(4, 5),
        session(2, 2, at=2, first_token=2000),
        policy="orca",
        options={"slots": 12},
        faults=preempted,
    )
    steps = [sorted(step) for step in rows_per_step(played)]
    assert steps.index(["s1"]) > max(i for i, step in enumerate(steps) if "s0" in step)
    assert sum(record.resumed for record in played.run.records) == 1
