"""``parity cutover``: may the scheduler replace the single lane? A verdict per model."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from parity.bench.clocks import ClockKind
from parity.bench.cutover import Cutover, CutoverOptions, GateRow, Margins
from parity.bench.summary import Goodput
from parity.errors import ExitCode, UsageError
from parity.life_signs import LifeSigns
from parity.models import resolve_model
from parity.models.families import family_names
from parity.outputs import OUTPUT_FILE, save_output
from parity.records import Verdict
from parity.run.profiles import provenance_line
from parity.serve.options import settings_from, shared_engine_options
from parity.suites.suite import run_suite
from scheduler.limits import Layout

_RATIO = click.FloatRange(0)


@click.command()
@click.argument("models", nargs=-1, metavar="[MODEL]...")
@shared_engine_options
@click.option(
    "--target", default=32, show_default=True, type=click.IntRange(1), help="Concurrency of the main rows."
)
@click.option(
    "--curve", default="1,2,4,8,16,32,64", show_default=True, help="Concurrencies of the scaling curve."
)
@click.option(
    "--pairs", default=3, show_default=True, type=click.IntRange(1), help="Alternating runs per ratio."
)
@click.option(
    "--num-prompts", default=128, show_default=True, type=click.IntRange(1), help="Requests of main rows."
)
@click.option(
    "--curve-prompts", default=32, show_default=True, type=click.IntRange(2), help="Of the other rows."
)
@click.option(
    "--metric-percentile",
    "percentile",
    default=99.0,
    show_default=True,
    type=click.FloatRange(0, 100, min_open=True, max_open=True),
    help="Percentile of the latency row.",
)
@click.option(
    "--goodput",
    "objectives",
    multiple=True,
    metavar="NAME:MS",
    default=("ttft:2000", "tpot:200"),
    show_default=True,
)
@click.option("--margin-throughput", default=2.0, show_default=True, type=_RATIO)
@click.option("--margin-latency", default=1.0, show_default=True, type=_RATIO, help="At most.")
@click.option("--margin-goodput", default=1.0, show_default=True, type=_RATIO)
@click.option("--margin-curve", default=1.0, show_default=True, type=_RATIO)
@click.option("--margin-single-user", default=0.97, show_default=True, type=_RATIO)
@click.option("--margin-prefix-ttft", default=1.0, show_default=True, type=_RATIO)
@click.option("--margin-prefix-ttft-recurrent", default=1.0, show_default=True, type=_RATIO)
@click.option("--margin-prefix-gain", default=1.0, show_default=True, type=_RATIO)
@click.option("--margin-prefix-gain-recurrent", default=0.9, show_default=True, type=_RATIO)
@click.option("--margin-poisson-goodput", default=1.0, show_default=True, type=_RATIO)
@click.option("--margin-kv-bytes", default=1.05, show_default=True, type=_RATIO, help="At most.")
@click.option(
    "--check-sessions",
    default=60,
    show_default=True,
    type=click.IntRange(0),
    help="Sessions of the correctness row; 0 leaves it out, and the verdict is then unknown.",
)
@click.option(
    "--clock",
    default="wall",
    show_default=True,
    type=click.Choice([kind.value for kind in ClockKind]),
    help="cpu: this thread's CPU time, for a busy machine; with --threads 1.",
)
@click.option("--seed", default=0, show_default=True)
@click.option("--json", "json_path", type=OUTPUT_FILE, help="Write the rows here.")
def command(
    models: tuple[str, ...],
    check_sessions: int,
    objectives: tuple[str, ...],
    curve: str,
    json_path: Path | None,
    **options: Any,
) -> ExitCode:
    """Correct first, then fast: measure MODELs (default: the tiny model of every
    family) against the single lane.

    Exit code 0: every model passes, 1: a row fails, 2: a row could not be measured.
    """
    margins = Margins(
        **{
            name.removeprefix("margin_"): options.pop(name)
            for name in list(options)
            if name.startswith("margin_")
        }
    )
    names = ("target", "pairs", "num_prompts", "curve_prompts", "percentile", "seed")
    cutover = CutoverOptions(
        curve=whole_numbers(curve, where="--curve"),
        goodput=Goodput.parse(objectives),
        clock=ClockKind(options.pop("clock")),
        margins=margins,
        **{name: options.pop(name) for name in names},
    )
    models = models or tuple(family_names())
    click.echo(provenance_line(cutover.seed))
    verdicts, rows = {}, []
    console = Console(width=150)
    with LifeSigns("rows") as signs:
        for model in models:
            found = gate_rows(
                model, options, cutover, check_sessions, lambda what, m=model: signs.say(f"{m}: {what}")
            )
            verdicts[model] = Verdict.merge(row.verdict for row in found)
            rows += found
            console.print(rows_table(found))
    for model, verdict in verdicts.items():
        click.echo(
            f"{model}: {'may cut over' if verdict is Verdict.PASS else 'may not cut over'} ({verdict.value})"
        )
    if json_path is not None:
        data = {
            "verdicts": {model: verdict.value for model, verdict in verdicts.items()},
            "rows": [{**asdict(row), "verdict": row.verdict.value} for row in rows],
        }
        save_output(json_path, json.dumps(data, indent=1) + "\n")
    merged = Verdict.merge(verdicts.values())
    click.echo(f"verdict: {merged.value}")
    return merged.exit_code


def gate_rows(
    model: str,
    options: dict[str, Any],
    cutover: CutoverOptions,
    check_sessions: int,
    report: Callable[[str], None],
) -> list[GateRow]:
    """Rows of one model; a model that is not correct is not measured."""
    report("correctness")
    first = correctness_row(model, check_sessions)
    if first.verdict is Verdict.FAIL:
        return [first]
    return [first, *Cutover(settings_from(model, options), cutover, report).rows()]


def correctness_row(model: str, sessions: int) -> GateRow:
    """The pre-gate: concurrent against alone, bit by bit, in the layout that is served."""
    if not sessions:
        return GateRow(
            model=model,
            claim="correctness",
            measured=None,
            bound="bit-identical",
            verdict=Verdict.UNKNOWN,
            detail="left out",
        )
    family = resolve_model(model).family
    result = run_suite(
        family, Layout.UNIFIED, model=None if model == family else model, min_sessions=sessions
    )
    share = result.bit_identical / result.sessions if result.sessions else None
    return GateRow(
        model=model,
        claim="correctness",
        measured=share,
        bound="bit-identical",
        verdict=result.verdict,
        detail=result.reason or f"{result.bit_identical} of {result.sessions} sessions",
    )


def whole_numbers(text: str, *, where: str) -> tuple[int, ...]:
    """A comma-separated list of numbers from 1, given by the option ``where``. Raises ``UsageError``."""
    try:
        values = tuple(int(part) for part in text.split(","))
        if not all(value >= 1 for value in values):
            raise ValueError
    except ValueError:
        raise UsageError(
            f"{text!r}", where=where, why="these are not whole numbers from 1, separated by commas"
        ) from None
    return values


def rows_table(rows: list[GateRow]) -> Table:
    """Rows as a table."""
    table = Table("model", "claim", "measured", "asked", "verdict", "single lane -> scheduler")
    for row in rows:
        measured = "" if row.measured is None else f"{row.measured:.3g}"
        table.add_row(row.model, row.claim, measured, row.bound, row.verdict.value, row.detail)
    return table
