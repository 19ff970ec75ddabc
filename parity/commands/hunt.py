"""``parity hunt``: cases that only a scheduler can get wrong, on the exact engine, in every policy."""

from __future__ import annotations

from pathlib import Path
from time import monotonic

import click

from parity.campaign.hunt import MARKS, Hunt, judge_hunted, run_hunt
from parity.cases.files import save_failing_case
from parity.cases.shrink import shrink_case
from parity.errors import ExitCode
from parity.life_signs import LifeSigns
from parity.outputs import OUTPUT_FOLDER
from parity.records import Verdict

FAILURES = Path("reports") / "failures"


@click.command()
@click.option("--cases", default=2000, show_default=True, type=click.IntRange(1), help="How many.")
@click.option(
    "--first", default=0, show_default=True, type=click.IntRange(0), help="Number of the first one."
)
@click.option("--policy", "policies", multiple=True, metavar="NAME", help="Only this one; may be repeated.")
@click.option(
    "--out",
    type=OUTPUT_FOLDER,
    default=FAILURES,
    show_default=True,
    help="Where a shrunk failing case is stored.",
)
def command(cases: int, first: int, policies: tuple[str, ...], out: Path) -> ExitCode:
    """Tight pools, deep shared trees, all policies with drawn options, clients, priorities and objectives.

    A case is its number. Red when one fails, or when a policy never once decided otherwise than fcfs.
    """
    started, hunt, interrupted = monotonic(), Hunt(), False
    with LifeSigns("cases", total=cases) as signs:

        def show(hunt: Hunt) -> None:
            signs.update(hunt.cases.total(), f"{len(hunt.failures)} failures")

        try:
            run_hunt(range(first, first + cases), policies, hunt=hunt, report=show)
        except KeyboardInterrupt:
            interrupted = True
    _report(hunt, monotonic() - started)
    if interrupted:
        click.echo(f"not finished: interrupted after {hunt.cases.total()} of {cases} cases")
    for outcome in hunt.failures:
        small = shrink_case(outcome.case, lambda case: judge_hunted(case)[0])
        path = save_failing_case(small, out)
        said = judge_hunted(small)[0].problems[0]
        click.echo(f"{said}\n  parity replay --exact {path}")
    verdict = hunt.verdict
    if interrupted and not hunt.failures:
        verdict = Verdict.UNKNOWN
    return verdict.exit_code


def _report(hunt: Hunt, seconds: float) -> None:
    click.echo(f"{hunt.cases.total()} cases, {len(hunt.failures)} failures, {seconds:.0f} s")
    for policy, count in sorted(hunt.cases.items()):
        marks = ", ".join(f"{name} {hunt.marks[policy][name]}" for name in MARKS)
        click.echo(f"  {policy}: {count} cases; {marks}")
    for kind, count in sorted(hunt.kinds.items()):
        click.echo(f"  {' '.join(kind)}: {count} cases")
    for policy in hunt.missing():
        click.echo(f"never decided otherwise than fcfs: {policy}")
