"""``parity lock``: look the real models' pins up on the Hub and write them into the manifests."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import click

from parity.commands.fetch import say, worst_of
from parity.errors import ExitCode
from parity.models.families import Family, ModelRow, RowSource, chosen_families
from parity.models.hub import look_up
from parity.models.hub_file import PINS, HubSettings, hub_file
from parity.models.manifest_edit import replace_scalars
from parity.models.transfer import RetryPolicy
from parity.models.unavailable import Unavailable
from parity.store import save_text


@click.command(
    epilog="Exit codes: 0 every row is locked; 1 the Hub contradicts a pin; 2 a row stays unlocked or could "
    "not be looked up; 64 bad input."
)
@click.option(
    "--family", "families", multiple=True, metavar="NAME", help="Only this family; may be repeated."
)
@click.option(
    "--update", is_flag=True, help="Move locked rows to the head of the repository's default branch."
)
@click.option(
    "--manifests",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="Folder of manifests; the project's own if not given.",
)
def command(families: tuple[str, ...], update: bool, manifests: Path | None) -> ExitCode:
    """Write revision, SHA-256 and size of each family's Hub rows into its manifest.

    Only values that are not set are written, and nothing else in the file changes. A locked row is compared
    with the Hub. A value that the Hub does not publish stays unset: no digest is ever invented.
    """
    settings, policy = HubSettings.from_environment(), RetryPolicy(say=say)
    return worst_of(
        _lock_row(family, row, settings, policy, update=update)
        for family in chosen_families(families, manifests)
        for row in family.rows.values()
        if row.source is RowSource.HUB
    )


def _lock_row(
    family: Family, row: ModelRow, settings: HubSettings, policy: RetryPolicy, *, update: bool
) -> ExitCode:
    try:
        line, code = _lock(family, row, settings, policy, update=update), ExitCode.PASS
    except Unavailable as fault:
        line, code = fault.line, fault.code
        if hub_file(row).unset:
            line = f"is unlocked: {line}"
    click.echo(f"{code.name.lower()}: {family.name}:{row.name} {line}")
    return code


def _lock(family: Family, row: ModelRow, settings: HubSettings, policy: RetryPolicy, *, update: bool) -> str:
    """What became of the row; raises ``Unavailable``."""
    known = hub_file(row)
    wanted = replace(known, revision=None) if update else known
    found = look_up(wanted, settings=settings, policy=policy)
    if found.unset:
        raise Unavailable(
            f"the Hub publishes no {' and no '.join(found.unset)} for {row.repo}/{row.file}",
            why="it is not stored as a large file",
            todo="choose another file",
        )
    changes = {
        ("rows", row.name, pin): getattr(found, pin)
        for pin in PINS
        if getattr(found, pin) != getattr(known, pin)
    }
    against = [path[-1] for path in changes if getattr(known, path[-1]) is not None]
    if against and not update:
        told = ", ".join(
            f"{pin} is {getattr(found, pin)} on the Hub and {getattr(known, pin)} here" for pin in against
        )
        raise Unavailable(f"contradicts the Hub: {told}", code=ExitCode.FAIL)
    if not changes:
        return f"is locked at revision {known.revision}"
    text = family.path.read_bytes().decode()  # as bytes: line ends stay as they are
    save_text(family.path, replace_scalars(text, changes, where=str(family.path)))
    return f"locked at revision {found.revision}, {found.size_bytes} bytes, SHA-256 {found.sha256}"
