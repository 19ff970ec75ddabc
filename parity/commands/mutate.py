"""``parity mutate``: random mutations of source files that the given commands must notice."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict
from pathlib import Path

import click

from parity.campaign.campaign import open_executor
from parity.commands.fuzz import parse_shard
from parity.errors import ExitCode, UsageError
from parity.life_signs import LifeSigns
from parity.outputs import OUTPUT_FILE, save_output
from parity.store import REPOSITORY

BASELINE_TIMEOUT_S = 3600.0


@click.command()
@click.argument("paths", nargs=-1, required=True, metavar="PATH...")
@click.option(
    "--tests",
    "commands",
    multiple=True,
    required=True,
    metavar="COMMAND",
    help="A shell command that passes on the clean tree and must fail on a mutated one; may be repeated, "
    "the quickest first.",
)
@click.option("--count", type=click.IntRange(min=1), default=100, show_default=True, help="Mutations to try.")
@click.option("--seed", type=int, default=0, show_default=True, help="The same seed draws the same list.")
@click.option("--shard", default="1/1", show_default=True, metavar="I/N", help="Only the I-th of N parts.")
@click.option("--jobs", type=click.IntRange(min=1), default=2, show_default=True, help="Trees at a time.")
@click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(min=1.0),
    metavar="SECONDS",
    help="End a command after so long.  [default: four times the clean run, at least 10 s]",
)
@click.option(
    "--executor",
    default="local",
    show_default=True,
    metavar="local|dask://HOST:PORT",
    help="Where mutations run; Dask needs the extra samebytes[dask].",
)
@click.option(
    "--state",
    type=OUTPUT_FILE,
    help="Keep results here as JSON lines; what was killed is not run again.",
)
@click.option("--list", "only_list", is_flag=True, help="List the drawn mutations and run nothing.")
@click.option("--json", "json_path", type=OUTPUT_FILE, metavar="OUT", help="Write all.")
def command(
    paths: tuple[str, ...],
    commands: tuple[str, ...],
    count: int,
    seed: int,
    shard: str,
    jobs: int,
    timeout_s: float | None,
    executor: str,
    state: Path | None,
    only_list: bool,
    json_path: Path | None,
) -> ExitCode:
    """Change one thing at a time in the files or folders PATH, and see whether the tests notice.

    Exit code 0: every mutation was noticed or is recorded as equivalent with its reason, 1: some survived.
    """
    try:
        from parity.campaign.mutate import (
            TIMEOUT_FACTOR,
            Fate,
            Judged,
            measure_baseline,
            run_mutations,
        )
        from parity.campaign.mutations import find_mutations, sample_mutations
    except ImportError as error:
        raise UsageError(
            "mutations need libcst", why=str(error), todo="pip install 'samebytes[mutate]'"
        ) from error
    part, parts = parse_shard(shard)
    mutations = [
        mutation
        for path in source_files(paths)
        for mutation in find_mutations(path, (REPOSITORY / path).read_text(encoding="utf-8"))
    ]
    drawn = sample_mutations(mutations, count=count, seed=seed)[part - 1 :: parts]
    if only_list:
        for mutation in drawn:
            click.echo(f"{mutation.key}  {mutation.path}:{mutation.line}  {mutation.operator}")
        return ExitCode.PASS
    click.echo(f"{len(mutations)} places, {len(drawn)} mutations drawn; the clean tree first")
    with LifeSigns("the clean tree"):
        clean_s = measure_baseline(commands, timeout_s=timeout_s or BASELINE_TIMEOUT_S)
    limit_s = timeout_s or max(10.0, TIMEOUT_FACTOR * clean_s)
    with LifeSigns("mutations", total=len(drawn)) as signs:

        def show(judged: Judged) -> None:
            signs.advance()
            click.echo(f"{judged.fate.value:10} {judged.path}:{judged.line}  {judged.operator}  {judged.key}")
            if judged.fate is Fate.SURVIVED:
                click.echo(judged.patch)

        with open_executor(executor, jobs) as pool:
            judged = run_mutations(
                drawn,
                pool,
                commands=commands,
                jobs=jobs,
                timeout_s=limit_s,
                state=state,
                on_judged=show,
            )
    fates = Counter(item.fate for item in judged)
    if json_path is not None:
        report = {
            "seed": seed,
            "shard": shard,
            "places": len(mutations),
            "totals": {fate.value: fates[fate] for fate in Fate},
            "mutations": [asdict(item) for item in judged],
        }
        save_output(json_path, json.dumps(report, indent=1) + "\n")
    click.echo(", ".join(f"{fates[fate]} {fate.value}" for fate in Fate) + f"; clean run {clean_s:.0f} s")
    return ExitCode.FAIL if fates[Fate.SURVIVED] else ExitCode.PASS


def source_files(paths: tuple[str, ...]) -> list[str]:
    """Python files below the given paths of the checkout, sorted. Raises ``UsageError``."""
    found: set[str] = set()
    for name in paths:
        path = (REPOSITORY / name).resolve()
        inside = path.is_relative_to(REPOSITORY) and path.exists()
        files = [path] if path.is_file() else sorted(path.rglob("*.py"))
        names = {file.relative_to(REPOSITORY).as_posix() for file in files} if inside else set()
        if not {name for name in names if name.endswith(".py")}:
            raise UsageError(
                f"no Python file at {name!r}", where="PATH", todo="name files or folders of the checkout"
            )
        found |= names
    return sorted(found)
