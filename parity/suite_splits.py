"""Suites across stages: generated concurrent cases on every pinned split, each session
against the whole model alone.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from parity.contained import run_case
from parity.errors import UsageError
from parity.records import Case, Fault, FaultKind, Outcome, Session, Tier
from parity.splits import Split, load_splits
from parity.strategies import tokens_of
from parity.suite import FAILURES, SuiteResult, run_suite
from scheduler.limits import Layout
from scheduler.records import SamplingParams

MIN_SESSIONS = 50
ROOMIER_CELLS = 24


def pinned_splits(family: str, row: str = "tiny") -> list[Split]:
    """Splits of one model row, in the file's order. Raises ``UsageError`` if there is none."""
    splits = [split for split in load_splits(family) if split.row == row]
    if not splits:
        raise UsageError(f"model {family}:{row} has no pinned split", where=f"splits/{family}.yaml")
    return splits


def across_stages(case: Case, split: Split) -> Case:
    """The case on a chain whose pools differ in size; which stage has the smallest pool depends on the case.

    Different pools mean different cells, so different row orders and calls, in every stage.
    """
    count = len(split.stages)
    if case.layout is not Layout.UNIFIED:
        return replace(case, split=split.name)
    tightest = (len(case.sessions) + case.num_sequences) % count
    cells = tuple(case.pool_cells + ROOMIER_CELLS * ((index - tightest) % count) for index in range(count))
    return replace(case, split=split.name, stage_cells=cells)


def crowd_case(family: str, split: Split, number: int, *, sessions: int = 18) -> Case:
    """A dense case: many sessions at once on a chain with one tight pool, so that
    few steps exercise everything.

    ``number`` chooses lengths, arrivals and faults; families of prompts share their first tokens.
    """
    rng = random.Random(f"crowd {family} {split.name} {number}")
    trees = [tokens_of(rng.randrange(1 << 30), 48) for _ in range(2)]
    cancelled = rng.sample(range(sessions), 2)  # while they wait or run
    made = []
    for index in range(sessions):
        own = tokens_of(rng.randrange(1 << 30), rng.choice((1, 2, 5, 15, 16, 17, 31, 33, 48, 70)))
        prompt = own if index % 3 == 0 else trees[index % 2][: rng.choice((16, 17, 32, 40))] + own[:9]
        sampling = SamplingParams(temperature=1.0, seed=index) if index % 7 == 3 else SamplingParams()
        made.append(
            Session(
                prompt=prompt,
                max_tokens=9 if index in cancelled else rng.randint(2, 9),
                arrival_step=0 if index in cancelled else rng.choice((0, 0, index, 18)),
                sampling=sampling,
            )
        )
    faults = [
        Fault(kind=FaultKind.PREEMPT, step=step, session=rng.randrange(sessions), in_flight=step % 4 == 3)
        for step in range(3, 21, 2)
    ]
    faults += [
        Fault(kind=FaultKind.CANCEL, step=step, session=session, in_flight=step == 4)
        for step, session in zip((2, 4), cancelled, strict=True)
    ]
    case = Case(
        family=family,
        model=f"{family}:{split.row}",
        sessions=tuple(made),
        pool_cells=230,
        num_sequences=20,
        max_num_batched_tokens=63,
        max_num_seqs=14,
        max_chunk_tokens=32,
        prefix_block_tokens=8,
        faults=tuple(faults),
        kv_type="f32" if number % 3 == 2 else "f16",
    )
    return across_stages(case, split)


def brim_case(family: str, split: Split) -> Case:
    """A small case that fills the tightest pool to its last cell: beside a prefix that is kept but idle."""
    kept = tokens_of(1, 32)
    sessions = (
        Session(prompt=kept, max_tokens=2),
        Session(prompt=tokens_of(2, 12), max_tokens=42, arrival_step=6),
        Session(prompt=kept + tokens_of(3, 5), max_tokens=3, arrival_step=52),
    )
    case = Case(
        family=family,
        model=f"{family}:{split.row}",
        sessions=sessions,
        pool_cells=64,
        num_sequences=8,
        max_num_batched_tokens=32,
        prefix_block_tokens=16,
    )
    return across_stages(case, split)


def dense_cases(family: str, split: Split) -> list[Case]:
    """Fixed cases that compare more than ``MIN_SESSIONS`` sessions and hit every
    mark of every family's manifest.
    """
    return [brim_case(family, split), *(crowd_case(family, split, number) for number in range(3))]


def run_split_suite(
    family: str,
    split: Split,
    *,
    min_sessions: int = MIN_SESSIONS,
    layout: Layout = Layout.UNIFIED,
    stage_processes: bool = False,
    seed_value: int | None = None,
    tier: Tier = Tier.BITS,
    failures: Path = FAILURES,
    run: Callable[..., Outcome] = run_case,
) -> SuiteResult:
    """``run_suite`` with every case on a chain of the split's stages."""

    def run_across(case: Case) -> Outcome:
        return run(across_stages(case, split), stage_processes=stage_processes)

    return run_suite(
        family,
        layout,
        model=f"{family}:{split.row}",
        min_sessions=min_sessions,
        seed_value=seed_value,
        tier=tier,
        run=run_across,
        failures=failures,
    )


__all__ = [
    "MIN_SESSIONS",
    "across_stages",
    "brim_case",
    "crowd_case",
    "dense_cases",
    "pinned_splits",
    "run_split_suite",
]
