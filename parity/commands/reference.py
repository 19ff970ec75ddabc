"""``parity reference``: how far llama.cpp's answers are from a float64
reference, and whether that is rounding.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import click
from rich.console import Console

from parity.errors import ExitCode, UsageError
from parity.life_signs import LifeSigns
from parity.models.families import load_families
from parity.outputs import OUTPUT_FILE
from parity.suites.truth import PROMPT_TOKENS, WAYS, measure_distances, variant_models


@click.command()
@click.argument("models", nargs=-1, metavar="[MODEL]...")
@click.option(
    "--variants",
    is_flag=True,
    help="Instead of MODEL: every variant row, and these and the 256 wide rows quantised.",
)
@click.option(
    "--way", "ways", multiple=True, type=click.Choice(list(WAYS)), help="Only this way; may be repeated."
)
@click.option(
    "--prompt-tokens",
    default=",".join(map(str, PROMPT_TOKENS)),
    show_default=True,
    metavar="N,N,...",
    help="Lengths of the prompts.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the distances as JSON.")
@click.option("--out", type=OUTPUT_FILE, help="Draw them into this .png or .svg file.")
def command(
    models: tuple[str, ...],
    variants: bool,
    ways: tuple[str, ...],
    prompt_tokens: str,
    as_json: bool,
    out: Path | None,
) -> ExitCode:
    """Compare llama.cpp alone with the float64 reference at every position of some prompts.

    MODEL: as for `parity check --model`; without any, the tiny model of every family. The exit code is 1 if a
    position is further from the reference than rounding can bring it.
    """
    if models and variants:
        raise UsageError("--variants names its models itself", why=f"{models[0]!r} was named too")
    if out is not None and out.suffix not in (".png", ".svg"):
        raise UsageError("picture has no known ending", where=str(out), todo="end --out in .png or .svg")
    try:
        lengths = tuple(int(part) for part in prompt_tokens.split(","))
    except ValueError:
        lengths = ()
    if not lengths or min(lengths) < 1:
        raise UsageError(
            f"--prompt-tokens {prompt_tokens!r} is not valid", why="needs numbers from 1 on, with commas"
        )
    with LifeSigns("models") as signs:
        distances = [
            distance
            for model in signs.each(models or (variant_models() if variants else tuple(load_families())))
            for distance in measure_distances(model, ways=ways or tuple(WAYS), prompt_tokens=lengths)
        ]
    if out is not None:
        from parity.report.truth import save_distance_plot  # loads matplotlib

        save_distance_plot(distances, out)
    if as_json:
        click.echo(json.dumps([{**asdict(d), "verdict": d.verdict.value} for d in distances], indent=2))
    else:
        _print(distances)
    return ExitCode.FAIL if any(distance.beyond for distance in distances) else ExitCode.PASS


def _print(distances: list) -> None:
    from parity.report.truth import distance_table

    console = Console(width=150)
    console.print(distance_table(distances))
    for distance in distances:
        for line in distance.beyond:
            console.print(f"{distance.model} {distance.way}: {line}")
        for tie in distance.ties:
            console.print(f"{distance.model} {distance.way}: tie: {tie}")
