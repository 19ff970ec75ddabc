"""Small pools with shared prefixes, enumerated in every policy: all end, nobody lacks what was kept.

Sessions are pairs of a prompt out of a small tree and a number of outputs; one after the other or together.
The default suite plays a slice of each policy's cases, the nightly one all of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from parity.checkers.conservation import check_conservation
from parity.checkers.giving_way import check_giving_way
from parity.history import Run, TraceStep
from parity.records import Case
from scheduler.limits import Layout
from scheduler.policies import option_types, policy_names
from tests.scheduler.serving import OPTIMISTIC, Serving, request

# A tree: a root of four tokens, two that go on from it, one that parts within it, one of its own.
TREE = ((1, 2, 3, 4), (1, 2, 3, 4, 5), (1, 2, 3, 4, 6, 7), (1, 2, 8), (9,))
OUTPUTS = (1, 4)
KINDS = {
    "dense": {},
    "hybrid": {"recurrent": True},
    "window": {"window": 3},
    "streams": {"layout": Layout.STREAMS},
    "stock": {"layout": Layout.STOCK},
}
CELLS = (8, 9, 10, 12)
BLOCKS = (1, 4)
STEPS_PER_ROW = 40
SLICE = 499  # every so many cases in the default suite; prime, so that all settings are met


def all_cases() -> Iterator[tuple]:
    """Every (cells, block, gap, sessions, whether optimistic): up to 4 sessions that fit the pool alone."""
    shapes = [(prompt, outputs) for prompt in TREE for outputs in OUTPUTS]
    settings = itertools.product(CELLS, BLOCKS, (0, 2), (False, True))
    for cells, block, gap, optimistic in settings:
        fitting = [shape for shape in shapes if len(shape[0]) + shape[1] - 1 <= cells]
        for count in (2, 3, 4):
            for sessions in itertools.combinations(fitting, count):
                yield cells, block, gap, optimistic, sessions


def number_of_cases() -> int:
    """By arithmetic: the largest of the ten shapes has 6 + 4 - 1 = 9 rows, so 8 cells fit nine of them."""
    per_pool = {8: 36 + 84 + 126, 9: 45 + 120 + 210, 10: 45 + 120 + 210, 12: 45 + 120 + 210}
    return sum(per_pool[cells] for cells in CELLS) * len(BLOCKS) * 2 * 2


def play(policy: str, kind: str, case: tuple) -> Serving:
    cells, block, gap, optimistic, sessions = case
    settings = KINDS[kind]
    streams = settings.get("layout") is Layout.STREAMS
    serving = Serving(
        policy=policy,
        cells=cells * 4 if streams else cells,
        ids=4 if streams else 6,
        options=OPTIMISTIC if optimistic and "reservation" in option_types(policy) else {},
        prefix_block_tokens=block,
        max_num_batched_tokens=4,
        max_num_seqs=4,
        **settings,
    )
    rows = sum(len(prompt) + outputs for prompt, outputs in sessions)
    for step in range(STEPS_PER_ROW * rows):
        for index, (prompt, outputs) in enumerate(sessions):
            if step == gap * index:
                asked = request(f"s{index}", prompt, outputs, priority=index % 2, client_id="ab"[index % 2])
                assert serving.submit(asked) == [None]
        if step > gap * len(sessions) and serving.scheduler.is_idle:
            break
        serving.step()
        check_conservation(serving.scheduler.memory)
    assert len(serving.ends) == len(sessions), f"livelock: {policy}, {kind}, {case}"
    serving.check_all_as_alone()
    layout = settings.get("layout", Layout.UNIFIED)
    run = Run(Case(family="llama", model="llama", sessions=(), layout=layout))
    run.records = serving.records
    run.trace = [TraceStep(step, flight, result) for step, (flight, result) in enumerate(serving.trace)]
    assert check_giving_way(run, serving.scheduler.policy) == [], (policy, kind, case)
    return serving


def test_the_enumeration_is_as_large_as_it_says() -> None:
    assert sum(1 for _ in all_cases()) == number_of_cases() == 10968


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("policy", policy_names())
def test_small_pools_end_in_every_policy(policy: str, kind: str) -> None:
    first = policy_names().index(policy) * len(KINDS) + list(KINDS).index(kind)
    played = [play(policy, kind, case) for case in itertools.islice(all_cases(), first % SLICE, None, SLICE)]
    assert len(played) >= 10968 // SLICE
    assert sum(serving.totals.values["prefix_hits"] for serving in played) > 0


@pytest.mark.nightly
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("policy", policy_names())
def test_every_small_pool_ends_in_every_policy(policy: str, kind: str) -> None:
    played = sum(1 for case in all_cases() if play(policy, kind, case))
    assert played == number_of_cases()
