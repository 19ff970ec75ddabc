"""``parity check``: the main job. Generated cases per family and layout, a table, one
verdict line, JSON on request.
"""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from concurrent.futures import FIRST_COMPLETED, Future, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any

import click
from click.core import ParameterSource
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from parity.cases.policy_options import parse_policy_options, policy_option
from parity.commands.check_endpoint import OPTION_NAMES, TIERS, endpoint_options, run_endpoint
from parity.errors import ExitCode, UsageError
from parity.models import resolve_model
from parity.models.families import Mark, family_names, load_family
from parity.outputs import OUTPUT_FILE, save_output
from parity.processes import process_pool
from parity.records import Tier, Verdict
from parity.run.profiles import profile_of, provenance, provenance_line
from parity.run.under_test import Brought, brought_options
from parity.store import save_text
from parity.suites.suite import SuiteResult, run_suite
from scheduler.limits import Layout
from scheduler.policies import policy_names


@click.command()
@click.option("--family", "families", multiple=True, metavar="NAME", help="Only this family (repeatable).")
@click.option(
    "--layout",
    "layouts",
    multiple=True,
    type=click.Choice([layout.value for layout in Layout]),
    help="Only this layout (repeatable). Default: unified and streams gated, stock measured.",
)
@click.option(
    "--model", metavar="SPEC", help="A model instead of the tiny row, e.g. qwen3next:q8_0 or a GGUF's path."
)
@click.option(
    "--policy",
    default="fcfs",
    show_default=True,
    type=click.Choice(policy_names()),
    metavar="NAME",
    help="Scheduling policy.",
)
@policy_option
@click.option(
    "--sessions",
    default=200,
    show_default=True,
    type=click.IntRange(min=1),
    help="Sessions to compare per family and layout.",
)
@click.option(
    "--minutes",
    type=click.FloatRange(min=0.0, min_open=True),
    help="Begin no case later than this; what was not reached is said, and a missing mark is unknown.",
)
@click.option(
    "--tier",
    show_default="bits; bytes with --engine; the strongest that is kept with --endpoint",
    type=click.Choice(TIERS),
    help="What is compared: logits bit by bit, or output bytes; rounding is for --endpoint.",
)
@click.option(
    "--steps-in-flight",
    default=1,
    show_default=True,
    type=click.IntRange(1, 64),
    help="Steps that run at a time, as the stages of a chain do.",
)
@click.option(
    "--shards",
    default=1,
    show_default=True,
    type=click.IntRange(1, 64),
    help="Pools side by side, each of a case's size; a session lives in one.",
)
@brought_options
@click.option("--seed", type=int, help="Explore other cases than the derandomised default.")
@click.option("--jobs", default=2, show_default=True, type=click.IntRange(min=1), help="Processes.")
@click.option("--json", "json_path", type=OUTPUT_FILE, help="Write the result here.")
@click.option(
    "--endpoint",
    metavar="URL",
    help="Check the model MODEL of a server, or of package.module:factory; the options below are for it.",
)
@endpoint_options
@click.pass_context
def command(
    context: click.Context,
    families: tuple[str, ...],
    layouts: tuple[str, ...],
    model: str | None,
    policy: str,
    policy_options: tuple[str, ...],
    sessions: int,
    minutes: float | None,
    tier: str | None,
    steps_in_flight: int,
    shards: int,
    scheduler: str | None,
    engine: str | None,
    scheduler_command: str | None,
    seed: int | None,
    jobs: int,
    json_path: Path | None,
    endpoint: str | None,
    **of_endpoint: Any,
) -> ExitCode:
    """Prove that concurrent sessions give the same bits as each session alone.

    Exit code 0: pass, 1: fail, 2: unknown, 64: bad input.
    """
    refuse_others_options(context, of_endpoint=endpoint is None)
    if endpoint is not None:
        if model is None:
            raise UsageError("--endpoint needs --model", why="it is the model's name at the server")
        return run_endpoint(
            endpoint, model, seed=seed or 0, tier=tier, json_path=json_path, options=of_endpoint
        )
    if tier is not None and tier not in [known.value for known in Tier]:
        raise UsageError(f"--tier {tier} without --endpoint", why="our own engine is exact")
    if scheduler_command is not None and steps_in_flight > 1:
        raise UsageError(
            "--steps-in-flight with --scheduler-command", why="it is asked for one step at a time"
        )
    if shards > 1 and (scheduler is not None or scheduler_command is not None):
        raise UsageError("--shards with a scheduler of yours", why="it is given one pool per stage")
    chosen = choose_families(families, model)
    brought = Brought(scheduler=scheduler, engine=engine, scheduler_command=scheduler_command)
    suites = [(name, layout) for name in chosen for layout in choose_layouts(layouts, brought)]
    console = Console(stderr=True)
    click.echo(provenance_line(seed))
    started = monotonic()
    options = {
        "model": model,
        "policy": policy,
        "policy_options": parse_policy_options(policy, policy_options),
        "steps_in_flight": steps_in_flight,
        "shards": shards,
        "min_sessions": sessions,
        "until": None if minutes is None else started + 60 * minutes,
        "seed_value": seed,
        "tier": brought.tier if tier is None else Tier(tier),
        "brought": brought,
    }
    results = run_suites(suites, options, jobs=jobs, console=console)
    verdict = Verdict.merge(result.verdict for result in results)
    Console(width=140).print(result_table(results))
    for result in results:
        if result.explanation or result.reason:
            click.echo(
                f"{result.family} {result.layout.value}: {result.reason}\n{result.explanation}".rstrip()
            )
    seconds = round(monotonic() - started, 1)
    if json_path is not None:
        save_output(json_path, json.dumps(report_data(results, verdict, seconds, seed), indent=1) + "\n")
    click.echo(f"verdict: {verdict.value} ({sum(r.sessions for r in results)} sessions, {seconds} s)")
    return verdict.exit_code


OURS_ALONE = (
    "families",
    "layouts",
    "policy",
    "policy_options",
    "sessions",
    "minutes",
    "steps_in_flight",
    "shards",
    "scheduler",
    "scheduler_command",
    "engine",
    "jobs",
)


def refuse_others_options(context: click.Context, *, of_endpoint: bool) -> None:
    """An option that would be ignored is an error: those of a server without one, ours with one. Raises
    ``UsageError``.
    """
    for name in OPTION_NAMES if of_endpoint else OURS_ALONE:
        if context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            option = next(p.opts[0] for p in context.command.params if p.name == name)
            raise UsageError(
                f"{option} {'without' if of_endpoint else 'with'} --endpoint", why="it would change nothing"
            )


def choose_families(families: tuple[str, ...], model: str | None) -> list[str]:
    """Families to check; a model decides its own. Raises ``UsageError`` for an
    unknown or contradictory choice.
    """
    for name in families:
        load_family(name)
    if model is None:
        return list(families) or family_names()
    own = resolve_model(model).family
    if families and list(families) != [own]:
        raise UsageError(
            f"model {model} is of family {own}",
            where="--family",
            why=f"it says {', '.join(families)}",
            todo="leave --family out",
        )
    return [own]


def choose_layouts(layouts: tuple[str, ...], brought: Brought) -> list[Layout]:
    """Layouts to check; what is brought is tried here once. Raises ``UsageError``."""
    brought.why_no_bits()
    if brought.engine is None:
        return list(map(Layout, layouts or Layout))
    if Layout.STOCK.value in layouts:
        raise UsageError(
            "--layout stock with --engine",
            why="stock is how llama.cpp places cells",
            todo="name unified or streams",
        )
    return list(map(Layout, layouts)) or [Layout.UNIFIED, Layout.STREAMS]


def run_suites(
    suites: list[tuple[str, Layout]], options: dict, *, jobs: int, console: Console
) -> list[SuiteResult]:
    """Run suites in processes, progress by suite; results in the order of ``suites``.

    A suite that an interrupt or the death of a process cuts off is unknown; those that ended count.
    """
    done: dict[int, SuiteResult] = {}
    suites = list(suites)
    for index, (name, layout) in enumerate(suites):
        try:
            load_family(name)
        except UsageError as error:  # one bad manifest costs nobody else's results
            done[index] = unfinished(name, layout, options, reason=error.line)
            console.print(f"{name} {layout.value}: unknown, {error.line}", soft_wrap=True, highlight=False)
    cut_off = ""
    with (
        tempfile.TemporaryDirectory(prefix="samebytes-check-") as folder,
        LifeSigns(console, suites) as signs,
    ):
        states = [Path(folder) / str(index) for index in range(len(suites))]
        try:
            with process_pool(min(jobs, len(suites))) as pool:
                futures: dict[Future, int] = {
                    pool.submit(run_suite, *suites[i], **options, on_case=partial(save_state, states[i])): i
                    for i in range(len(suites))
                    if i not in done
                }
                open_ones = set(futures)
                while open_ones:
                    ended, open_ones = wait(open_ones, timeout=LOOK_S, return_when=FIRST_COMPLETED)
                    for future in ended:
                        index = futures[future]
                        try:
                            done[index] = future.result()
                        except UsageError as error:
                            done[index] = unfinished(*suites[index], options, reason=error.line)
                        signs.ended(done[index])
                    signs.look(states, done)
        except KeyboardInterrupt:
            cut_off = "interrupted"
        except BrokenProcessPool as error:
            cut_off = f"a process of the check died: {error}"
        return [
            done[index]
            if index in done
            else unfinished(name, layout, options, reason=cut_off, state=load_state(states[index]))
            for index, (name, layout) in enumerate(suites)
        ]


LOOK_S = 1.0
LINE_EVERY_S = 5.0


def save_state(path: Path, result: SuiteResult) -> None:
    """In the suite's process: what it came to so far, for whoever looks, and for an interrupted run."""
    counts = {name: getattr(result, name) for name in COUNTS}
    save_text(path, json.dumps({**counts, "marks": result.marks}), durable=False)


COUNTS = ("cases", "sessions", "bit_identical", "byte_identical", "crashes")


def load_state(path: Path) -> dict[str, Any]:
    """What ``save_state`` wrote; empty if the suite has not begun."""
    return json.loads(path.read_text()) if path.exists() else {}


class LifeSigns:
    """Shows that a check is alive, by session: a bar on a terminal, elsewhere a line every few seconds."""

    def __init__(self, console: Console, suites: list[tuple[str, Layout]]) -> None:
        self.console, self.suites = console, suites
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self.progress = Progress(*columns, console=console, disable=not console.is_terminal)
        self.task = self.progress.add_task("suites", total=len(suites))
        self.started = self.told = monotonic()

    def __enter__(self) -> LifeSigns:
        self.progress.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.progress.stop()

    def ended(self, result: SuiteResult) -> None:
        """One suite more is through."""
        self.progress.advance(self.task)
        self._tell(
            f"{result.family} {result.layout.value}: {result.sessions} sessions, {result.verdict.value}"
        )

    def look(self, states: list[Path], done: dict[int, SuiteResult]) -> None:
        """Say what the running suites have so far, if it is time to."""
        running = []
        for index, (name, layout) in enumerate(self.suites):
            state = load_state(states[index])
            if index not in done and state:
                so_far = f"{state['sessions']} sessions" if state["cases"] else "self-test and first case"
                running.append(f"{name} {layout.value} {so_far}")
        text = ", ".join(running) or "starting"
        self.progress.update(self.task, description=text)
        if monotonic() - self.told >= LINE_EVERY_S:
            self._tell(
                f"{monotonic() - self.started:.0f} s, {len(done)} of {len(self.suites)} suites: {text}"
            )

    def _tell(self, line: str) -> None:
        self.told = monotonic()
        if not self.console.is_terminal:
            self.console.print(line, soft_wrap=True, highlight=False)


def unfinished(
    name: str, layout: Layout, options: dict, *, reason: str, state: dict[str, Any] | None = None
) -> SuiteResult:
    """The result of a suite that did not end: unknown, with what it had so far."""
    state = dict(state or {})
    marks = Counter(state.pop("marks", {}))
    model, brought = options["model"] or name, options["brought"]
    return SuiteResult(
        name, layout, model, verdict=Verdict.UNKNOWN, reason=reason, brought=brought, marks=marks, **state
    )


def result_table(results: list[SuiteResult]) -> Table:
    """One row per family and layout."""
    table = Table(
        "family",
        "layout",
        "verdict",
        "cases",
        "sessions",
        "bit-identical",
        "byte-identical",
        "crashes",
        "marks (mixed/chunked/shared/preempted/resumed/cancelled/id reused/pool full)",
    )
    for result in results:
        marks = "/".join(str(result.marks[mark.value]) for mark in Mark)
        verdict = (
            result.verdict.value
            if result.layout is not Layout.STOCK
            else f"{result.verdict.value} (measured)"
        )
        table.add_row(
            result.family,
            result.layout.value,
            verdict,
            *map(
                str,
                (result.cases, result.sessions, result.bit_identical, result.byte_identical, result.crashes),
            ),
            marks,
        )
    return table


def held_for(result: SuiteResult) -> dict:
    """The model and the kernels that a suite's counts hold for; a user's engine has its own."""
    if not result.sessions:
        return {}  # nobody looked: the self-test would begin here
    if result.brought.engine is not None:
        return {"engine": result.brought.engine}
    numerics = profile_of(result.model).profile.for_layout(result.layout)
    return {"model_sha256": resolve_model(result.model).sha256, "numerics": json.loads(numerics.to_json())}


def report_data(results: list[SuiteResult], verdict: Verdict, seconds: float, seed: int | None) -> dict:
    """The JSON report: verdict, seconds, families -> layouts -> counts."""
    families: dict[str, dict] = {}
    for result in results:
        families.setdefault(result.family, {})[result.layout.value] = {**result.to_data(), **held_for(result)}
    return {
        "format": 1,
        "verdict": verdict.value,
        "seconds": seconds,
        "families": families,
        "provenance": asdict(provenance(seed=seed or 0)),
    }
