"""``splits/<family>.yaml`` as records, and the check that a model can be cut that way, before any load."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from parity.errors import UsageError
from parity.models.facts import LayerKind, ModelFacts
from parity.models.families import load_family
from parity.models.slice import LayerRange
from parity.schemas import load_checked_yaml
from parity.store import SHIPPED, own_folder


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """One way to cut one model row into stages.

    ``first_layers`` are the labels of the stages' first layers (``ModelFacts.layer_label``);
    ``recurrent_ranges`` are half-open ranges of layers with a recurrent state, in the whole model; ``sha256``
    is None while the row isn't locked. A split made up on the spot (``split_at``) claims none of them.
    """

    family: str
    row: str
    name: str
    n_layer: int
    stages: tuple[LayerRange, ...]
    sha256: str | None = None
    first_layers: tuple[str, ...] | None = None
    recurrent_ranges: tuple[tuple[int, int], ...] | None = None
    why: str = ""

    @property
    def boundaries(self) -> tuple[int, ...]:
        """First layers of all stages but the first."""
        return tuple(stage.start for stage in self.stages[1:])

    @property
    def label(self) -> str:
        return f"{self.family}:{self.row} {self.name} at {','.join(map(str, self.boundaries))}"


def splits_dir() -> Path:
    """The project's own splits."""
    return SHIPPED / "splits"


def _splits_of(family: str) -> Path:
    """A family's file: of the caller's own project if it has one, else ours."""
    own = own_folder("splits")
    named = None if own is None else own / f"{family}.yaml"
    return named if named is not None and named.is_file() else splits_dir() / f"{family}.yaml"


def load_splits(family: str, directory: Path | None = None, *, manifests: Path | None = None) -> list[Split]:
    """All pinned splits of a family, in the file's order.

    ``UsageError`` if the file isn't valid, or if the family's manifest has another layer count or digest.
    """
    known = load_family(family, manifests)
    path = _splits_of(family) if directory is None else directory / f"{family}.yaml"
    content = load_checked_yaml(path, schema="split")
    if content["family"] != family:
        raise UsageError(
            "split is not valid", where=f"{path} at family", why=f"it says {content['family']!r}"
        )
    splits = []
    for row_name, row in content["rows"].items():
        pinned = known.row(row_name)
        for key, want in (("n_layer", pinned.n_layer), ("sha256", pinned.sha256)):
            if row[key] is not None and row[key] != want:
                raise UsageError(
                    "split and manifest disagree",
                    where=f"{path} at rows.{row_name}.{key}",
                    why=f"it says {row[key]}, the manifest {want}",
                    todo="look whether the cuts still make sense, then pin the manifest's value",
                )
        splits += [_split(family, row_name, name, row) for name in row["splits"]]
    return splits


def _split(family: str, row_name: str, name: str, row: dict[str, Any]) -> Split:
    pinned = row["splits"][name]
    return Split(
        family=family,
        row=row_name,
        name=name,
        n_layer=row["n_layer"],
        sha256=row["sha256"],
        stages=stages_between(pinned["boundaries"], n_layer=row["n_layer"]),
        first_layers=tuple(pinned["first_layers"]),
        recurrent_ranges=tuple((start, stop) for start, stop in row["recurrent"]),
        why=pinned["why"],
    )


def stages_between(boundaries: Sequence[int], *, n_layer: int) -> tuple[LayerRange, ...]:
    """Stages that tile ``[0, n_layer)``; ``UsageError`` unless the boundaries increase inside the model."""
    edges = [0, *boundaries, n_layer]
    for before, edge in pairwise(edges):
        if edge <= before:
            raise UsageError(
                f"boundaries {','.join(map(str, boundaries))} cut no model of {n_layer} layers",
                why=f"{edge} comes after {before}",
                todo=f"give increasing numbers from 1 to {n_layer - 1}",
            )
    return tuple(LayerRange(start=start, stop=stop) for start, stop in pairwise(edges))


def split_at(facts: ModelFacts, boundaries: Sequence[int], *, family: str, row: str) -> Split:
    """A split that no file pins, for experiments; check it like any other."""
    return Split(
        family=family,
        row=row,
        name="custom",
        n_layer=facts.n_layer,
        stages=stages_between(boundaries, n_layer=facts.n_layer),
    )


def check_split_legal(facts: ModelFacts, split: Split, *, sha256: str | None = None) -> None:
    """Can the model be run in these stages, and is it the model that the split was pinned for?

    ``sha256`` is the model file's digest where it is known. ``UsageError`` says which stage and why, where
    llama.cpp would abort the process.
    """
    _check_tiling(facts, split)
    if split.sha256 is not None and sha256 is not None and split.sha256 != sha256:
        raise _illegal(split, f"it is pinned for SHA-256 {split.sha256}, the model has {sha256}")
    for place, stage in enumerate(split.stages):
        if reason := explain_stage_fault(facts, stage):
            raise _illegal(split, f"stage {place} (layers {stage.start}:{stage.stop}) {reason}")
    first_layers = tuple(facts.layer_label(stage.start) for stage in split.stages)
    if split.first_layers is not None and split.first_layers != first_layers:
        raise _illegal(
            split, f"its stages start on {', '.join(first_layers)}, not on {', '.join(split.first_layers)}"
        )
    ranges = recurrent_ranges(facts)
    if split.recurrent_ranges is not None and split.recurrent_ranges != ranges:
        raise _illegal(
            split, f"the model's recurrent layers are {list(ranges)}, not {list(split.recurrent_ranges)}"
        )


def _check_tiling(facts: ModelFacts, split: Split) -> None:
    if split.n_layer != facts.n_layer:
        raise _illegal(split, f"it is for {split.n_layer} layers, the model has {facts.n_layer}")
    edge = 0
    for place, stage in enumerate(split.stages):
        if stage.start != edge:
            fault = (
                f"layers {edge}:{stage.start} are in no stage" if stage.start > edge else "two stages overlap"
            )
            raise _illegal(split, f"{fault} before stage {place} (layers {stage.start}:{stage.stop})")
        edge = stage.stop
    if edge != facts.n_layer:
        raise _illegal(split, f"its stages end at layer {edge}, the model at {facts.n_layer}")


def explain_stage_fault(facts: ModelFacts, stage: LayerRange) -> str | None:
    """Why llama.cpp can't run these layers alone; None if it can.

    Its hybrid memory asserts a buffer for attention and one for states; its window cache asserts that some
    layer has a window (a stage of window layers alone is fine).
    """
    kinds = facts.layers[stage.start : stage.stop]
    if facts.is_hybrid and not any(kind.has_attention for kind in kinds):
        return "has recurrent layers only; a stage of a hybrid model needs a layer with attention, too"
    if facts.is_hybrid and not any(kind.has_state for kind in kinds):
        return "has attention layers only; a stage of a hybrid model needs a recurrent layer, too"
    if facts.window_tokens is not None and LayerKind.WINDOW not in kinds:
        return "has no window layer; a stage of a sliding-window model needs one"
    return None


def recurrent_ranges(facts: ModelFacts) -> tuple[tuple[int, int], ...]:
    """Half-open ranges of layers that have a recurrent state."""
    flags = [False, *(kind.has_state for kind in facts.layers), False]
    edges = [layer for layer, (before, flag) in enumerate(pairwise(flags)) if before != flag]
    return tuple(zip(edges[::2], edges[1::2], strict=True))


def _illegal(split: Split, why: str) -> UsageError:
    return UsageError(f"split {split.label} is not legal", why=why)
