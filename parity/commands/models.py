"""``parity models``: which models there are, where their files are, what is pinned.

``--write`` makes the generated ones.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

import click

from parity.errors import ExitCode, UsageError
from parity.life_signs import LifeSigns
from parity.models.catalogue import find_row_file, resolve_model
from parity.models.families import Family, ModelRow, RowSource, chosen_families
from parity.models.quantise import FILE_TYPES
from parity.store import cache_dir


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelListing:
    """One line of the list. ``path`` is None while there is no file; ``state`` is for people."""

    spec: str
    source: str
    n_layer: int
    quantisation: str
    size_bytes: int | None
    sha256: str | None
    locked: bool
    path: str | None
    state: str


@click.command()
@click.option("--family", "names", multiple=True, metavar="NAME", help="Only this family; may be repeated.")
@click.option("--write", is_flag=True, help="Write the tiny models that the default suites use.")
@click.option(
    "--write-all", is_flag=True, help="Also the 256-wide rows and their Q8_0, Q4_0 and Q4_K_M variants."
)
@click.option("--json", "as_json", is_flag=True, help="Print the list as JSON.")
def command(names: tuple[str, ...], write: bool, write_all: bool, as_json: bool) -> ExitCode:
    """List the models of each family.

    Layers, quantisation, digest, whether it is pinned, where its file is.
    """
    families = chosen_families(names)
    if write or write_all:
        write_models(families, everything=write_all)
    listings = [listing for family in families for listing in list_models(family)]
    if as_json:
        click.echo(json.dumps([asdict(listing) for listing in listings], indent=2))
    else:
        print_listings(listings)
    return ExitCode.PASS


def write_models(families: list[Family], *, everything: bool) -> None:
    """Make the generated models' files unless they are there and right; progress on standard error."""
    parts = ["tiny", *(["wide", *FILE_TYPES] if everything else [])]
    specs = [f"{family.name}:{part}" for family in families for part in parts]
    with LifeSigns("models") as signs:
        for spec in signs.each(specs):
            resolve_model(spec)


def list_models(family: Family) -> list[ModelListing]:
    """Every row of a family; no file is made, fetched or hashed for it unless it is there already."""
    return [_listing(family, row) for row in family.rows.values()]


def _listing(family: Family, row: ModelRow) -> ModelListing:
    try:
        path = find_row_file(family, row)
        state = "here" if path else "made on demand" if row.source is RowSource.GENERATED else "not fetched"
    except UsageError as error:
        path, state = None, error.why or error.what
    if path is None and not row.locked:
        state = "unlocked"
    return ModelListing(
        spec=f"{family.name}:{row.name}",
        source=row.source,
        n_layer=row.n_layer,
        quantisation=row.quantisation,
        size_bytes=row.size_bytes,
        sha256=row.sha256,
        locked=row.locked,
        path=str(path) if path else None,
        state=state,
    )


def print_listings(listings: list[ModelListing]) -> None:
    """One line each; the last column, the longest, is the file or why there is none."""
    rows = [("model", "source", "layers", "quantisation", "MB", "SHA-256", "file")]
    rows += [
        (
            listing.spec,
            listing.source,
            str(listing.n_layer),
            listing.quantisation,
            f"{listing.size_bytes / 1e6:.1f}" if listing.size_bytes else "?",
            listing.sha256[:12] if listing.sha256 else "unlocked",
            listing.path or listing.state,
        )
        for listing in listings
    ]
    widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))]
    for row in rows:
        click.echo("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip())
    variants = ", ".join(f"family:{name}" for name in FILE_TYPES)
    click.echo(
        f"\nalso made on demand: {variants} (256 wide, quantised by llama.cpp), family:row:q8_0 (any "
        "generated row), mid:q8_0, mid:q4_0 (150M)"
    )
    click.echo(f"generated files are kept in {cache_dir('models')}")
