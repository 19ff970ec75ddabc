"""``parity policies``: the contract of every policy; with --check, whether
each keeps it. Nothing is ranked.
"""

from __future__ import annotations

import textwrap

import click
from rich.console import Console
from rich.table import Table

from parity.errors import ExitCode, UsageError
from parity.life_signs import LifeSigns
from parity.records import Verdict
from parity.suites.policies import (
    CHECKS,
    Cells,
    check_hash_seeds,
    check_policy,
    real_verdicts,
)
from scheduler.policies import contracts, policy_names
from scheduler.policy.contract import Contract

COLUMNS = (*CHECKS, "same in every process", "llama.cpp")
SIGNS = {Verdict.PASS: "pass", Verdict.FAIL: "FAIL", Verdict.UNKNOWN: "unknown"}
WIDTH = 110


@click.command()
@click.argument("names", nargs=-1, metavar="[NAME]...")
@click.option(
    "--check", is_flag=True, help="Run contract checks and parity verdicts instead of listing contracts."
)
def command(names: tuple[str, ...], check: bool) -> ExitCode:
    """Show the contracts of all policies, or of those named."""
    declared = contracts()
    for name in names:
        if name not in declared:
            raise UsageError(
                f"no policy {name!r}", why="it is not registered", todo=f"choose from {', '.join(declared)}"
            )
    chosen = {name: declared[name] for name in names or declared}
    if check:
        return check_all(list(chosen))
    click.echo("\n\n".join(describe(name, contract) for name, contract in chosen.items()))
    click.echo(
        "\nContracts, not results: no policy is ranked, and figures are comparable only at equal coordinates."
    )
    return ExitCode.PASS


def describe(name: str, contract: Contract) -> str:
    """One policy's contract as text."""
    parts = {
        "unit": contract.scheduling_unit,
        "protects": contract.protected_identity,
        "objective": contract.objective,
        "decides": contract.decision,
        "sees": "; ".join(contract.visible_state),
        "does not know": contract.unknown_future,
        "metric": f"{contract.metric}, over {contract.denominator}",
        "assumes": "; ".join(contract.assumptions),
        "others own": "; ".join(contract.foreign_owners),
        "not reproduced": "; ".join(contract.not_reproduced) or "nothing is left out",
        "starvation": "never, by contract" if contract.starvation_free else "possible, see progress",
        "progress": contract.progress,
        "source": contract.source,
    }
    lines = [name]
    for title, text in parts.items():
        lines += textwrap.wrap(text, WIDTH, initial_indent=f"  {title:15}", subsequent_indent=" " * 17)
    return "\n".join(lines)


def check_all(names: list[str]) -> ExitCode:
    """Run every check of the policies named; a table, the problems, one verdict line."""
    policies = [name for name in names if name in policy_names()]
    rows: dict[str, Cells] = {name: {} for name in names}
    with LifeSigns("policies", total=len(names) + len(policies) + 1) as signs:
        for name in names:
            rows[name] |= {item.name: (item.verdict, item.said) for item in check_policy(name)}
            signs.advance(name)
        for item in check_hash_seeds(policies):
            rows[item.policy][item.name] = (item.verdict, item.said)
        signs.advance("processes")
        for name, cell in real_verdicts(policies, signs.advance).items():
            rows[name]["llama.cpp"] = cell
    return show(rows)


def show(rows: dict[str, Cells]) -> ExitCode:
    """Print the table, what is wrong, and the verdict line."""
    console = Console(width=None if Console().is_terminal else 200)
    table = Table("policy", *COLUMNS, title="Policies and their contracts, in alphabetical order")
    for name, cells in rows.items():
        table.add_row(name, *(cell_text(column, cells.get(column)) for column in COLUMNS))
    console.print(table)
    verdicts = []
    for name, cells in rows.items():
        for column, (verdict, said) in cells.items():
            verdicts.append(verdict)
            if verdict is not Verdict.PASS:
                click.echo(f"{SIGNS[verdict]}: {name}, {column}: {said}")
    worst = Verdict.merge(verdicts)
    click.echo(
        f"policies: {worst.value}; {len(rows)} contracts, {len(verdicts)} verdicts, "
        f"{sum(v is Verdict.PASS for v in verdicts)} pass, {sum(v is Verdict.FAIL for v in verdicts)} fail, "
        f"{sum(v is Verdict.UNKNOWN for v in verdicts)} unknown"
    )
    return worst.exit_code


def cell_text(column: str, cell: tuple[Verdict, str] | None) -> str:
    """One cell: the verdict, with the count or the family where there is one; "-":
    there is nothing of it to check.
    """
    if cell is None:
        return "-"
    verdict, said = cell
    return said if verdict is Verdict.PASS and column == "llama.cpp" else SIGNS[verdict]
