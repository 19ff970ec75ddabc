"""``parity replay``: run a case file again and explain what it comes to."""

from __future__ import annotations

from pathlib import Path

import click

from parity.case_files import load_case
from parity.contained import run_case
from parity.errors import ExitCode
from parity.explain import explain_outcome
from parity.plugins import Brought, brought_options
from parity.provenance import engine_line


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
