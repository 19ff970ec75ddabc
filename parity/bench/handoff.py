"""What handing hidden states from stage to stage costs, beside the unsplit model in the same run."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from statistics import median
from time import perf_counter
from typing import Any

from parity.engines.numerics import NumericsProfile
from parity.engines.pool import SamplingEngine
from parity.models import resolve_model
from parity.models.families import load_family
from parity.records import Case, Session
from parity.run.chains import StageChains
from parity.run.drive import Driver
from parity.run.runner import Runner, pool_limits
from scheduler.engine import Batch
from scheduler.loop import Scheduler
from scheduler.policies import make_policy
from scheduler.records import IterationPlan, IterationResult

UNSPLIT, IN_PROCESS, PROCESSES = "unsplit", "one process", "a process each"
PROMPT_TOKENS, OUTPUT_TOKENS = 32, 24


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoffCost:
    """One way to run a workload. Times are medians over rounds, of the engine alone.

    ``us_per_token`` is engine time per computed row; ``ratio`` that of the unsplit model divided by it (1.0:
    as fast); ``handoff_us`` the extra time per token and hand-off, None for the unsplit model.
    """

    model: str
    split: str
    stages: int
    sessions: int
    how: str
    tokens: int
    us_per_token: float
    ratio: float
    handoff_us: float | None
    bytes_per_token: int


def measure_here(arguments: dict[str, Any]) -> list[dict[str, Any]]:
    """Entry point of the worker: every number of sessions, every way, in turns. JSON in, JSON out."""
    profile = NumericsProfile.from_json(arguments["profile"])
    costs = []
    for count in arguments["counts"]:
        case = decode_case(arguments["model"], count)
        costs += measure(
            case, arguments["split"], profile, rounds=arguments["rounds"], n_threads=arguments["n_threads"]
        )
    return [asdict(cost) for cost in costs]


def decode_case(model: str, count: int) -> Case:
    """``count`` sessions that arrive together."""
    rng = random.Random(f"hand-off {count}")
    sessions = tuple(
        Session(prompt=tuple(rng.randrange(3, 250) for _ in range(PROMPT_TOKENS)), max_tokens=OUTPUT_TOKENS)
        for _ in range(count)
    )
    return Case(
        family=resolve_model(model).family,
        model=model,
        sessions=sessions,
        num_sequences=62,
        pool_cells=4000,
        max_num_seqs=count,
        max_num_batched_tokens=512,
        prefix_cache=False,
    )


@contextmanager
def engines(
    case: Case, split: str, profile: NumericsProfile, n_threads: int
) -> Iterator[dict[str, SamplingEngine]]:
    """The three ways to run a case, configured by their limits."""
    runner, file, family = Runner(n_threads=n_threads), resolve_model(case.model), load_family(case.family)
    whole, across = pool_limits(case, family, profile), replace(case, split=split)
    unsplit = runner.engine(case, file, family, profile)
    made: dict[str, SamplingEngine] = {UNSPLIT: unsplit}
    chains = {
        IN_PROCESS: StageChains(n_threads=n_threads),
        PROCESSES: StageChains(n_threads=n_threads, in_processes=True),
    }
    try:
        for how, kept in chains.items():
            made[how] = kept.chain(across, file, family, profile, whole)
            made[how].limits = kept.limits(across, file, whole)
        unsplit.limits = (whole,)
        yield made
    finally:
        for kept in chains.values():
            kept.close()


def measure(
    case: Case, split: str, profile: NumericsProfile, *, rounds: int, n_threads: int
) -> list[HandoffCost]:
    """Costs of one workload: each round runs every way once, so that a busy machine slows them all."""
    with engines(case, split, profile, n_threads) as made:
        seconds: dict[str, list[float]] = {how: [] for how in made}
        tokens = 0
        for turn in range(rounds + 1):
            for how, engine in made.items():
                spent, tokens = timed_run(case, engine)
                if turn:  # the first turn warms up
                    seconds[how].append(spent)
        bytes_per_token = 4 * made[UNSPLIT].pool.context.model.n_embd
        stages = len(made[IN_PROCESS].limits)
    base = median(seconds[UNSPLIT])
    return [
        HandoffCost(
            model=case.model,
            split=split,
            stages=stages if how != UNSPLIT else 1,
            sessions=len(case.sessions),
            how=how,
            tokens=tokens,
            us_per_token=median(spent) / tokens * 1e6,
            ratio=base / median(spent),
            handoff_us=None if how == UNSPLIT else (median(spent) - base) / tokens / (stages - 1) * 1e6,
            bytes_per_token=0 if how == UNSPLIT else bytes_per_token,
        )
        for how, spent in seconds.items()
    ]


def timed_run(case: Case, engine: SamplingEngine) -> tuple[float, int]:
    """Seconds in the engine and computed rows of one run."""
    engine.configure(*engine.limits)
    spent, rows = 0.0, 0
    execute = engine.execute

    def timed(plan: IterationPlan, batch: Batch, now_ms: float) -> IterationResult:
        nonlocal spent, rows
        begin = perf_counter()
        result = execute(plan, batch, now_ms)
        spent += perf_counter() - begin
        rows += len(batch.tokens)
        return result

    engine.execute = timed
    try:
        scheduler = Scheduler(engine, make_policy(case.policy), case.step_limits())
        run = Driver(case, scheduler, engine).drive()
    finally:
        del engine.execute
    if run.problems or len(run.completions) != len(case.sessions):
        raise RuntimeError(f"the workload did not run: {run.problems}")
    return spent, rows
