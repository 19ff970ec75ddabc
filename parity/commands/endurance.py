"""``parity endurance``: the scheduler's own cost and endurance on the exact engine, without a model."""

from __future__ import annotations

import click

from parity.bench.scheduler_alone import run_endurance, run_small_cases, step_microseconds
from parity.errors import ExitCode
from parity.life_signs import LifeSigns

LONG_QUEUE, SHORT_QUEUE, LANES = 100_000, 100, 64
FEWEST_CASES = 10_000  # a minute on one core
MOST_QUEUE_RATIO = 1.2  # of a step's time with the long queue to that with the short one
MOST_GROWTH_BLOCKS = 4000  # a leak of one object for every 100 requests of the full run would show


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
    """Small cases a minute, step time with a long queue and with a short one, a long run without a leak.

    Exit code 0: every figure is within its bound, 1: one is not.
    """
    a_minute = cases / run_small_cases(cases) * 60
    held = [judge(f"small cases: {a_minute:,.0f} a minute", a_minute >= FEWEST_CASES)]
    for lanes in (1, 32, LANES):
        click.echo(
            f"scheduler: {step_microseconds(running=lanes, waiting=0):.0f} us a step of {lanes} decodes"
        )
    short = min(step_microseconds(running=LANES, waiting=SHORT_QUEUE) for _ in range(3))
    long = min(step_microseconds(running=LANES, waiting=LONG_QUEUE) for _ in range(3))
    text = (
        f"queue: {long:.0f} us with {LONG_QUEUE:,} waiting, {short:.0f} us with {SHORT_QUEUE}, "
        f"{long / short:.2f} times ({LANES} running)"
    )
    held.append(judge(text, long / short <= MOST_QUEUE_RATIO))
    with LifeSigns("requests", total=requests) as signs:
        run = run_endurance(requests, report=signs.update)
    text = (
        f"endurance: {run.requests:,} requests, {run.steps:,} steps, {run.seconds:.0f} CPU s, "
        f"{run.checked:,} answers checked, {run.grown_blocks:+,} blocks in the second half"
    )
    held.append(judge(text, run.grown_blocks <= MOST_GROWTH_BLOCKS))
    return ExitCode.PASS if all(held) else ExitCode.FAIL


def judge(text: str, holds: bool) -> bool:
    """Print a figure with its verdict, and give that back."""
    click.echo(f"{text}: {'pass' if holds else 'fail'}")
    return holds
