"""``parity replay``: run a case file again and explain what it comes to."""

from __future__ import annotations

from pathlib import Path

import click

from parity.contained import run_case
from parity.errors import ExitCode, UsageError
from parity.explain import explain_outcome
from parity.provenance import provenance_line
from parity.records import Case


@click.command()
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
def command(file: Path) -> ExitCode:
    """Run the case in FILE against its oracle, contained in a worker process."""
    try:
        text = file.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError("case file cannot be read", where=str(file), why=str(error)) from error
    case = Case.from_json(text, where=str(file))
    click.echo(provenance_line(case.seed))
    outcome = run_case(case)
    click.echo(explain_outcome(outcome, case_file=file))
    return outcome.verdict.exit_code
