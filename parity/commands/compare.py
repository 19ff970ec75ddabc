"""``parity compare``: two results side by side, if they may be compared at all."""

from __future__ import annotations

from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from parity.bench.coordinates import Result, load_results, pair_results
from parity.errors import ExitCode

_FILE = click.Path(dir_okay=False, path_type=Path)
COORDINATES = (
    "duration",
    "num_requests",
    "concurrency",
    "request_rate",
    "burstiness",
    "input_len",
    "output_len",
)


@click.command()
@click.argument("first", type=_FILE)
@click.argument("second", type=_FILE)
def command(first: Path, second: Path) -> ExitCode:
    """Compare the rows of two files that `parity bench --save-result` wrote.

    Model, hardware, workload, baseline, metric, objectives, load and evidence must be equal; if one differs,
    nothing is compared, and it is named (exit code 64). Neither is called better.
    """
    pairs = pair_results(load_results(first), load_results(second))
    for one, other in pairs:
        Console(width=150).print(pair_table(one, other))
    click.echo(f"{len(pairs)} rows at equal coordinates")
    return ExitCode.PASS


def pair_table(one: Result, other: Result) -> Table:
    """The numbers that both have, and the second over the first."""
    table = Table("figure", one.source, other.source, "second / first")
    for name, value in one.values.items():
        if name in other.values and name not in COORDINATES:
            ratio = f"{other.values[name] / value:.3g}" if value else ""
            table.add_row(name, f"{value:.4g}", f"{other.values[name]:.4g}", ratio)
    return table
