"""``parity trace``: draw one run as a page: who ran when, pool and queue, preemptions and shares."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import click

from parity.errors import ExitCode, UsageError
from parity.records import Case
from parity.store import save_text
from parity.trace_view.collect import ENGINES, view_of_exact_run, view_of_real_run
from parity.trace_view.draw import draw_trace
from parity.trace_view.records import TraceView
from scheduler.policies import make_policy


@click.command()
@click.argument("file", metavar="CASE", type=click.Path(dir_okay=False, path_type=Path))
@click.option(
    "--html",
    "out",
    required=True,
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="OUT",
    help="Write one self-contained page.",
)
@click.option(
    "--engine",
    type=click.Choice(sorted(ENGINES)),
    help="exact: no model; real: llama.cpp. Default: real if the model is there.",
)
@click.option("--policy", metavar="NAME", help="Run the case under this policy instead of its own.")
def command(file: Path, out: Path, engine: str | None, policy: str | None) -> ExitCode:
    """Run the case in the file CASE and draw its trace."""
    try:
        case = Case.from_json(file.read_text(encoding="utf-8"), where=str(file))
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError("case file cannot be read", where=str(file), why=str(error)) from error
    if policy is not None:
        case = replace(case, policy=policy, policy_options=())
    try:
        make_policy(case.policy, **dict(case.policy_options))
    except ValueError as error:
        raise UsageError(
            "policy cannot be made", where=str(file), why=str(error), todo="see `parity policies`"
        ) from error
    view = look(case, engine)
    save_text(out, draw_trace(view))
    click.echo(f"{out}: {view.steps} steps of {len(view.lanes)} sessions under {view.policy}, {view.engine}")
    for note in view.notes:
        click.echo(f"  {note}")
    return ExitCode.FAIL if view.notes and not case.faults else ExitCode.PASS


def look(case: Case, engine: str | None) -> TraceView:
    """Run a case on the engine asked for; without a wish, on llama.cpp unless its model or library is
    missing.
    """
    if engine is not None:
        return ENGINES[engine](case)
    try:
        return view_of_real_run(case)
    except (UsageError, ImportError) as error:
        click.echo(f"no real run ({error}); exact engine instead", err=True)
        return view_of_exact_run(case)
