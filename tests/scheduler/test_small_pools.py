"""Small pools, enumerated: no livelock, no cell lost, and every session gives what it gives alone."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest

from parity.checkers.conservation import check_conservation
from parity.mutants import find_mutant
from parity.mutants.mutant import Reach
from scheduler.policies import policy_names
from tests.scheduler.serving import OPTIMISTIC, Serving, request

# bound on steps for each row of work: far below it in every case, a livelock would exceed any
STEPS_PER_ROW = 12


def sample_cases(cells: int) -> Iterator[Any]:
    """Up to 4 sessions that fit alone, too large to enumerate; all at once, and one after the other."""
    shapes = [(1, 2), (2, 3), (3, 1), (4, 4), (1, cells), (cells, 1)]
    fitting = [(p, t) for p, t in dict.fromkeys(shapes) if p + t - 1 <= cells]
    for count in (1, 2, 3, 4):
        for sessions in itertools.combinations_with_replacement(fitting, count):
            yield sessions, (0,) * count
            yield sessions, tuple(2 * i for i in range(count))


def play(sessions: Any, arrivals: Any, *, optimistic: bool, shared: bool, **fields: Any) -> Serving:
    serving = Serving(
        options=OPTIMISTIC if optimistic else {},
        prefix_block_tokens=1,
        max_num_seqs=4,
        max_idle_steps=8,
        **fields,
    )
    work = sum(p + t for p, t in sessions)
    for step in range(STEPS_PER_ROW * work + 8):
        for index, (p, t) in enumerate(sessions):
            if arrivals[index] == step:
                prompt = range(p) if shared else p
                assert serving.submit(request(f"s{index}", prompt, t)) == [None]
        if step > max(arrivals) and serving.scheduler.is_idle:
            break
        serving.step()
        check_conservation(serving.scheduler.memory)
    assert serving.scheduler.is_idle, f"livelock: {sessions}, {arrivals}, {fields}"
    serving.check_all_as_alone()
    return serving


@pytest.mark.parametrize("recurrent", [False, True], ids=["positional", "hybrid"])
@pytest.mark.parametrize("shared", [False, True], ids=["apart", "shared"])
@pytest.mark.parametrize("cells", [4, 8])
def test_small_pools_have_no_livelock(cells: int, shared: bool, recurrent: bool) -> None:
    played = preempted = 0
    for sessions, arrivals in sample_cases(cells):
        for optimistic, ids in ((False, 6), (True, 3)) if len(sessions) == 4 else ((True, 3), (True, 12)):
            serving = play(
                sessions,
                arrivals,
                optimistic=optimistic,
                shared=shared,
                cells=cells,
                ids=ids,
                recurrent=recurrent,
                max_num_batched_tokens=3,
            )
            preempted += serving.totals.values["preempted"]
            played += 1
    assert played > 200
    assert preempted > 0, "optimistic admission must have met a full pool"


# Most rows of a session, by how many there are: so that all of them fill the largest pool, or would.
MOST_ROWS = {1: 8, 2: 4, 3: 2, 4: 2}
MORE_ROWS = {1: 8, 2: 8, 3: 3, 4: 3}
POOLS = range(1, 9)


def enumerate_cases(cells: int, most_rows: dict[int, int]) -> Iterator[Any]:
    """All there is: lengths of prompt and output that fit, in every order, each with the one before or later.

    Names carry no meaning, so sequences of lengths are all orders up to symmetry.
    """
    for count, rows in most_rows.items():
        lengths = range(1, min(rows, cells) + 1)
        shapes = [(p, t) for p, t in itertools.product(lengths, repeat=2) if p + t - 1 <= min(rows, cells)]
        for sessions in itertools.product(shapes, repeat=count):
            for gaps in itertools.product((0, 2), repeat=count - 1):
                yield sessions, tuple(itertools.accumulate(gaps, initial=0))


def number_of_cases(cells: int, most_rows: dict[int, int]) -> int:
    """How many there must be, by arithmetic: n rows are n (n + 1) / 2 pairs of lengths."""
    fitting = {count: min(rows, cells) for count, rows in most_rows.items()}
    return sum((n * (n + 1) // 2) ** count * 2 ** (count - 1) for count, n in fitting.items())


def check_every_case(
    cells: int, most_rows: dict[int, int], *, shared: bool = False, recurrent: bool = False
) -> None:
    played, preempted = {}, 0
    for sessions, arrivals in enumerate_cases(cells, most_rows):
        serving = play(
            sessions,
            arrivals,
            optimistic=True,
            shared=shared,
            cells=cells,
            ids=12,
            recurrent=recurrent,
            max_num_batched_tokens=3,
        )
        played[sessions, arrivals] = len(serving.ends)
        preempted += serving.totals.values["preempted"]
    assert all(ended == len(sessions) for (sessions, _), ended in played.items())
    assert len(played) == number_of_cases(cells, most_rows)
    assert preempted > 0 or cells in (1, 8), "optimistic admission must have met a full pool"


@pytest.mark.parametrize("cells", POOLS)
def test_every_case_of_a_small_pool_completes_as_alone_and_loses_no_cell(cells: int) -> None:
    check_every_case(cells, MOST_ROWS)


@pytest.mark.nightly
@pytest.mark.parametrize(("shared", "recurrent"), [(True, False), (False, True), (True, True)])
@pytest.mark.parametrize("cells", POOLS)
def test_every_case_of_a_small_pool_with_shares_and_states(cells: int, shared: bool, recurrent: bool) -> None:
    check_every_case(cells, MOST_ROWS, shared=shared, recurrent=recurrent)


@pytest.mark.nightly
@pytest.mark.parametrize("cells", POOLS)
def test_every_larger_case_of_a_small_pool(cells: int) -> None:
    check_every_case(cells, MORE_ROWS)


@pytest.mark.parametrize("fault", ["cell_leaked_at_every_end", "shared_cells_freed_with_one_owner"])
def test_enumeration_notices_a_planted_fault(fault: str) -> None:
    with find_mutant(fault).plant(Reach()), pytest.raises(AssertionError):
        check_every_case(4, {2: 4}, shared=True)


def test_enumeration_is_as_large_as_it_says() -> None:
    assert sum(number_of_cases(cells, MOST_ROWS) for cells in POOLS) == 6516


@pytest.mark.parametrize("policy", policy_names())
def test_no_policy_has_a_livelock_in_a_small_pool(policy: str) -> None:
    for sessions, arrivals in itertools.islice(sample_cases(6), 0, None, 23):
        for ids, recurrent in itertools.product((3, 12), (False, True)):
            serving = Serving(
                policy=policy,
                prefix_block_tokens=1,
                max_num_seqs=3 if policy.startswith("vllm_") else 4,
                cells=6,
                ids=ids,
                recurrent=recurrent,
                max_num_batched_tokens=3,
            )
            for step in range(max(arrivals) + 1):
                serving.submit(
                    *[
                        request(f"s{i}", range(p), t)
                        for i, (p, t) in enumerate(sessions)
                        if arrivals[i] == step
                    ]
                )
                serving.step()
            serving.run(most=40 * sum(map(sum, sessions)))
            serving.check_all_as_alone()
