"""``parity doctor``: which numerics profiles are exact for a model on this CPU
and build, what each costs, and how many shards are fastest.
"""

from __future__ import annotations

import click
from rich.console import Console
from rich.table import Table

from parity.errors import ExitCode
from parity.life_signs import LifeSigns
from parity.models import resolve_model
from parity.run.call_cost import CallCost, cost_of
from parity.run.profiles import choose, profile_of, provenance_line, try_all


@click.command()
@click.argument("model")
@click.option("--again", is_flag=True, help="Test again instead of showing what is remembered.")
def command(model: str, again: bool) -> ExitCode:
    """Show the candidates for MODEL: bit-identical sessions of the self-test, and tokens per second."""
    file = resolve_model(model)
    click.echo(provenance_line(None))
    with LifeSigns(f"self-test of {file.path.name}"):
        choice = choose(try_all(model)) if again else profile_of(model)
    table = Table(
        "profile",
        "environment",
        "repacked weights",
        "flash attention",
        "rows per call",
        "bit-identical",
        "tokens/s",
        "problem",
    )
    for trial in choice.trials:
        profile = trial.profile
        table.add_row(
            profile.name + (" (chosen)" if profile == choice.profile and choice.exact else ""),
            " ".join(f"{key}={value}" for key, value in profile.environment) or "-",
            "yes" if profile.use_extra_bufts else "no",
            "on" if profile.flash_attention else "off",
            f"{2 if profile.pad_lone_rows else 1} to {profile.max_call_rows}",
            f"{trial.bit_identical} of {trial.sessions}",
            f"{trial.tokens_per_s:.0f}",
            trial.problem,
        )
    Console(width=170).print(table)
    with LifeSigns(f"cost of a call of {file.path.name}"):
        cost = cost_of(model, again=again)
    click.echo(told(cost, call_rows=choice.profile.max_call_rows))
    if not choice.exact:
        click.echo(f"tier bits is unknown: {choice.reason}")
        return ExitCode.UNKNOWN
    click.echo(f"exact: {choice.profile.name}")
    return ExitCode.PASS


SESSIONS, CELLS, THREADS = 32, 256, 2  # of the example


def told(cost: CallCost, *, call_rows: int) -> str:
    """What a call costs, and the number of shards for an example, in a line."""
    shards = cost.best_shards(
        sessions=SESSIONS, cells=CELLS, threads=THREADS, most=SESSIONS, call_rows=call_rows
    )
    return (
        f"a decode call, one thread: {cost.call_s * 1e6:.0f} us, {cost.row_s * 1e6:.0f} us a row, "
        f"{cost.own_cell_s * 1e9:.0f} ns a cell that it sees, {cost.cell_s * 1e9:.1f} ns a cell in use; "
        f"{SESSIONS} sessions of {CELLS} cells on {THREADS} threads are fastest in {shards} shards"
    )
