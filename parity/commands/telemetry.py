"""``parity telemetry``: totals and a picture of what a scheduler did, from its JSON lines."""

from __future__ import annotations

import json
from pathlib import Path

import click

from parity.errors import ExitCode, UsageError
from parity.outputs import OUTPUT_FILE, save_output
from parity.telemetry import Totals, plot_steps, preemption_counts, read_steps


@click.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--out", type=OUTPUT_FILE, help="Picture to write: .png or .svg.")
@click.option("--totals", is_flag=True, help="Print the totals as JSON.")
@click.option(
    "--preemptions", is_flag=True, help="Count them by reason, mode, policy, client and epoch, JSON lines."
)
def command(file: Path, out: Path | None, totals: bool, preemptions: bool) -> ExitCode:
    """Read FILE, one step record a line, and plot pool, queues and tokens by kind over steps."""
    steps = read_steps(file)
    if totals or (out is None and not preemptions):
        click.echo(json.dumps(Totals(steps).as_dict()))
    for counted in preemption_counts(steps) if preemptions else ():
        click.echo(json.dumps(counted))
    if out is not None:
        kind = out.suffix.lstrip(".").lower()
        if kind not in ("png", "svg"):
            raise UsageError(
                f"a picture of kind {kind or 'none'!r}", where=str(out), todo="end it in .png or .svg"
            )
        save_output(out, plot_steps(steps, kind=kind))
        click.echo(f"{out}: {len(steps)} steps")
    return ExitCode.PASS
