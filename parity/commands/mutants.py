"""``parity mutants``: plants every known fault and says which checker noticed it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import click

from parity.campaign.large_cases import MOST_SESSIONS, MOST_TOKENS, PLANTED, shrink_planted
from parity.cases.shrink import size_of
from parity.errors import ExitCode, UsageError
from parity.life_signs import LifeSigns
from parity.models.families import load_family
from parity.mutants import all_mutants, find_mutant
from parity.mutants.mutant import Mutant, Trial
from parity.mutants.running import MutantReport, Status, judge_mutants, select_trials
from parity.outputs import OUTPUT_FILE, save_output


@click.command()
@click.argument("names", nargs=-1, metavar="[NAME]...")
@click.option(
    "--json",
    "json_path",
    type=OUTPUT_FILE,
    metavar="OUT",
    help="Write totals and every trial as JSON.",
)
@click.option("--family", metavar="NAME", help="Only trials of this family.")
@click.option(
    "--fast", is_flag=True, help="The exact engine, and one llama.cpp trial of each mutant that needs it."
)
@click.option(
    "--shrink", is_flag=True, help="Instead, shrink twenty large failing cases, one planted fault each."
)
@click.option("--list", "only_list", is_flag=True, help="List the mutants and run nothing.")
def command(
    names: tuple[str, ...],
    json_path: Path | None,
    family: str | None,
    fast: bool,
    only_list: bool,
    shrink: bool,
) -> ExitCode:
    """Plant every known fault; a fault that no check notices, or that no case reaches, is red."""
    if shrink:
        return shrink_all(names or PLANTED)
    mutants = tuple(find_mutant(name) for name in names) or all_mutants()
    if family is not None:
        load_family(family)  # an unknown name is an error, not an empty run
    if only_list:
        for mutant in mutants:
            click.echo(
                f"{mutant.name:44} {mutant.part:12} "
                f"{'/'.join(killer.value for killer in mutant.killers):24} {mutant.fault}"
            )
        return ExitCode.PASS

    def select(mutant: Mutant) -> tuple[Trial, ...]:
        return select_trials(mutant, family=family, fast=fast)

    with LifeSigns("mutants", total=len(mutants)) as signs:

        def show(report: MutantReport) -> None:
            signs.advance(report.name)
            click.echo(report_line(report))

        reports = judge_mutants(mutants, select, show)
    if not reports:
        raise UsageError("no mutant to run", where="--family", why=f"none applies to {family}")
    summary = summarise(reports)
    if json_path is not None:
        save_output(json_path, json.dumps(summary, indent=1) + "\n")
    click.echo(
        f"{summary['killed']} of {summary['total']} killed, {len(summary['survived'])} survived, "
        f"{len(summary['unreached'])} not reached, {len(summary['broken'])} red without the fault; "
        f"slowest {summary['slowest_s']:.1f} s"
    )
    return ExitCode.PASS if summary["killed"] == summary["total"] else ExitCode.FAIL


def shrink_all(names: Sequence[str]) -> ExitCode:
    """Shrink large failing cases, one line each; red if one stays large."""
    small = 0
    for name in names:
        shrunk = shrink_planted(name)
        small += shrunk.is_small
        (sessions, tokens, *_), (before, rows, *_) = size_of(shrunk.after), size_of(shrunk.before)
        click.echo(
            f"{name:44} {before} sessions, {rows} tokens -> {sessions}, {tokens}  [{shrunk.runs} runs]"
        )
    click.echo(f"{small} of {len(names)} shrunk to at most {MOST_SESSIONS} sessions and {MOST_TOKENS} tokens")
    return ExitCode.PASS if small == len(names) else ExitCode.FAIL


def report_line(report: MutantReport) -> str:
    """One line: status, name, families, by whom and with which trial."""
    worst = next(trial for trial in report.trials if trial.status is report.status)
    who = f"{worst.killer}: " if worst.killer else ""
    where = f"[{worst.trial}; {len(report.trials)} trials]"
    return f"{report.status.value:11} {report.name:44} {who}{worst.text}  {where}"


def summarise(reports: list[MutantReport]) -> dict:
    """What ``--json`` writes."""

    def named(status: Status) -> list[str]:
        return [report.name for report in reports if report.status is status]

    return {
        "total": len(reports),
        "killed": len(named(Status.KILLED)),
        "survived": named(Status.SURVIVED),
        "unreached": named(Status.UNREACHED),
        "broken": named(Status.BROKEN),
        "slowest_s": round(max(report.seconds for report in reports), 3),
        "mutants": [
            {
                "name": report.name,
                "fault": report.fault,
                "part": report.part,
                "status": report.status.value,
                "families": list(report.families),
                "seconds": round(report.seconds, 3),
                "trials": [{**asdict(trial), "status": trial.status.value} for trial in report.trials],
            }
            for report in reports
        ],
    }
