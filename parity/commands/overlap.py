"""``parity overlap``: a chain of processes with one step in flight and with several, side by side."""

from __future__ import annotations

import json
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from parity.bench.overlap import OverlapRow, chain_case, measure_overlap
from parity.commands.handoff import split_names
from parity.errors import ExitCode
from parity.life_signs import LifeSigns
from parity.models import resolve_model
from parity.outputs import OUTPUT_FILE, save_output
from parity.run.chains import legal_split
from parity.run.profiles import profile_of, provenance_line


@click.command()
@click.argument("models", nargs=-1, metavar="[MODEL]...")
@click.option("--split", help="A pinned split's name or boundaries such as 2,4; default: every pinned split.")
@click.option(
    "--sessions", "counts", multiple=True, type=click.IntRange(1, 60), help="Concurrent sessions (1, 8, 32)."
)
@click.option(
    "--steps-in-flight", type=click.IntRange(2, 64), help="Steps in flight; default: as many as stages."
)
@click.option("--input-len", default=32, show_default=True, type=click.IntRange(min=1))
@click.option("--output-len", default=24, show_default=True, type=click.IntRange(min=1))
@click.option(
    "--rounds", default=5, show_default=True, type=click.IntRange(min=1), help="Rounds, ways in turns."
)
@click.option(
    "--threads", default=1, show_default=True, type=click.IntRange(min=1), help="Threads of every stage."
)
@click.option("--json", "json_path", type=OUTPUT_FILE, help="Write the figures here.")
def command(
    models: tuple[str, ...],
    split: str | None,
    counts: tuple[int, ...],
    steps_in_flight: int | None,
    input_len: int,
    output_len: int,
    rounds: int,
    threads: int,
    json_path: Path | None,
) -> ExitCode:
    """Measure what several steps in flight are worth on a chain of stages, a process each."""
    click.echo(provenance_line(None))
    rows: list[OverlapRow] = []
    for model in models or ("llama",):
        file, profile = resolve_model(model), profile_of(model).profile
        for name in [split] if split else split_names(file):
            stages = len(legal_split(file, name).split.stages)
            for count in counts or (1, 8, 32):
                case = chain_case(
                    model,
                    name,
                    sessions=count,
                    input_tokens=input_len,
                    output_tokens=output_len,
                    steps_in_flight=steps_in_flight or stages,
                )
                with LifeSigns(f"{model}, split {name}, {count} sessions"):
                    rows.append(measure_overlap(case, file, profile, rounds=rounds, n_threads=threads))
    Console(width=130).print(overlap_table(rows))
    click.echo(
        f"{input_len} prompt and {output_len} generated tokens a session; medians of {rounds} rounds (least "
        "to most), both ways in turns; idle: the stages' time in which they wait; bubbles: places for steps "
        "in flight that held none"
    )
    if json_path is not None:
        save_output(json_path, json.dumps([row.as_dict() for row in rows], indent=1) + "\n")
    return ExitCode.PASS


def overlap_table(rows: list[OverlapRow]) -> Table:
    """One row per workload: tokens/s, idle time and bubbles of both ways, and the ratio."""
    table = Table(
        "model",
        "split",
        "stages",
        "sessions",
        "one: tokens/s",
        "idle",
        "several: tokens/s",
        "idle",
        "bubbles",
        "ratio",
    )
    for row in rows:
        figures = row.as_dict()
        depth = row.several[0].steps_in_flight
        table.add_row(
            row.model,
            row.split,
            str(row.stages),
            str(row.sessions),
            _told(figures["output_throughput_1"], ".0f"),
            f"{figures['idle_share_1']:.0%}",
            _told(figures[f"output_throughput_{depth}"], ".0f"),
            f"{figures[f'idle_share_{depth}']:.0%}",
            f"{figures[f'bubble_share_{depth}']:.0%}",
            _told(figures["ratio"], ".2f"),
        )
    return table


def _told(spread: dict[str, float], form: str) -> str:
    return f"{spread['median']:{form}} ({spread['min']:{form}}-{spread['max']:{form}})"
