"""``parity explain-memory``: what a model's memory costs, and how many sessions may be in flight."""

from __future__ import annotations

import click
from rich.console import Console
from rich.table import Table

from parity.engines.geometry import ids_per_sequence
from parity.errors import ExitCode
from parity.models import resolve_model
from parity.models.facts import ModelFacts, read_facts
from parity.models.families import load_families
from parity.models.memory import Assumptions, Component, binding_component, model_components

PAD_IDS, EMPTY_IDS = 1, 1  # an id for padding rows; hybrids keep one that holds nothing


@click.command()
@click.argument("model")
@click.option("--cells", type=click.IntRange(1), help="Cells of the pool (default: the family's n_ctx).")
@click.option(
    "--floor",
    "floor_tokens",
    default=256,
    show_default=True,
    type=click.IntRange(1),
    help="Cells that a session is sure to have.",
)
@click.option("--sequences", type=click.IntRange(1), help="n_seq_max (default: the family's).")
@click.option(
    "--prefixes", default=8, show_default=True, type=click.IntRange(0), help="Ids of resident prefixes."
)
@click.option(
    "--retired", default=8, show_default=True, type=click.IntRange(0), help="Ids of retired sessions."
)
@click.option("--state-budget", type=click.IntRange(0), metavar="BYTES", help="Bytes for recurrent states.")
@click.option("--kv-type", default="f16", show_default=True, type=click.Choice(["f16", "f32"]))
@click.option(
    "--split", "boundaries", default="", metavar="LAYERS", help="Cut before these layers, e.g. 4 or 9,18."
)
@click.option(
    "--shards",
    default=1,
    show_default=True,
    type=click.IntRange(1),
    help="Pools that share cells and budget evenly.",
)
def command(
    model: str,
    cells: int | None,
    floor_tokens: int,
    sequences: int | None,
    prefixes: int,
    retired: int,
    state_budget: int | None,
    kv_type: str,
    boundaries: str,
    shards: int,
) -> ExitCode:
    """Print the derivation for MODEL: bytes per cell and per slot, the ceiling and what binds it."""
    facts = read_facts(resolve_model(model).path)
    family = next((f for f in load_families().values() if f.architecture == facts.architecture), None)
    engine = family.engine if family else None
    whole_cells = cells or (engine.n_ctx if engine else facts.n_ctx_train)
    assumed = Assumptions(
        pool_cells=whole_cells // shards,
        floor_tokens=floor_tokens,
        num_sequences=sequences or (engine.n_seq_max if engine else 64),
        kv_type=kv_type,
        ids_per_session=ids_per_sequence(bool(family and family.needs_shadow)),
        state_budget_bytes=None if state_budget is None else state_budget // shards,
        reserved_ids=PAD_IDS + (EMPTY_IDS if facts.is_hybrid else 0) + prefixes + retired,
    )
    try:
        cuts = [int(part) for part in boundaries.split(",") if part]
    except ValueError as error:
        raise click.BadParameter(
            "layers are whole numbers separated by commas", param_hint="--split"
        ) from error
    components = model_components(facts, assumed, cuts)
    show(facts, components, Console(width=150), shards)
    return ExitCode.PASS


def show(facts: ModelFacts, components: list[Component], console: Console, shards: int = 1) -> None:
    """The table of one shard, the bytes in all and the ceiling."""
    stages = len({component.stage for component in components})
    kinds = {str(kind): facts.layers.count(kind) for kind in dict.fromkeys(facts.layers)}
    console.print(
        f"{facts.path.name}: {facts.architecture}, {facts.n_layer} layers "
        f"({', '.join(f'{count} {kind}' for kind, count in kinds.items())})"
        + (f", window of {facts.window_tokens} tokens" if facts.window_tokens else "")
    )
    if shards > 1:
        console.print(f"each of {shards} shards, in one of which a session must fit:")
    table = Table("stage", "component", "bytes each", "number", "bytes", "sessions", "because")
    for component in components:
        table.add_row(
            str(component.stage),
            component.name,
            f"{component.unit_bytes:,}",
            f"{component.units:,}",
            f"{component.total_bytes:,}",
            f"{component.sessions:,}",
            component.why,
        )
    console.print(table)
    binding = binding_component(components)
    console.print(f"in all {shards * sum(component.total_bytes for component in components):,} bytes")
    console.print(
        f"ceiling: {shards * binding.sessions} sessions in flight, bound by the {binding.name}"
        + (f" of stage {binding.stage}" if stages > 1 else "")
        + (f" of each of {shards} shards" if shards > 1 else "")
    )
