"""``parity bisect FILE``: which neighbours a failing case needs, the first
bad step, and the kind of fault.
"""

from __future__ import annotations

from pathlib import Path

import click

from parity.campaign.diagnose import diagnose
from parity.campaign.rerun import Rerun
from parity.cases.files import load_case
from parity.errors import ExitCode
from parity.mutants import find_mutant


@click.command()
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--exact", is_flag=True, help="On the exact engine instead of llama.cpp.")
@click.option("--mutant", metavar="NAME", help="Plant a known fault.")
def command(file: Path, exact: bool, mutant: str | None) -> ExitCode:
    """Take a failing case apart: minimal set of neighbours, first bad step, cause with its evidence."""
    case = load_case(file)
    if mutant is not None:
        find_mutant(mutant)
    run = Rerun(exact=exact, mutant=mutant)
    try:
        found = diagnose(case, run)
    finally:
        run.close()
    if found is None:
        click.echo(f"passes: nothing to bisect ({run.count} run)")
        return ExitCode.PASS
    click.echo(f"cause: {found.cause.value}")
    if found.session is not None:
        names = ", ".join(map(str, found.neighbours)) or "none"
        click.echo(f"session {found.session} with neighbours: {names}")
        click.echo(f"first bad step: its token {found.step}, scheduler step {found.scheduler_step}")
    for line in found.evidence:
        click.echo(f"  {line}")
    click.echo(f"{run.count} runs")
    return ExitCode.FAIL
