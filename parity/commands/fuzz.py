"""``parity fuzz``: a campaign. Explores cases from a seed, keeps what fails, shrunk, as a file to replay."""

from __future__ import annotations

import json
import re
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import click

from parity.campaign.campaign import (
    DATABASE_KEY,
    DEFAULT_LAYOUTS,
    FEATURE_PAIRS,
    Found,
    Plan,
    Tally,
    first_complaint,
    keep_failures,
    known_failures,
    open_database,
    open_executor,
    run_campaign,
)
from parity.cases.policy_options import PolicyOptions, parse_policy_options, policy_option
from parity.cases.shrink import fault_signature
from parity.checkers.marks import MARKS
from parity.errors import ExitCode, UsageError
from parity.life_signs import LifeSigns
from parity.models.families import load_families, load_family
from parity.outputs import OUTPUT_FILE, OUTPUT_FOLDER, save_output
from parity.records import Verdict
from parity.run.under_test import OURS, Brought, brought_options
from scheduler.limits import Layout
from scheduler.policies import policy_names

REGRESSIONS = Path("tests") / "regressions"


@click.command()
@click.option(
    "--minutes", type=click.FloatRange(min=0.0), default=1.0, show_default=True, help="How long to explore."
)
@click.option(
    "--batches", type=click.IntRange(min=1), help="Explore this many batches of about 12 cases and stop."
)
@click.option("--jobs", type=click.IntRange(min=1), default=2, show_default=True, help="Batches at a time.")
@click.option(
    "--shard",
    default="1/1",
    show_default=True,
    metavar="I/N",
    help="Only the I-th of N parts of the same cases.",
)
@click.option(
    "--family", "families", multiple=True, metavar="NAME", help="Only this family; may be repeated."
)
@click.option(
    "--policy", "policies", multiple=True, metavar="NAME", help="Only this policy; may be repeated."
)
@policy_option
@click.option(
    "--layout",
    "layouts",
    multiple=True,
    type=click.Choice([layout.value for layout in Layout]),
    help="Only this layout (default: unified and streams); may be repeated.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="The same seed explores the same cases.")
@click.option("--collect", is_flag=True, help="Go on after a failure, and keep one case of each kind.")
@click.option(
    "--require-coverage", is_flag=True, help="Unknown, not pass, if a mark or a pair of features is missing."
)
@click.option("--exact", is_flag=True, help="On the exact engine instead of llama.cpp.")
@click.option("--mutant", metavar="NAME", help="Plant a known fault, to see it found.")
@brought_options
@click.option(
    "--executor",
    default="local",
    show_default=True,
    metavar="local|dask://HOST:PORT",
    help="Where batches run; Dask needs the extra samebytes[dask].",
)
@click.option(
    "--database",
    type=OUTPUT_FOLDER,
    metavar="DIR",
    help="Hypothesis database of failing cases: they run first, and new ones are added.",
)
@click.option(
    "--out",
    type=OUTPUT_FOLDER,
    default=REGRESSIONS,
    show_default=True,
    help="Where shrunk failing cases are stored.",
)
@click.option(
    "--json",
    "json_path",
    type=OUTPUT_FILE,
    metavar="OUT",
    help="Write totals.",
)
def command(
    families: tuple[str, ...],
    policies: tuple[str, ...],
    policy_options: tuple[str, ...],
    layouts: tuple[str, ...],
    seed: int,
    shard: str,
    minutes: float,
    batches: int | None,
    jobs: int,
    collect: bool,
    require_coverage: bool,
    exact: bool,
    mutant: str | None,
    scheduler: str | None,
    engine: str | None,
    scheduler_command: str | None,
    executor: str,
    database: Path | None,
    out: Path,
    json_path: Path | None,
) -> ExitCode:
    """Explore cases from a seed until the time is up or something fails; shrink and store what failed."""
    brought = Brought(scheduler=scheduler, engine=engine, scheduler_command=scheduler_command)
    if brought != OURS and (exact or mutant is not None):
        raise UsageError(
            f"{'--exact' if exact else '--mutant'} with{brought.options}", why="it is about ours"
        )
    brought.why_no_bits()
    # What is brought decides by itself: it owes no other policy's contract.
    policies = policies or (("fcfs",) if brought != OURS else ())
    plan = Plan(
        brought=brought,
        families=_known(families),
        policies=_known_policies(policies),
        policy_options=_options_of(policies, policy_options),
        seed=seed,
        exact=exact,
        mutant=mutant,
        layouts=tuple(map(Layout, layouts)) or DEFAULT_LAYOUTS,
    )
    part = parse_shard(shard)
    again = _rerun_known(plan, database) if database is not None else {}
    if again and not collect:
        tally = Tally(found=again)
    else:
        tally = _explore(
            plan, executor, minutes=minutes, jobs=jobs, shard=part, batches=batches, collect=collect
        )
        tally.found.update(
            {signature: found for signature, found in again.items() if signature not in tally.found}
        )
    keep_failures(tally, plan, out, shrink=not tally.cut_off)
    if database is not None:
        for found in tally.found.values():
            open_database(database).save(DATABASE_KEY, found.case.to_json().encode())
    if json_path is not None:
        save_output(json_path, json.dumps({"seed": seed, "shard": shard, **tally.to_data()}, indent=1) + "\n")
    _report(tally)
    missing = require_coverage and (tally.missing_marks or tally.missing_pairs)
    known = not (missing or tally.cut_off or not tally.cases)
    verdict = Verdict.FAIL if tally.found else Verdict.PASS if known else Verdict.UNKNOWN
    click.echo(f"verdict: {verdict.value} ({tally.cases} cases, {tally.sessions} sessions)")
    return verdict.exit_code


def parse_shard(text: str) -> tuple[int, int]:
    """``I/N`` with 1 <= I <= N. Raises ``UsageError``."""
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise UsageError(
            f"shard {text!r}", where="--shard", why="must be I/N with I from 1 to N", todo="say 1/4"
        )
    return int(match[1]), int(match[2])


def _known(families: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(load_family(name).name for name in dict.fromkeys(families)) or tuple(load_families())


def _options_of(policies: tuple[str, ...], texts: tuple[str, ...]) -> PolicyOptions:
    """Fixed options belong to one policy; without any each case draws its own."""
    if texts and len(policies) != 1:
        raise UsageError("--policy-option", why="it does not say of which policy", todo="give one --policy")
    return parse_policy_options(policies[0], texts) if texts else ()


def _known_policies(policies: tuple[str, ...]) -> tuple[str, ...]:
    for name in policies:
        if name not in policy_names():
            known = ", ".join(policy_names())
            raise UsageError(f"no policy {name!r}", where="--policy", why=f"known: {known}")
    return policies


def _rerun_known(plan: Plan, database: Path) -> dict[tuple[str, ...], Found]:
    """Earlier failures that still fail; those that pass now stay in the database, as regressions do."""
    run, found = plan.rerun(), {}
    try:
        for case in known_failures(open_database(database)):
            outcome = run(case)
            if outcome.verdict is Verdict.FAIL:
                signature = fault_signature(outcome)
                found[signature] = Found(signature, case, first_complaint(outcome))
    finally:
        run.close()
    return found


def _explore(
    plan: Plan,
    executor: str,
    *,
    minutes: float,
    jobs: int,
    shard: tuple[int, int],
    batches: int | None,
    collect: bool,
) -> Tally:
    with LifeSigns("seconds", total=60 * minutes) as signs:
        tally = Tally()

        def show(tally: Tally) -> None:
            signs.update(round(tally.seconds), progress_line(tally))

        try:
            with open_executor(executor, jobs) as pool:
                run_campaign(
                    plan,
                    pool,
                    minutes=minutes,
                    jobs=jobs,
                    shard=shard,
                    max_batches=batches,
                    collect=collect,
                    on_batch=show,
                    tally=tally,
                )
        except KeyboardInterrupt:
            tally.cut_off = "interrupted"
        except BrokenProcessPool as error:
            tally.cut_off = f"a process of the campaign died: {error}"
        return tally


def progress_line(tally: Tally) -> str:
    """Cases, marks, pairs of features and failures so far."""
    marks, pairs = len(MARKS) - len(tally.missing_marks), len(FEATURE_PAIRS) - len(tally.missing_pairs)
    return (
        f"{tally.cases} cases, {marks}/{len(MARKS)} marks, {pairs}/{len(FEATURE_PAIRS)} feature pairs, "
        f"{tally.failures} failures"
    )


def _report(tally: Tally) -> None:
    click.echo(f"{progress_line(tally)}, {tally.sessions} sessions, {tally.seconds:.0f} s")
    if tally.cut_off:
        click.echo(f"not finished: {tally.cut_off}")
    if tally.missing_marks:
        click.echo(f"marks never hit: {', '.join(tally.missing_marks)}")
    if tally.missing_pairs:
        click.echo(f"pairs of features never seen: {', '.join(tally.missing_pairs)}")
    for found in tally.found.values():
        sessions, tokens = (
            len(found.case.sessions),
            sum(len(s.prompt) + s.max_tokens for s in found.case.sessions),
        )
        click.echo(f"{' / '.join(found.signature)} ({found.count} times): {found.text}")
        click.echo(f"  shrunk to {sessions} sessions, {tokens} tokens: parity replay {found.path}")
