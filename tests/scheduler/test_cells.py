"""Ordered cells: increasing per session, and never lost."""

from __future__ import annotations

from typing import Any

import pytest

from parity.checkers.conservation import check_cells
from parity.engines.exact_memory import EngineAbort
from scheduler.cells import CellPool, lowest_cells, split_rows
from scheduler.engine import OpKind
from scheduler.limits import Layout, PoolLimits, Sharing
from scheduler.loop import NoProgress
from tests.scheduler.serving import Serving, request


def pool(cells: int = 8, ids: int = 6, **fields: Any) -> CellPool:
    return CellPool(PoolLimits(num_cells=cells, num_sequences=ids, **fields))


def grow(cells: CellPool, seq_id: int, count: int) -> None:
    assert cells.place([(seq_id, 0, count)]) is None
    cells.take_calls()
    check_cells(cells)


@pytest.mark.parametrize(
    ("count", "width", "sizes"),
    [
        (1, 63, [1]),
        (63, 63, [63]),
        (64, 63, [62, 2]),
        (65, 63, [63, 2]),
        (127, 63, [63, 62, 2]),
        (0, 63, []),
        (3, 2, [2, 1]),
        (5, 4, [3, 2]),
    ],
)
def test_calls_never_end_in_a_lone_row_that_could_have_company(
    count: int, width: int, sizes: list[int]
) -> None:
    assert split_rows(count, width) == sizes


def test_lowest_cells_lie_above_the_floor_and_increase() -> None:
    assert lowest_cells(0b1011_0110, above=1, count=3) == [2, 4, 5]
    assert lowest_cells(0b1011_0110, above=5, count=2) is None


def test_retired_cells_stay_owned_until_a_row_takes_them() -> None:
    cells = pool()
    first, second = cells.open(), cells.open()
    grow(cells, first, 3)
    grow(cells, second, 2)
    cells.retire(first)
    assert cells.take_pending() == ()
    third = cells.open()
    assert cells.place([(third, 0, 2)]) is None
    (call,) = cells.take_calls()
    assert call.cells == (1, 2)
    assert [(op.kind, op.seq_id, op.start, op.stop) for op in call.ops] == [(OpKind.REMOVE, first, 0, 2)]


def test_an_id_is_free_again_when_its_last_cell_is_taken() -> None:
    cells = pool(ids=3)
    first, second = cells.open(), cells.open()
    grow(cells, first, 2)
    grow(cells, second, 1)
    cells.retire(first)
    assert not cells.free_ids
    grow(cells, second, 1)
    assert not cells.free_ids, "second went above itself, nothing of the retired id was taken"
    cells.retire(second)
    assert len(cells.free_ids) == 2, "nothing is live above the retired cells, so all were freed"


def test_cells_at_the_top_are_freed_at_once_so_that_the_pool_stays_short() -> None:
    cells = pool()
    first, second = cells.open(), cells.open()
    grow(cells, first, 3)
    grow(cells, second, 3)
    cells.retire(second)
    assert cells.frontier == 4
    assert [op.kind for op in cells.take_pending()] == [OpKind.REMOVE]


def test_shared_cells_are_counted_once_and_outlive_their_donor() -> None:
    cells = pool()
    donor = cells.open()
    grow(cells, donor, 4)
    heir = cells.share(donor, 3)
    assert cells.num_used() == 4
    cells.retire(donor)
    assert cells.num_used() == 3
    check_cells(cells)
    cells.retire(heir)
    assert cells.num_used() == 0


def test_reservation_is_undone_whole() -> None:
    cells = pool(cells=4)
    first, second = cells.open(), cells.open()
    assert cells.place([(first, 0, 3), (second, 3, 2)]) == second
    cells.undo()
    assert cells.num_available() == 4
    check_cells(cells)


def test_rows_to_keep_is_the_most_that_leaves_the_wanted_room() -> None:
    cells = pool(cells=8)
    low, high = cells.open(), cells.open()
    grow(cells, low, 4)
    grow(cells, high, 4)
    cells.retire(low)
    assert [cells.rows_to_keep(high, wanted) for wanted in (0, 1)] == [4, 0]
    low = cells.open()
    grow(cells, low, 2)
    assert cells.num_available() == 2 and cells.place([(low, 0, 2)]) is None


def test_pool_with_live_sequences_is_never_cleared() -> None:
    cells = pool()
    cells.open()
    with pytest.raises(AssertionError, match="live sequences"):
        cells.clear()


def test_streams_refuse_to_share_by_position() -> None:
    with pytest.raises(ValueError, match="partial copy"):
        PoolLimits(layout=Layout.STREAMS, sharing=Sharing.POSITIONAL)


def test_hybrids_get_one_group_of_equal_lengths_per_call() -> None:
    serving = Serving(cells=60, recurrent=True, prefix_cache=False, max_chunk_tokens=5)
    serving.submit(request("a", 2, 6), request("b", 2, 6))
    serving.step(2)
    serving.submit(request("c", 9, 2), request("d", 7, 2))
    flight = serving.launch()
    lengths = []
    for call in flight.batch.stages[0]:
        rows: dict[int, int] = {}
        for seq_id in call.seq_ids:
            rows[seq_id] = rows.get(seq_id, 0) + 1
        lengths.append(sorted(rows.values()))
    assert lengths == [[1, 1], [5], [5]]
    serving.commit(flight)
    serving.run()
    serving.check_all_as_alone()


def test_a_policy_that_lets_nobody_in_is_overruled_after_a_bounded_number_of_steps() -> None:
    serving = Serving(max_idle_steps=5)
    serving.submit(request("stuck", 3, 2), request("behind", 2, 2))
    serving.scheduler.policy.chunk_tokens = lambda state, view, available: 0
    serving.step(10)  # five without a row, five without shares
    assert [record.escalations for record in serving.records] == [0, 0, 0, 0, 1, 0, 0, 0, 0, 1]
    serving.step(2)
    assert list(serving.ends) == ["stuck"]  # alone until it ended, then the policy is asked again
    serving.run(most=13)
    serving.check_all_as_alone()


def test_a_scheduler_that_stops_moving_is_an_error_that_names_the_session() -> None:
    serving = Serving(max_idle_steps=5)
    serving.submit(request("stuck", 3, 2))
    serving.scheduler.memory.open = lambda view, count: False
    with pytest.raises(NoProgress, match="5 steps without progress.*stuck"):
        serving.step(15)
    assert len(serving.records) == 14
    serving.scheduler.abandon("nothing moves", 0.0)
    serving.collect()
    assert serving.ends["stuck"].error == "nothing moves" and serving.scheduler.is_idle


def test_waiting_for_a_foreign_owner_is_no_livelock() -> None:
    serving = Serving(max_idle_steps=3)
    serving.submit(request("far", 3, 2))
    serving.scheduler.set_ready("far", False)
    serving.step(20)
    serving.scheduler.set_ready("far", True)
    serving.run()
    serving.check_all_as_alone()


def test_misplaced_rows_are_seen_by_the_exact_engine() -> None:
    serving = Serving()
    serving.submit(request("a", 4, 4))
    serving.step()
    owner = next(iter(serving.scheduler.memory.pools[0].owners.values()))
    owner.cells[-1] += 1
    with pytest.raises((EngineAbort, AssertionError)):
        serving.run()
