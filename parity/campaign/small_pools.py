"""Small pools with shared prefixes, enumerated in every policy and memory class, on the exact engine: all
end, with their own tokens, and nobody lacks what was kept.

Sessions are pairs of a prompt out of a small tree and a number of outputs, one after the other or together.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from parity.campaign.hunt import judge_hunted
from parity.records import Case, Outcome, Session, Verdict
from scheduler.limits import Layout
from scheduler.policies import option_types, policy_names

# A tree: a root of four tokens, two that go on from it, one that parts within it, one of its own.
TREE = ((1, 2, 3, 4), (1, 2, 3, 4, 5), (1, 2, 3, 4, 6, 7), (1, 2, 8), (9,))
OUTPUTS = (1, 4)
CELLS = (8, 9, 10, 12)
BLOCKS = (1, 4)
GAPS = (0, 2)  # steps between arrivals
KINDS = {
    "dense": ("llama", Layout.UNIFIED),
    "hybrid": ("qwen3next", Layout.UNIFIED),
    "window": ("gemma2", Layout.UNIFIED),
    "streams": ("llama", Layout.STREAMS),
    "stock": ("llama", Layout.STOCK),
}
SLICE = 499  # every so many cases where all are too many; prime, so that all settings are met
PER_PAIR = 10_968  # cases of a policy and a kind


Drawn = tuple[int, int, int, bool, tuple]  # cells, block, gap, whether optimistic, sessions


def small_pools() -> Iterator[Drawn]:
    """All ``PER_PAIR`` pools: two to four sessions, each of which fits alone."""
    shapes = [(prompt, outputs) for prompt in TREE for outputs in OUTPUTS]
    for cells, block, gap, optimistic in itertools.product(CELLS, BLOCKS, GAPS, (False, True)):
        fitting = [shape for shape in shapes if len(shape[0]) + shape[1] - 1 <= cells]
        for count in (2, 3, 4):
            for chosen in itertools.combinations(fitting, count):
                yield cells, block, gap, optimistic, chosen


def small_pool_case(policy: str, kind: str, drawn: Drawn) -> Case:
    """A pool as a case under a policy, in a memory class."""
    cells, block, gap, optimistic, chosen = drawn
    family, layout = KINDS[kind]
    sessions = tuple(
        Session(
            prompt=prompt,
            max_tokens=outputs,
            arrival_step=gap * index,
            priority=index % 2,
            client_id="ab"[index % 2],
        )
        for index, (prompt, outputs) in enumerate(chosen)
    )
    return Case(
        family=family,
        model=family,
        sessions=sessions,
        layout=layout,
        pool_cells=cells,
        num_sequences=4 if layout is Layout.STREAMS else 6,
        max_num_batched_tokens=4,
        max_num_seqs=4,
        prefix_block_tokens=block,
        policy=policy,
        policy_options=_options(policy, len(sessions)) if optimistic else (),
    )


def _options(policy: str, count: int) -> tuple:
    """Room for the prompt is room enough, where the policy can be told so."""
    if "reservation" not in option_types(policy):
        return ()
    forecasts = {f"s{index}": {"point": 1} for index in range(count)}
    return (("reservation", {"kind": "point", "forecasts": forecasts}),)


@dataclass(slots=True)
class SmallPools:
    """What an enumeration came to: cases by policy and kind, marks, and the failures."""

    cases: Counter[tuple[str, str]] = field(default_factory=Counter)
    marks: Counter[str] = field(default_factory=Counter)
    failures: list[Outcome] = field(default_factory=list)


def play_small_pools(policy: str, kind: str, *, step: int = 1, first: int = 0) -> SmallPools:
    """Every ``step``-th case of a policy and a kind, from number ``first`` on."""
    played = SmallPools()
    for drawn in itertools.islice(small_pools(), first, None, step):
        case = small_pool_case(policy, kind, drawn)
        outcome, marks = judge_hunted(case, ask_policy=False)
        played.cases[policy, kind] += 1
        played.marks.update(marks)
        if outcome.verdict is not Verdict.PASS:
            played.failures.append(outcome)
    return played


def play_slice(step: int = SLICE) -> SmallPools:
    """Every ``step``-th case of each policy and kind, each pair from another one on."""
    whole = SmallPools()
    for number, (policy, kind) in enumerate(itertools.product(policy_names(), KINDS)):
        played = play_small_pools(policy, kind, step=step, first=number % step)
        whole.cases.update(played.cases)
        whole.marks.update(played.marks)
        whole.failures += played.failures
    return whole
