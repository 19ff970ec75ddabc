"""``parity gate``: what a merge needs, one verdict, and reports for machines and people."""

from __future__ import annotations

import os
from pathlib import Path
from time import monotonic
from typing import Any

import click
from click.core import ParameterSource
from rich.console import Console

from parity.cases.policy_options import parse_policy_options, policy_option
from parity.commands.check_endpoint import PAIR_OPTION_NAMES, pair_options, read_extra_body
from parity.endpoint.check import EndpointOptions, summary_lines
from parity.endpoint.pair import check_pair
from parity.errors import ExitCode, OutputError, UsageError
from parity.gate.plan import parse_required
from parity.gate.result import (
    DEFAULT_SESSIONS,
    DEFAULT_SPLIT_SESSIONS,
    CheckKind,
    GateCheck,
    GateOptions,
    GateResult,
)
from parity.gate.running import located, run_gate
from parity.life_signs import LifeSigns
from parity.models.families import family_names, load_family
from parity.outputs import OUTPUT_FILE, save_output
from parity.records import Verdict
from parity.report.annotations import annotations_of
from parity.report.data import result_to_json
from parity.report.history import gather_histories
from parity.report.html import result_to_html
from parity.report.junit import result_to_junit
from parity.report.markdown import result_to_markdown
from parity.run.profiles import provenance, provenance_line
from scheduler.policies import policy_names

SUMMARY_VARIABLE = "GITHUB_STEP_SUMMARY"
NOT_CHOSEN = (CheckKind.MODEL, CheckKind.SYSTEM)  # every run looks at models; --system is an option itself
OURS = (
    "families required row frozen sessions split_sessions only policy policy_options jobs".split()
)  # nothing to a pair
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
    type=click.Choice([kind.value for kind in CheckKind if kind not in NOT_CHOSEN]),
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
    "--system",
    metavar="TARGET",
    help="Judge this server, nothing of ours: a URL, package.module:factory, or a command line that starts "
    "one.",
)
@click.option(
    "--baseline",
    metavar="TARGET",
    help="With --system: the known-good server, such as the main branch's build, asked in turns with it.",
)
@click.option("--model", help="With --system: the model's name at both servers.")
@pair_options
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
    system: str | None,
    baseline: str | None,
    model: str | None,
    **asked: Any,
) -> ExitCode:
    """Run everything that a merge needs: families, splits, policies, mutants, goldens.

    With --system and --baseline: what a merge request of a server's own repository needs, both servers in
    one run. The options from --concurrency on are for these two.

    Under GitHub Actions it also annotates the failing tests and adds the summary to the job's page.
    """
    _check_together(system, baseline, model)
    if system is not None:
        result = _pair_result(system, baseline, model, seed or 0, asked)
        return _report(result, json_path, junit_path, markdown_path, html_path)
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
    return _report(result, json_path, junit_path, markdown_path, html_path)


def _check_together(system: str | None, baseline: str | None, model: str | None) -> None:
    """Raises ``UsageError`` for an option that would change nothing, and for half a pair."""
    context = click.get_current_context()
    given = {
        option.name: option.opts[-1]
        for option in context.command.params
        if context.get_parameter_source(option.name) is ParameterSource.COMMANDLINE
    }
    useless = OURS if system is not None else ("baseline", "model", *PAIR_OPTION_NAMES)
    for name in useless:
        if name in given:
            how = "with" if system is not None else "without"
            raise UsageError(f"{given[name]} {how} --system", why="it would change nothing")
    if system is not None and (baseline is None or model is None):
        raise UsageError(
            "--system without --baseline or --model",
            why="the candidate is judged by what a known-good server does",
            todo="name both, for instance the main branch's build",
        )


def _pair_result(system: str, baseline: str, model: str, seed: int, asked: dict[str, Any]) -> GateResult:
    """One check: the candidate against main."""
    started = monotonic()
    options = EndpointOptions(seed=seed, **{**asked, "extra_body": read_extra_body(asked["extra_body"])})
    with LifeSigns("answers") as signs:
        found = check_pair(
            system, baseline, model, options, lambda done, total: signs.update(done, total=total)
        )
    lines = list(summary_lines(found.candidate)) if found.candidate else []
    seconds = round(monotonic() - started, 1)
    check = GateCheck(
        kind=CheckKind.SYSTEM,
        name=f"system: {model}, {system} against {baseline}",
        verdict=found.verdict,
        reason=found.reason,
        explanation="\n".join(lines),
        seconds=seconds,
    )
    click.echo("\n".join([check.headline, *(f"  {line}" for line in lines)]))
    selection = GateOptions(
        families=(), is_selection=True, required={}, only=(CheckKind.SYSTEM,), jobs=1, seed=seed
    )
    return GateResult(
        options=selection,
        provenance=provenance(seed=seed),
        checks=(located(check),),
        models={},
        seconds=seconds,
    )


def _report(
    result: GateResult,
    json_path: Path | None,
    junit_path: Path | None,
    markdown_path: Path | None,
    html_path: Path | None,
) -> ExitCode:
    """Write what was asked for, say the verdict."""
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
    with LifeSigns("checks", console=console) as signs:

        def show(check: GateCheck, done: int, total: int) -> None:
            signs.update(done, total=total)
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
