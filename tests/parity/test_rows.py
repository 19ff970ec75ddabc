"""Row arithmetic: every number by hand."""

from __future__ import annotations

from fractions import Fraction

import pytest

from parity.checkers.rows import (
    Slots,
    backlog_after,
    cadence_dilation,
    causal_pairs,
    check_partition,
    chunk_bounds,
    equal_chunk_history,
    frozen_batch,
    history_bytes,
    history_rows,
    imbalance_area_ms,
    piggybacked_decodes,
    resident_bytes,
    total_pairs,
    unavoidable_rows,
    visible_rows,
)


def test_a_cohort_of_two_and_eight_outputs_lasts_eight_and_idles_six_slots_of_sixteen() -> None:
    slots = frozen_batch((2, 8))
    assert slots == Slots(8, 10, 16)
    assert (slots.idle, slots.utilization) == (6, Fraction(5, 8))


@pytest.mark.parametrize(
    ("total", "size", "bounds"),
    [
        (10, 4, [(0, 4), (4, 8), (8, 10)]),
        (8, 4, [(0, 4), (4, 8)]),
        (3, 4, [(0, 3)]),
        (2, 1, [(0, 1), (1, 2)]),
    ],
)
def test_chunks_cover_every_row_once(total: int, size: int, bounds: list[tuple[int, ...]]) -> None:
    assert chunk_bounds(total, size) == bounds
    assert check_partition(bounds, total) == []


@pytest.mark.parametrize(
    ("chunks", "said"),
    [
        ([(0, 4), (3, 8)], ["chunk [3, 8) does not go on from 4"]),
        ([(0, 4), (5, 8)], ["chunk [5, 8) does not go on from 4"]),
        ([(0, 4), (4, 4), (4, 8)], ["chunk [4, 4) does not go on from 4"]),
        ([(0, 4)], ["chunks end at 4 of 8"]),
        ([(0, 9)], ["chunks end at 9 of 8"]),
    ],
)
def test_chunks_that_overlap_leave_a_gap_or_end_elsewhere_are_named(
    chunks: list[tuple[int, ...]], said: list[str]
) -> None:
    assert check_partition(chunks, 8) == said


def test_a_row_of_a_chunk_sees_everything_up_to_itself() -> None:
    assert visible_rows(4, 6) == [0, 1, 2, 3, 4, 5, 6]
    assert visible_rows(0, 0) == [0]
    assert all(
        sum(len(visible_rows(start, row)) for row in range(start, stop)) == causal_pairs(start, stop)
        for start, stop in [(0, 4), (4, 8), (8, 10)]
    )


def test_pairs_and_history_of_ten_and_sixteen_rows() -> None:
    assert [causal_pairs(*chunk) for chunk in chunk_bounds(10, 4)] == [10, 26, 19]
    assert (total_pairs(10), total_pairs(12), total_pairs(16)) == (55, 78, 136)
    assert history_rows(chunk_bounds(10, 4)) == 12
    assert history_rows(chunk_bounds(16, 4)) == equal_chunk_history(4, 4) == 24
    assert history_bytes(chunk_bounds(16, 4), row_bytes=131_072) == 3_145_728
    assert equal_chunk_history(5, 1) == 0


@pytest.mark.parametrize(
    ("decodes", "chunk", "prompt", "budget", "seqs", "riders"),
    [
        (4, 4, 16, 8, 8, 4),
        (4, 4, 16, 6, 8, 2),
        (4, 4, 16, 4, 8, 0),
        (4, 4, 16, 3, 8, 0),
        (6, 4, 16, 16, 4, 3),
        (5, 6, 3, 9, 16, 5),
        (7, 6, 3, 9, 16, 6),
        (2, 8, 8, 64, 1, 0),
    ],
)
def test_riders_are_the_least_of_decodes_rows_and_sequences_left(
    decodes: int, chunk: int, prompt: int, budget: int, seqs: int, riders: int
) -> None:
    assert piggybacked_decodes(decodes, chunk=chunk, prompt=prompt, budget=budget, seqs=seqs) == riders


def test_three_mixed_steps_of_at_most_10_ms_keep_decodes_of_4_ms_waiting_longer() -> None:
    assert cadence_dilation([8.0, 10.0, 6.0], 4.0) == [2.0, 2.5, 1.5]


def test_uneven_microbatches_idle_28_ms_and_even_ones_2() -> None:
    assert imbalance_area_ms([18, 4, 4]) == 28
    assert imbalance_area_ms([8, 8, 6]) == 2
    assert imbalance_area_ms([5, 5]) == 0


def test_a_backlog_grows_by_what_exceeds_capacity_and_never_falls_below_nothing() -> None:
    assert backlog_after([4, 4, 0, 0, 1], [2, 2, 2, 3, 2]) == [2, 4, 2, 0, 0]
    assert backlog_after([0], [5], start=3) == [0]
    with pytest.raises(ValueError):
        backlog_after([1, 2], [1])


@pytest.mark.parametrize(("demand", "capacity", "rows"), [(480, 260, 220), (260, 260, 0), (9, 10, 0)])
def test_what_exceeds_the_window_cannot_be_served_whatever_the_order(
    demand: int, capacity: int, rows: int
) -> None:
    assert unavoidable_rows(demand, capacity) == rows


def test_resident_bytes_are_summed_over_sessions_and_layers() -> None:
    assert resident_bytes([(10, 0, 10), (5, 5, 0)]) == 30
    assert resident_bytes([]) == 0
