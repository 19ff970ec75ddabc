"""``parity bisect FILE``: which neighbours a failing case needs, the first
bad step, and the kind of fault.
"""

from __future__ import annotations

from pathlib import Path

import click

from parity.campaign.diagnose import diagnose
from parity.campaign.rerun import Rerun
from parity.cases.files import load_case
from parity.errors import ExitCode, UsageError
from parity.mutants import find_mutant
from parity.run.under_test import OURS, brought_for, brought_options, whose_options


@click.command()
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--exact", is_flag=True, help="On the exact engine instead of llama.cpp.")
@click.option("--mutant", metavar="NAME", help="Plant a known fault.")
@brought_options
@whose_options
def command(
    file: Path,
    exact: bool,
    mutant: str | None,
    scheduler: str | None,
    engine: str | None,
    scheduler_command: str | None,
    ours: bool,
    as_recorded: bool,
) -> ExitCode:
    """Take a failing case apart: minimal set of neighbours, first bad step, cause with its evidence.

    It runs with the scheduler and the engine that the file names, or the options.
    """
    case = load_case(file)
    brought = brought_for(
        file,
        ours=ours,
        as_recorded=as_recorded,
        scheduler=scheduler,
        engine=engine,
        scheduler_command=scheduler_command,
    )
    if brought != OURS and (exact or mutant is not None):
        raise UsageError(
            f"{'--exact' if exact else '--mutant'} with a brought part",
            why="it runs our own",
            todo="add --ours if that is wanted",
        )
    brought.why_no_bits()
    if mutant is not None:
        find_mutant(mutant)
    run = Rerun(exact=exact, mutant=mutant, brought=brought)
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
