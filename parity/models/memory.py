"""What a model's memory is made of, what one session needs of it, and how many sessions may be in flight.

Components are charged by row (attention cells, window cells) or by sequence (recurrent slots, ids). A ceiling
is the minimum over the components of every stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from parity.errors import UsageError
from parity.models.facts import LayerKind, ModelFacts
from scheduler.limits import LLAMA_MAX_SEQ


@dataclass(frozen=True, slots=True, kw_only=True)
class Assumptions:
    """What the derivation is made for. ``reserved_ids`` are those of padding, resident prefixes and retired
    ids, in sessions; ``floor_tokens`` are the cells that a session is sure to have.
    """

    pool_cells: int
    floor_tokens: int
    num_sequences: int
    reserved_ids: int
    ids_per_session: int = 1
    kv_type: str = "f16"
    state_budget_bytes: int | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.floor_tokens <= self.pool_cells:
            raise UsageError(
                f"a floor of {self.floor_tokens} tokens in {self.pool_cells} cells",
                where="--floor",
                todo="use 1 to the number of cells",
            )
        if not 1 <= self.num_sequences <= LLAMA_MAX_SEQ:
            raise UsageError(
                f"{self.num_sequences} sequence ids",
                where="--sequences",
                why=f"llama.cpp has 1 to {LLAMA_MAX_SEQ}",
            )


@dataclass(frozen=True, slots=True)
class Component:
    """One kind of memory of one stage: ``unit_bytes`` of one cell, slot or id, ``units`` of them,
    and the sessions that it allows.
    """

    stage: int
    name: str
    unit_bytes: int
    units: int
    sessions: int
    why: str

    @property
    def total_bytes(self) -> int:
        return self.unit_bytes * self.units


def stage_components(
    facts: ModelFacts, assumed: Assumptions, *, stage: int = 0, layers: range | None = None
) -> list[Component]:
    """Components of one stage, layers ``layers`` of the model (default: all of them)."""
    chosen = range(facts.n_layer) if layers is None else layers
    cells, ids = assumed.pool_cells, assumed.num_sequences
    by_rows = cells // assumed.floor_tokens
    rows_why = f"{cells} cells // {assumed.floor_tokens} tokens a session"
    found = []
    for name, wanted in (
        ("attention cells", (LayerKind.FULL, LayerKind.FULL_AND_RECURRENT)),
        ("window cells", (LayerKind.WINDOW,)),
    ):
        unit = sum(
            facts.layer_cell_bytes(layer, assumed.kv_type)
            for layer in chosen
            if facts.layers[layer] in wanted
        )
        if unit:
            why = rows_why if name == "attention cells" else f"{rows_why}; full-size, placed like the others"
            found.append(Component(stage, name, unit, cells, by_rows, why))
    slot = sum(facts.layer_slot_bytes(layer) for layer in chosen)
    if slot:
        slots, why = ids, f"{ids} ids"
        if assumed.state_budget_bytes is not None:
            slots = min(ids, assumed.state_budget_bytes // slot)
            why = f"min({ids} ids, {assumed.state_budget_bytes} // {slot} bytes a slot)"
        found.append(
            Component(
                stage,
                "recurrent slots",
                slot,
                slots,
                max(slots - assumed.reserved_ids, 0),
                f"{why} - {assumed.reserved_ids} reserved; charged at load",
            )
        )
    usable = ids // assumed.ids_per_session
    found.append(
        Component(
            stage,
            "sequence ids",
            0,
            ids,
            max(usable - assumed.reserved_ids, 0),
            f"{ids} ids // {assumed.ids_per_session} a session - {assumed.reserved_ids} reserved "
            f"(at most {LLAMA_MAX_SEQ})",
        )
    )
    return found


def model_components(
    facts: ModelFacts, assumed: Assumptions, boundaries: Sequence[int] = ()
) -> list[Component]:
    """Components of every stage of a model cut before the layers ``boundaries``;
    slots share the budget by bytes.
    """
    edges = [0, *boundaries, facts.n_layer]
    if any(stop <= start for start, stop in zip(edges, edges[1:], strict=False)):
        raise UsageError(
            f"boundaries {list(boundaries)}",
            where="--split",
            why="they must increase inside the model",
            todo=f"name layers from 1 to {facts.n_layer - 1}",
        )
    return [
        component
        for stage, (start, stop) in enumerate(zip(edges, edges[1:], strict=False))
        for component in stage_components(
            facts, _share(facts, assumed, range(start, stop)), stage=stage, layers=range(start, stop)
        )
    ]


def _share(facts: ModelFacts, assumed: Assumptions, layers: range) -> Assumptions:
    """A stage's part of the state budget, so that every stage affords the same number of slots."""
    whole = facts.slot_bytes()
    if assumed.state_budget_bytes is None or not whole:
        return assumed
    part = sum(facts.layer_slot_bytes(layer) for layer in layers)
    slots = assumed.state_budget_bytes // whole
    fields = {name: getattr(assumed, name) for name in Assumptions.__slots__}
    return Assumptions(**{**fields, "state_budget_bytes": slots * part})


def binding_component(components: Sequence[Component]) -> Component:
    """The component that allows the fewest sessions; the first of equal ones."""
    return min(components, key=lambda component: component.sessions)
