"""``parity replay``: run a case file again and explain what it comes to."""

from __future__ import annotations

from pathlib import Path

import click

from parity.cases.files import load_case
from parity.errors import ExitCode
from parity.run.contained import run_case
from parity.run.explain import explain_outcome
from parity.run.profiles import engine_line
from parity.run.under_test import Brought, brought_options


@click.command()
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@brought_options
def command(file: Path, scheduler: str | None, engine: str | None) -> ExitCode:
    """Run the case in FILE against its oracle, contained in a worker process."""
    case = load_case(file)
    click.echo(engine_line())
    brought = Brought(scheduler=scheduler, engine=engine)
    brought.why_no_bits()
    outcome = run_case(case, brought=brought)
    click.echo(explain_outcome(outcome, case_file=file, options=brought.options))
    return outcome.verdict.exit_code
