"""``parity handoff``: what handing hidden states from stage to stage costs, beside the
unsplit model in the same run.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from parity.bench.handoff import OUTPUT_TOKENS, PROMPT_TOKENS, HandoffCost
from parity.errors import ExitCode, UsageError
from parity.life_signs import LifeSigns
from parity.models import ModelFile, resolve_model
from parity.outputs import OUTPUT_FILE, save_output
from parity.processes import shared_worker
from parity.run.profiles import profile_of, provenance_line
from parity.suites.suite import pinned_splits


@click.command()
@click.argument("models", nargs=-1, metavar="[MODEL]...")
@click.option("--split", help="A pinned split's name or boundaries such as 2,4; default: every pinned split.")
@click.option(
    "--sessions", "counts", multiple=True, type=click.IntRange(1, 60), help="Concurrent sessions (1, 8, 32)."
)
@click.option(
    "--rounds", default=5, show_default=True, type=click.IntRange(min=1), help="Rounds, ways in turns."
)
@click.option(
    "--threads", default=1, show_default=True, type=click.IntRange(min=1), help="Threads of every context."
)
@click.option("--json", "json_path", type=OUTPUT_FILE, help="Write the figures here.")
def command(
    models: tuple[str, ...],
    split: str | None,
    counts: tuple[int, ...],
    rounds: int,
    threads: int,
    json_path: Path | None,
) -> ExitCode:
    """Measure the hand-off cost per token and stage, in one process and across processes."""
    click.echo(provenance_line(None))
    costs: list[HandoffCost] = []
    for model in models or ("llama",):
        file = resolve_model(model)
        for name in [split] if split else split_names(file):
            profile = profile_of(model).profile
            with LifeSigns(f"{model}, split {name}"):
                arguments = {
                    "model": model,
                    "split": name,
                    "counts": list(counts or (1, 8, 32)),
                    "rounds": rounds,
                    "n_threads": threads,
                    "profile": profile.to_json(),
                }
                worker = shared_worker(profile.environment)
                measured = worker.call("parity.bench.handoff:measure_here", arguments, timeout_s=3600.0)
            costs += [HandoffCost(**item) for item in measured]
    Console(width=130).print(cost_table(costs))
    click.echo(
        f"{PROMPT_TOKENS} prompt and {OUTPUT_TOKENS} generated tokens a session; engine time only, medians "
        f"of {rounds} rounds; ratio: unsplit time divided by this one's"
    )
    if json_path is not None:
        save_output(json_path, json.dumps([asdict(cost) for cost in costs], indent=1) + "\n")
    return ExitCode.PASS


def split_names(file: ModelFile) -> list[str]:
    """Names of the pinned splits of a model's row. Raises ``UsageError`` where there are none."""
    try:
        return [split.name for split in pinned_splits(file.family, file.row)]
    except UsageError as error:
        raise UsageError(
            error.what, where=error.where, why=error.why, todo="give boundaries with --split"
        ) from error


def cost_table(costs: list[HandoffCost]) -> Table:
    """One row per workload and way."""
    table = Table(
        "model",
        "split",
        "stages",
        "sessions",
        "engine",
        "tokens",
        "µs/token",
        "ratio",
        "hand-off µs/token/stage",
        "bytes/token",
    )
    for cost in costs:
        extra = "" if cost.handoff_us is None else f"{cost.handoff_us:.1f}"
        table.add_row(
            cost.model,
            cost.split,
            str(cost.stages),
            str(cost.sessions),
            cost.how,
            str(cost.tokens),
            f"{cost.us_per_token:.1f}",
            f"{cost.ratio:.2f}",
            extra,
            str(cost.bytes_per_token),
        )
    return table
