"""``parity replay``: run a case file again and explain what it comes to."""

from __future__ import annotations

from pathlib import Path

import click

from parity.cases.files import load_case
from parity.commands.check_endpoint import read_extra_body
from parity.endpoint.case import is_system_case, load_system_case
from parity.endpoint.check import EndpointOptions
from parity.endpoint.connect import KINDS
from parity.endpoint.replay import replay_system_case
from parity.errors import ExitCode, UsageError
from parity.run.contained import run_case
from parity.run.explain import explain_outcome
from parity.run.profiles import engine_line
from parity.run.runner import check_settings, run_exact_case
from parity.run.under_test import OURS, brought_for, brought_options, whose_options


@click.command()
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--exact", is_flag=True, help="On the exact engine, without a model.")
@click.option("--endpoint", metavar="URL", help="The server, for a case of a whole server.")
@click.option("--model", help="The model's name at the server.")
@click.option(
    "--times", default=5, show_default=True, type=click.IntRange(1), help="How often to ask a server."
)
@click.option("--api", "kind", default="auto", type=click.Choice(KINDS), help="How to ask a server.")
@click.option("--extra-body", metavar="JSON", help="Fields for every request to a server.")
@brought_options
@whose_options
def command(
    file: Path,
    exact: bool,
    scheduler: str | None,
    engine: str | None,
    scheduler_command: str | None,
    ours: bool,
    as_recorded: bool,
    endpoint: str | None,
    model: str | None,
    times: int,
    kind: str,
    extra_body: str | None,
) -> ExitCode:
    """Run the case in FILE against its oracle, contained in a worker process, or with --exact on the engine
    that has no model.

    A case of a whole server is run on the one at --endpoint, several times: its batches depend on time.
    """
    if is_system_case(file):
        if endpoint is None or model is None:
            raise UsageError("a case of a whole server", where=str(file), todo="name --endpoint and --model")
        options = EndpointOptions(kind=kind, extra_body=read_extra_body(extra_body))
        verdict, lines = replay_system_case(
            load_system_case(file), endpoint, model, options=options, times=times
        )
        for line in lines:
            click.echo(line)
        return verdict.exit_code
    if endpoint is not None or model is not None or extra_body is not None:
        raise UsageError("a case of our own engine", where=str(file), why="it has no use for --endpoint")
    case = load_case(file)
    brought = brought_for(
        file,
        ours=ours,
        as_recorded=as_recorded,
        scheduler=scheduler,
        engine=engine,
        scheduler_command=scheduler_command,
    )
    if exact:
        if brought != OURS:
            raise UsageError(
                "--exact with a brought part",
                why="the exact engine runs our own scheduler",
                todo="add --ours if that is wanted",
            )
        check_settings(case)
        outcome = run_exact_case(case)
    else:
        click.echo(engine_line())
        brought.why_no_bits()
        outcome = run_case(case, brought=brought)
    click.echo(explain_outcome(outcome, case_file=file, options=" --ours" if ours else brought.options))
    return outcome.verdict.exit_code
