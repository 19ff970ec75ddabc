"""``parity regen``: run the golden cases, print how they differ from the files, write them when told why."""

from __future__ import annotations

from pathlib import Path

import click

from parity.errors import ExitCode, UsageError
from parity.golden.regenerate import check_engine_is_locked, find_changes, save_changes
from parity.life_signs import LifeSigns
from parity.models.families import family_names, load_family
from parity.records import Verdict
from parity.run.profiles import provenance_line


@click.command(
    epilog="Exit codes: 0 the goldens hold, or were written; 1 outputs differ; 2 there is no golden yet; "
    "64 bad input. Nothing is written without --accept."
)
@click.option("--family", "families", multiple=True, metavar="NAME", help="Only this family (repeatable).")
@click.option("--accept", is_flag=True, help="Write the files that differ; needs --reason.")
@click.option(
    "--reason", default="", metavar="TEXT", help="Why the outputs change; recorded in every file written."
)
@click.option(
    "--search", is_flag=True, help="Look for new prompts with large margins instead of keeping the old ones."
)
@click.option(
    "--engine-differs",
    default="",
    metavar="TEXT",
    help="Why another llama-cpp-python than the locked one may write goldens.",
)
@click.option(
    "--directory",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder of goldens; the project's own if not given.",
)
def command(
    families: tuple[str, ...],
    accept: bool,
    reason: str,
    search: bool,
    engine_differs: str,
    directory: Path | None,
) -> ExitCode:
    """Regenerate golden outputs: print the differences, and write them with --accept --reason "...".

    Files of families that are not named are never touched.
    """
    if accept and not reason.strip():
        raise UsageError("--accept needs --reason", why="a golden says why it was last written")
    for name in families:
        load_family(name)
    click.echo(provenance_line(None))
    note = check_engine_is_locked(engine_differs)
    verdicts = []
    for family in families or family_names():
        with LifeSigns(f"{family}: searching prompts" if search else f"{family}: running"):
            changes, prompts = find_changes(
                family,
                search=search,
                directory=directory,
                on_mode=lambda change: click.echo(change.describe()),
            )
        if accept:
            written = save_changes(changes, prompts, reason=reason + note, directory=directory)
            for path in written:
                click.echo(f"written: {path}")
            verdicts.append(Verdict.PASS)
        else:
            verdicts += [change.verdict for change in changes]
    verdict = Verdict.merge(verdicts)
    if verdict is not Verdict.PASS:
        click.echo(
            "nothing was written; accept with: parity regen "
            + " ".join(f"--family {name} " for name in families)
            + '--accept --reason "why"'
        )
    return verdict.exit_code
