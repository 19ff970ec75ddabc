"""``parity gate``: what a merge needs, one verdict, and reports for machines and people."""

from __future__ import annotations

import os
from pathlib import Path

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from parity.cases.policy_options import parse_policy_options, policy_option
from parity.errors import ExitCode, OutputError
from parity.gate.plan import parse_required
from parity.gate.result import (
    DEFAULT_SESSIONS,
    DEFAULT_SPLIT_SESSIONS,
    CheckKind,
    GateCheck,
    GateOptions,
    GateResult,
)
from parity.gate.running import run_gate
from parity.models.families import family_names, load_family
from parity.outputs import OUTPUT_FILE, save_output
from parity.records import Verdict
from parity.report.annotations import annotations_of
from parity.report.data import result_to_json
from parity.report.history import gather_histories
from parity.report.html import result_to_html
from parity.report.junit import result_to_junit
from parity.report.markdown import result_to_markdown
from parity.run.profiles import provenance_line
from scheduler.policies import policy_names

SUMMARY_VARIABLE = "GITHUB_STEP_SUMMARY"
COLOURS = {Verdict.PASS: "green", Verdict.FAIL: "red", Verdict.UNKNOWN: "yellow"}


@click.command(
    epilog="Exit codes: 0 every check passed; 1 one failed; 2 one is unknown (a row is missing or unlocked, "
    "nothing was selected, a check could not run); 64 bad input."
)
@click.option("--family", "families", multiple=True, metavar="NAME", help="Only this family (repeatable).")
@click.option(
    "--require",
    "required",
    multiple=True,
    metavar="[FAMILY=]TIER",
    help="Tier that a family must reach, bits (default) or bytes; a required family must be part of the run.",
)
@click.option("--row", default="tiny", show_default=True, help="Model row that families are checked on.")
@click.option("--frozen", is_flag=True, help="Rows that nobody has locked are unknown.")
@click.option(
    "--sessions",
    default=DEFAULT_SESSIONS,
    show_default=True,
    type=click.IntRange(min=1),
    help="Sessions to compare per family and layout.",
)
@click.option(
    "--split-sessions",
    default=DEFAULT_SPLIT_SESSIONS,
    show_default=True,
    type=click.IntRange(min=1),
    help="Sessions to compare per split.",
)
@click.option(
    "--only",
    multiple=True,
    type=click.Choice([kind.value for kind in CheckKind if kind is not CheckKind.MODEL]),
    help="Run only these kinds of checks (repeatable); the others are unknown, so this never passes.",
)
@click.option("--seed", type=int, help="Explore other cases than the derandomised default.")
@click.option(
    "--policy",
    default="fcfs",
    show_default=True,
    type=click.Choice(policy_names()),
    metavar="NAME",
    help="Scheduling policy of the families' suites.",
)
@policy_option
@click.option("--jobs", default=2, show_default=True, type=click.IntRange(min=1), help="Processes.")
@click.option(
    "--json", "json_path", type=OUTPUT_FILE, help="Write the result here (parity/schemas/gate.schema.json)."
)
@click.option("--junit", "junit_path", type=OUTPUT_FILE, help="Write JUnit XML here.")
@click.option("--markdown", "markdown_path", type=OUTPUT_FILE, help="Write a summary here.")
@click.option("--html", "html_path", type=OUTPUT_FILE, help="Write one page with pictures here.")
def command(
    families: tuple[str, ...],
    required: tuple[str, ...],
    row: str,
    frozen: bool,
    sessions: int,
    split_sessions: int,
    only: tuple[str, ...],
    seed: int | None,
    policy: str,
    policy_options: tuple[str, ...],
    jobs: int,
    json_path: Path | None,
    junit_path: Path | None,
    markdown_path: Path | None,
    html_path: Path | None,
) -> ExitCode:
    """Run everything that a merge needs: families, splits, policies, mutants, goldens.

    Under GitHub Actions it also annotates the failing tests and adds the summary to the job's page.
    """
    for name in families or family_names():
        load_family(name).row(row)
    known = family_names()
    chosen = tuple(name for name in known if not families or name in families)
    options = GateOptions(
        families=chosen,
        is_selection=bool(families),
        required=parse_required(required, known=known, chosen=chosen),
        row=row,
        sessions=sessions,
        split_sessions=split_sessions,
        frozen=frozen,
        only=tuple(map(CheckKind, only)),
        jobs=jobs,
        seed=seed,
        policy=policy,
        policy_options=parse_policy_options(policy, policy_options),
    )
    click.echo(provenance_line(seed))
    result = _run_with_progress(options)
    if json_path is not None:
        save_output(json_path, result_to_json(result))
    if junit_path is not None:
        save_output(junit_path, result_to_junit(result))
    summary = result_to_markdown(result)
    if markdown_path is not None:
        save_output(markdown_path, summary)
    if html_path is not None:
        save_output(html_path, result_to_html(result, gather_histories(result)))
    _tell_github(result, summary)
    counts = ", ".join(f"{result.count(verdict)} {verdict.value}" for verdict in Verdict)
    click.echo(f"verdict: {result.verdict.value} ({counts}, {result.seconds:g} s)")
    return result.verdict.exit_code


def _run_with_progress(options: GateOptions) -> GateResult:
    """Run the gate; a line per check that ends, a bar on a terminal."""
    console = Console(stderr=True, highlight=False)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("gate", total=None)

        def show(check: GateCheck, done: int, total: int) -> None:
            progress.update(task, completed=done, total=total)
            style = COLOURS[check.verdict]
            console.print(
                f"[{style}]{check.verdict.value:7}[/] {check.name} {_figures(check)}", soft_wrap=True
            )
            if check.verdict is not Verdict.PASS:
                for line in (check.headline, *check.explanation.splitlines()):
                    click.echo(line if line is check.headline else f"  {line}")

        return run_gate(options, show)


def _figures(check: GateCheck) -> str:
    text = f"{check.seconds:.1f} s" if check.seconds else ""
    if check.counts is not None and check.bits is not None:
        text = f"{check.counts.bit_identical} of {check.counts.sessions} sessions bit-identical, {text}"
    return text


def _tell_github(result: GateResult, summary: str) -> None:
    """Annotations and the job's summary, where the environment says that this is a workflow."""
    if os.environ.get("GITHUB_ACTIONS") == "true":
        for line in annotations_of(result):
            click.echo(line)
    if path := os.environ.get(SUMMARY_VARIABLE):
        try:
            with open(path, "a", encoding="utf-8") as file:
                file.write(summary)
        except OSError as error:
            raise OutputError("summary cannot be written", where=path, why=error.strerror or "") from error
