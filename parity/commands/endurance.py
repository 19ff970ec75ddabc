"""``parity endurance``: the scheduler's own cost and endurance on the exact engine, without a model."""

from __future__ import annotations

import click
from rich.console import Console
from rich.progress import Progress

from parity.errors import ExitCode
from parity.exact_load import run_endurance, run_small_cases, step_microseconds

LONG_QUEUE, SHORT_QUEUE, LANES = 100_000, 100, 64
MOST_GROWTH_BLOCKS = 4000  # a leak of one object for every 200 requests of the full run would show


@click.command()
@click.option(
    "--requests",
    default=20_000,
    show_default=True,
    type=click.IntRange(10),
    help="Requests through one engine (1000000 for the full run).",
)
@click.option("--cases", default=2000, show_default=True, type=click.IntRange(1), help="Small cases.")
def command(requests: int, cases: int) -> ExitCode:
    """Small cases a minute, step time with a long queue and with a short one, a long run without a leak."""
    seconds = run_small_cases(cases)
    click.echo(f"small cases: {cases} in {seconds:.1f} s, {cases / seconds * 60:,.0f} a minute")
    for lanes in (1, 32, LANES):
        click.echo(
            f"scheduler: {step_microseconds(running=lanes, waiting=0):.0f} us a step of {lanes} decodes"
        )
    short = min(step_microseconds(running=LANES, waiting=SHORT_QUEUE) for _ in range(3))
    long = min(step_microseconds(running=LANES, waiting=LONG_QUEUE) for _ in range(3))
    click.echo(
        f"queue: {long:.0f} us with {LONG_QUEUE:,} waiting, {short:.0f} us with {SHORT_QUEUE}, "
        f"{long / short:.2f} times ({LANES} running)"
    )
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("requests", total=requests)
        run = run_endurance(requests, report=lambda done: progress.update(task, completed=done))
    click.echo(
        f"endurance: {run.requests:,} requests, {run.steps:,} steps, {run.seconds:.0f} CPU s, "
        f"{run.checked:,} answers checked, {run.grown_blocks:+,} blocks after the first tenth"
    )
    return ExitCode.PASS if run.grown_blocks <= MOST_GROWTH_BLOCKS else ExitCode.FAIL
