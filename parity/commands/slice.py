"""``parity slice``: write a contiguous range of a model's layers as a model of its own."""

from __future__ import annotations

from pathlib import Path

import click
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn

from parity.errors import ExitCode
from parity.models import resolve_model
from parity.models.facts import read_facts
from parity.models.slice import LayerRange, slice_model
from parity.outputs import SEEKABLE_FILE


@click.command()
@click.argument("model")
@click.option("--layers", required=True, metavar="START:STOP", help="Half-open: 0:9 is layers 0 to 8.")
@click.option(
    "--out",
    "target",
    required=True,
    type=SEEKABLE_FILE,
    help="File to write; replaced as a whole or not at all.",
)
def command(model: str, layers: str, target: Path) -> ExitCode:
    """Write layers [START, STOP) of MODEL, re-indexed from 0, with embeddings and output head."""
    chosen = LayerRange.parse(layers)
    source = resolve_model(model)
    columns = (BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=None)
        slice_model(
            source.path,
            chosen,
            target.resolve(),  # a link stays
            report=lambda done, total: progress.update(task, completed=done, total=total),
        )
    kinds = ", ".join(dict.fromkeys(read_facts(target).layers))
    click.echo(f"{target}: layers {chosen.start}:{chosen.stop} of {source.path.name} ({kinds})")
    return ExitCode.PASS
