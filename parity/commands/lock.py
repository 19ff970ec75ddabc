"""``parity lock``: look the real models' pins up on the Hub and write them into ``manifests/lock.yaml``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from parity.commands.fetch import worst_of
from parity.errors import ExitCode
from parity.models.families import Family, ModelRow, RowSource, chosen_families, manifests_dir, own_manifests
from parity.models.hub import HubSettings, hub_file, look_up
from parity.models.hub_cut import hub_cut, make_cut
from parity.models.lock_file import NAMED, PINS, Lock, load_lock, pins_of, save_lock
from parity.models.unavailable import Unavailable


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
    help="Folder of manifests; ./manifests if families lie there, else those of samebytes.",
)
def command(families: tuple[str, ...], update: bool, manifests: Path | None) -> ExitCode:
    """Write revision, SHA-256 and size of each family's Hub rows into lock.yaml beside the manifests.

    A locked row is compared with the Hub, and so is what a manifest pins by hand. A value that the Hub does
    not publish stays unset: no digest is ever invented. The manifests themselves are never written.
    """
    own = next(iter(own_manifests().values()), None)
    folder = manifests or (manifests_dir() if own is None else own.parent)
    lock = load_lock(folder)
    by_hand = chosen_families(families, folder, lock={})
    return worst_of(_lock_rows(by_hand, folder, lock, update=update))


def _lock_rows(families: list[Family], folder: Path, lock: Lock, *, update: bool) -> Iterator[ExitCode]:
    settings = HubSettings.from_environment()
    for family in families:
        for row in family.rows.values():
            if row.source is not RowSource.HUB:
                continue
            try:
                line, code = _lock_row(family, row, settings, lock, update=update), ExitCode.PASS
                save_lock(folder, lock)
            except Unavailable as fault:
                line, code = fault.line, fault.code
            click.echo(f"{code.name.lower()}: {family.name}:{row.name} {line}")
            yield code


def _lock_row(family: Family, row: ModelRow, settings: HubSettings, lock: Lock, *, update: bool) -> str:
    """Put the row's pins into ``lock``; returns what became of it, raises ``Unavailable``."""
    asked = {key: getattr(row, key) for key in (*NAMED, *PINS)}
    locked = pins_of(lock, family.name, row.name, asked)
    if row.layers is not None:
        return _lock_cut(family, row, settings, lock, locked, update=update)
    by_hand = hub_file(row)
    known = by_hand if update else replace(by_hand, **locked)
    try:
        found = look_up(known, settings)
        missing = [pin for pin in PINS if getattr(found, pin) is None]
        if missing:
            raise Unavailable(
                f"the Hub publishes no {' and no '.join(missing)} for {found.name}",
                why="it is not stored as a large file",
                todo="choose another file",
            )
    except Unavailable as fault:
        if known.sha256 is None:
            raise Unavailable(f"is unlocked: {fault.line}", code=fault.code) from fault
        raise
    against = [pin for pin in PINS if getattr(known, pin) not in (None, getattr(found, pin))]
    if against:
        told = ", ".join(
            f"{pin} is {getattr(found, pin)} on the Hub and {getattr(known, pin)} here" for pin in against
        )
        raise Unavailable(f"contradicts the Hub: {told}", code=ExitCode.FAIL)
    entry = {key: getattr(found, key) for key in ("repo", "file", *PINS)}
    if locked == {pin: entry[pin] for pin in PINS}:
        return f"is locked at revision {found.revision}"
    lock.setdefault(family.name, {})[row.name] = entry
    return f"locked at revision {found.revision}, {found.size_bytes} bytes, SHA-256 {found.sha256}"


def _lock_cut(
    family: Family,
    row: ModelRow,
    settings: HubSettings,
    lock: Lock,
    locked: dict[str, Any],
    *,
    update: bool,
) -> str:
    """Nobody publishes a cut's digest: it is made, and what it is now is what it has to be from now on."""
    known = row.sha256 or locked.get("sha256")
    if known and not update:
        return f"is locked: SHA-256 {known} (a cut; parity fetch compares it)"
    made = make_cut(hub_cut(row), settings)
    if row.sha256 not in (None, made.sha256):
        raise Unavailable(
            f"contradicts the Hub: sha256 is {made.sha256} of its layers and {row.sha256} here",
            code=ExitCode.FAIL,
        )
    if made.revision is None:
        raise Unavailable("is unlocked: the server names no revision", todo="pin one in the manifest")
    lock.setdefault(family.name, {})[row.name] = {
        **{key: getattr(row, key) for key in NAMED},
        **{pin: getattr(made, pin) for pin in PINS},
    }
    return f"locked at revision {made.revision}, {made.size_bytes} bytes, SHA-256 {made.sha256}"
