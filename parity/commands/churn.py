"""``parity churn``: how much is computed twice when a pool is kept full."""

from __future__ import annotations

import json

import click
from rich.console import Console
from rich.table import Table

from parity.bench.scheduler_alone import run_churn
from parity.errors import ExitCode
from parity.life_signs import LifeSigns


@click.command()
@click.option(
    "--occupancy",
    "shares",
    multiple=True,
    type=click.FloatRange(0.05, 1.0),
    default=(0.5, 0.8, 0.95),
    show_default=True,
    help="Share of the pool that admission fills; may be repeated.",
)
@click.option("--requests", default=400, show_default=True, type=click.IntRange(1))
@click.option("--cells", default=4096, show_default=True, type=click.IntRange(512))
@click.option("--seed", default=0, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="One JSON object a line.")
def command(shares: tuple[float, ...], requests: int, cells: int, seed: int, as_json: bool) -> ExitCode:
    """Rebuilt rows per useful row, prompts and outputs of 16 to 256 tokens, lengths declared as they are.

    Admission either reserves the rows to come (the default policy) or counts prompts alone (optimistic).
    """
    table = Table(
        "admission", "fills", "cells in use", "rebuilt / useful", "preemptions", "retired ids at most"
    )
    plan = [(reserving, share) for reserving in (True, False) for share in shares]
    with LifeSigns("pools") as signs:
        for reserving, share in signs.each(plan):
            churn = run_churn(share, reserving=reserving, requests=requests, num_cells=cells, seed=seed)
            name = "reserving" if reserving else "optimistic"
            if as_json:
                click.echo(
                    json.dumps(
                        {
                            "admission": name,
                            "fills": share,
                            **{field: getattr(churn, field) for field in churn.__slots__},
                        }
                    )
                )
            table.add_row(
                name,
                f"{share:.0%}",
                f"{churn.occupancy:.0%}",
                f"{churn.rebuild_rate:.3f}",
                str(churn.preemptions),
                str(churn.most_retired_ids),
            )
    if not as_json:
        Console().print(table)
    return ExitCode.PASS
