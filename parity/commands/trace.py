"""``parity trace``: draw one run as a page: who ran when, pool and queue, preemptions and shares."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import click

from parity.cases.files import load_case
from parity.cases.policy_options import parse_policy_options, policy_option
from parity.errors import ExitCode, UsageError
from parity.outputs import OUTPUT_FILE, save_output
from parity.records import Case
from parity.report.history import ENGINES, TraceView, view_of_exact_run, view_of_real_run
from parity.report.timeline import draw_trace
from parity.run.runner import check_settings
from parity.run.under_test import OURS, Brought, brought_for, scheduler_options, whose_options


@click.command()
@click.argument("file", metavar="CASE", type=click.Path(dir_okay=False, path_type=Path))
@click.option(
    "--html",
    "out",
    required=True,
    type=OUTPUT_FILE,
    metavar="OUT",
    help="Write one self-contained page.",
)
@click.option(
    "--engine",
    type=click.Choice(sorted(ENGINES)),
    help="exact: no model; real: llama.cpp. Default: real if the model is there.",
)
@click.option("--policy", metavar="NAME", help="Run the case under this policy instead of its own.")
@policy_option
@scheduler_options
@whose_options
def command(
    file: Path,
    out: Path,
    engine: str | None,
    policy: str | None,
    policy_options: tuple[str, ...],
    scheduler: str | None,
    scheduler_command: str | None,
    ours: bool,
    as_recorded: bool,
) -> ExitCode:
    """Run the case in the file CASE and draw its trace, with the scheduler and the engine that it names."""
    case = load_case(file)
    brought = brought_for(
        file, ours=ours, as_recorded=as_recorded, scheduler=scheduler, scheduler_command=scheduler_command
    )
    if brought != OURS and engine == "exact":
        raise UsageError(
            "--engine exact with a brought part", why="it runs our own", todo="add --ours if that is wanted"
        )
    brought.why_no_bits()
    if policy is not None or policy_options:
        policy = case.policy if policy is None else policy
        case = replace(case, policy=policy, policy_options=parse_policy_options(policy, policy_options))
    check_settings(case)
    view = look(case, engine, brought)
    save_output(out, draw_trace(view))
    click.echo(f"{out}: {view.steps} steps of {len(view.lanes)} sessions under {view.policy}, {view.engine}")
    for note in view.notes:
        click.echo(f"  {note}")
    return ExitCode.FAIL if view.notes and not case.faults else ExitCode.PASS


def look(case: Case, engine: str | None, brought: Brought) -> TraceView:
    """Run a case on the engine asked for; without a wish, on llama.cpp unless
    its model or library is missing.
    """
    if brought != OURS:
        return view_of_real_run(case, brought)
    if engine is not None:
        return ENGINES[engine](case)
    try:
        return view_of_real_run(case)
    except (UsageError, ImportError) as error:
        click.echo(f"no real run ({error}); exact engine instead", err=True)
        return view_of_exact_run(case)
