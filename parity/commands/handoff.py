"""``parity handoff``: what handing hidden states from stage to stage costs, beside the
unsplit model in the same run.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from parity.engines.numerics import NumericsProfile
from parity.engines.pool import SamplingEngine
from parity.errors import ExitCode, UsageError
from parity.models import ModelFile, resolve_model
from parity.models.families import load_family
from parity.outputs import OUTPUT_FILE, save_output
from parity.processes import shared_worker
from parity.records import Case, Session
from parity.run.chains import StageChains
from parity.run.drive import Driver
from parity.run.profiles import profile_of, provenance_line
from parity.run.runner import Runner, pool_limits
from parity.suites.suite import pinned_splits
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


@click.command()
@click.argument("models", nargs=-1, metavar="[MODEL]...")
@click.option("--split", help="A pinned split's name or boundaries such as 2,4; default: every pinned split.")
@click.option(
    "--sessions", "counts", multiple=True, type=click.IntRange(1, 60), help="Concurrent sessions (1, 8, 32)."
)
@click.option(
    "--rounds", default=5, show_default=True, type=click.IntRange(min=1), help="Rounds, ways in turns."
)
@click.option(
    "--threads", default=1, show_default=True, type=click.IntRange(min=1), help="Threads of every context."
)
@click.option("--json", "json_path", type=OUTPUT_FILE, help="Write the figures here.")
def command(
    models: tuple[str, ...],
    split: str | None,
    counts: tuple[int, ...],
    rounds: int,
    threads: int,
    json_path: Path | None,
) -> ExitCode:
    """Measure the hand-off cost per token and stage, in one process and across processes."""
    click.echo(provenance_line(None))
    costs: list[HandoffCost] = []
    console = Console(stderr=True)
    for model in models or ("llama",):
        file = resolve_model(model)
        for name in [split] if split else split_names(file):
            profile = profile_of(model).profile
            with console.status(f"{model}, split {name}"):
                arguments = {
                    "model": model,
                    "split": name,
                    "counts": list(counts or (1, 8, 32)),
                    "rounds": rounds,
                    "n_threads": threads,
                    "profile": profile.to_json(),
                }
                worker = shared_worker(profile.environment)
                measured = worker.call("parity.commands.handoff:measure_here", arguments, timeout_s=3600.0)
            costs += [HandoffCost(**item) for item in measured]
    Console(width=130).print(cost_table(costs))
    click.echo(
        f"{PROMPT_TOKENS} prompt and {OUTPUT_TOKENS} generated tokens a session; engine time only, medians "
        f"of {rounds} rounds; ratio: unsplit time divided by this one's"
    )
    if json_path is not None:
        save_output(json_path, json.dumps([asdict(cost) for cost in costs], indent=1) + "\n")
    return ExitCode.PASS


def split_names(file: ModelFile) -> list[str]:
    """Names of the pinned splits of a model's row. Raises ``UsageError`` where there are none."""
    try:
        return [split.name for split in pinned_splits(file.family, file.row)]
    except UsageError as error:
        raise UsageError(
            error.what, where=error.where, why=error.why, todo="give boundaries with --split"
        ) from error


def cost_table(costs: list[HandoffCost]) -> Table:
    """One row per workload and way."""
    table = Table(
        "model",
        "split",
        "stages",
        "sessions",
        "engine",
        "tokens",
        "µs/token",
        "ratio",
        "hand-off µs/token/stage",
        "bytes/token",
    )
    for cost in costs:
        extra = "" if cost.handoff_us is None else f"{cost.handoff_us:.1f}"
        table.add_row(
            cost.model,
            cost.split,
            str(cost.stages),
            str(cost.sessions),
            cost.how,
            str(cost.tokens),
            f"{cost.us_per_token:.1f}",
            f"{cost.ratio:.2f}",
            extra,
            str(cost.bytes_per_token),
        )
    return table


# -- in a worker process


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
