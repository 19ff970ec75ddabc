"""``manifests/<family>.yaml`` as records.

What a family is, which model rows it has, what its suites must hit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType
from typing import Any

from parity.engines.geometry import sequences_of
from parity.errors import UsageError
from parity.models.lock_file import LOCK_FILE, PINS, Lock, load_lock, pins_of
from parity.schemas import load_checked_yaml
from parity.store import SHIPPED, is_named_project, own_folder

MOST_SNIFFED_BYTES = 64 << 10


class KvClass(StrEnum):
    """How a family keeps its past."""

    DENSE = "dense"
    MLA = "mla"
    SLIDING_WINDOW = "sliding_window"
    MAMBA_HYBRID = "mamba_hybrid"
    DELTANET_HYBRID = "deltanet_hybrid"


class MemoryComponent(StrEnum):
    """One kind of memory that a session needs."""

    ATTENTION_CELLS = "attention_cells"
    WINDOW_CELLS = "window_cells"
    RECURRENT_SLOTS = "recurrent_slots"


class PrefixSharing(StrEnum):
    """What a new session may take over from a resident prefix."""

    POSITIONAL = "positional"  # any number of leading cells
    BOTH_CACHES = "both_caches"  # cells that the full and the window cache both hold
    WHOLE_STATE = "whole_state"  # everything, exactly at the donor's last token


class RowSource(StrEnum):
    """Where a row's file comes from."""

    GENERATED = "generated"
    HUB = "hub"
    PACKAGE = "package"


class Mark(StrEnum):
    """Something that a suite must have exercised at least once."""

    MIXED_STEP = "mixed_step"
    CHUNKED = "chunked"
    SHARED = "shared"
    PREEMPTED = "preempted"
    RESUMED = "resumed"
    CANCELLED = "cancelled"
    ID_REUSED = "id_reused"
    POOL_FULL = "pool_full"


# A new session can take over no more than its memory components allow.
SHARING_OF_COMPONENTS = MappingProxyType(
    {
        (MemoryComponent.ATTENTION_CELLS,): PrefixSharing.POSITIONAL,
        (MemoryComponent.ATTENTION_CELLS, MemoryComponent.WINDOW_CELLS): PrefixSharing.BOTH_CACHES,
        (MemoryComponent.ATTENTION_CELLS, MemoryComponent.RECURRENT_SLOTS): PrefixSharing.WHOLE_STATE,
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRow:
    """One model of a family. Fields that its source doesn't have are None.

    ``generated``: ``width`` and, where they differ from the tiny models', ``n_head``, ``n_head_kv``,
    ``ffn_dim``; ``variant`` names a writer other than the family's tiny one. ``hub``: ``repo``, ``file``,
    ``revision``; with ``layers`` (``START:STOP``) the row is a cut of these layers, and digest, size and
    layer count are the cut's. ``package``: ``package``, ``version``, ``file`` (inside the package).
    """

    name: str
    source: RowSource
    n_layer: int
    quantisation: str
    sha256: str | None = None
    size_bytes: int | None = None
    licence: str | None = None
    repo: str | None = None
    file: str | None = None
    revision: str | None = None
    layers: str | None = None
    package: str | None = None
    version: str | None = None
    package_sha256: str | None = None  # of the distribution archive, for pip
    width: int | None = None
    n_head: int | None = None
    n_head_kv: int | None = None
    ffn_dim: int | None = None
    variant: str | None = None

    @property
    def locked(self) -> bool:
        """Is the file's content pinned? Its SHA-256 does that; revision and size are checked where known."""
        return self.sha256 is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextSize:
    """The llama.cpp context that a family's suites use unless a case says otherwise."""

    n_ctx: int
    n_seq_max: int
    swa_full: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A KV class and its models."""

    name: str
    architecture: str
    kv_class: KvClass
    components: tuple[MemoryComponent, ...]
    sharing: PrefixSharing
    rows: Mapping[str, ModelRow]
    engine: ContextSize
    marks: tuple[Mark, ...]
    path: Path

    @property
    def marker(self) -> str:
        """The pytest marker of the family's tests."""
        return f"family_{self.name}"

    @property
    def is_hybrid(self) -> bool:
        """Does a session keep a recurrent state?"""
        return MemoryComponent.RECURRENT_SLOTS in self.components

    @property
    def shares_whole_states(self) -> bool:
        """Is a prefix taken over only at exactly the donor's last token?"""
        return self.sharing is PrefixSharing.WHOLE_STATE

    @property
    def needs_shadow(self) -> bool:
        """Is every token decoded under two ids? Then no window cell has a single owner and is re-used."""
        return MemoryComponent.WINDOW_CELLS in self.components

    @property
    def most_sequences(self) -> int:
        """Sequences that the family's default context has ids for."""
        return sequences_of(self.engine.n_seq_max, shadow=self.needs_shadow, recurrent=self.is_hybrid)

    def row(self, name: str) -> ModelRow:
        """The row ``name``; ``UsageError`` if the manifest has none."""
        if name not in self.rows:
            raise UsageError(
                f"family {self.name} has no model row {name!r}",
                where=str(self.path),
                why=f"its rows are {', '.join(self.rows)}",
            )
        return self.rows[name]


def manifests_dir() -> Path:
    """The project's own manifests."""
    return SHIPPED / "manifests"


def own_manifests() -> dict[str, Path]:
    """Manifests of the caller's own project, by family; each adds a family or takes the place of ours.

    Other tools keep a ``manifests/`` of their own, so in a folder that nobody named only files that begin a
    family count.
    """
    folder = own_folder("manifests")
    found = {} if folder is None else {path.stem: path for path in sorted(folder.glob("*.yaml"))}
    found.pop(Path(LOCK_FILE).stem, None)
    return {name: path for name, path in found.items() if is_named_project() or _begins_family(path)}


def _begins_family(path: Path) -> bool:
    """Whether a line of the file names a family, as every manifest of ours does at its top level."""
    try:
        with open(path, "rb") as file:
            return any(line.startswith(b"family:") for line in file.read(MOST_SNIFFED_BYTES).splitlines())
    except OSError:
        return False


def _manifest_of(name: str, directory: Path | None) -> Path:
    own = own_manifests() if directory is None else {}
    return own.get(name) or (directory or manifests_dir()) / f"{name}.yaml"


def load_family(name: str, directory: Path | None = None, *, lock: Lock | None = None) -> Family:
    """One family by name; ``UsageError`` if it is unknown or its manifest isn't valid.

    ``lock`` holds the pins that complete the manifest's own; None reads the one beside the manifests.
    """
    path = _manifest_of(name, directory)
    if name not in family_names(directory):
        raise UsageError(
            f"unknown family {name!r}",
            why=f"families are {', '.join(family_names(directory))}",
            todo=f"add {path} to make it one",
        )
    content = load_checked_yaml(path, schema="manifest")
    return _family(content, path, load_lock(path.parent) if lock is None else lock)


def load_families(directory: Path | None = None) -> dict[str, Family]:
    """All families of ``directory`` (the project's manifests if None), by name, in a fixed order."""
    return {name: load_family(name, directory) for name in family_names(directory)}


def chosen_families(
    names: tuple[str, ...], directory: Path | None = None, *, lock: Lock | None = None
) -> list[Family]:
    """The named families in the order given, or all; ``UsageError`` for a name without a manifest."""
    chosen = dict.fromkeys(names) if names else family_names(directory)
    return [load_family(name, directory, lock=lock) for name in chosen]


def family_names(directory: Path | None = None) -> list[str]:
    """Names of the manifests in ``directory``, simplest memory first.

    Families that the project doesn't know come last.
    """
    folder = directory or manifests_dir()
    found = {path.stem: None for path in folder.glob("*.yaml") if path.name != LOCK_FILE}
    names = sorted(found | dict.fromkeys(own_manifests() if directory is None else ()))
    if not names:
        raise UsageError("no manifest found", where=str(folder), todo="name a folder that holds some")
    order = ["llama", "deepseek2", "gemma2", "falcon_h1", "qwen3next"]
    return sorted(names, key=lambda name: (order.index(name) if name in order else len(order), name))


def _family(content: dict[str, Any], path: Path, lock: Lock) -> Family:
    rows = {name: _row(name, row, lock, content["family"]) for name, row in content["rows"].items()}
    family = Family(
        name=content["family"],
        architecture=content["architecture"],
        kv_class=KvClass(content["kv_class"]),
        components=tuple(MemoryComponent(name) for name in content["components"]),
        sharing=PrefixSharing(content["sharing"]),
        rows=MappingProxyType(rows),
        engine=ContextSize(**content["engine"]),
        marks=tuple(Mark(name) for name in content["marks"]),
        path=path,
    )
    _check_consistent(family)
    return family


def _row(name: str, row: dict[str, Any], lock: Lock, family: str) -> ModelRow:
    """A manifest's row; what it does not pin itself is taken from the lock."""
    locked = pins_of(lock, family, name, row) if row["source"] == RowSource.HUB else {}
    pins = {pin: locked[pin] for pin in PINS if row.get(pin) is None and pin in locked}
    return ModelRow(name=name, **{**row, **pins, "source": RowSource(row["source"])})


def _check_consistent(family: Family) -> None:
    """What a schema can't say: fields that must agree with each other."""

    def fault(key: str, why: str) -> UsageError:
        return UsageError("manifest is not valid", where=f"{family.path} at {key}", why=why)

    if family.name != family.path.stem:
        raise fault("family", f"{family.name!r} is not the file's name {family.path.stem!r}")
    if family.components not in SHARING_OF_COMPONENTS:
        known = "; ".join(map(", ".join, SHARING_OF_COMPONENTS))
        raise fault("components", f"no scheduler memory for them; known are {known}")
    sharing = SHARING_OF_COMPONENTS[family.components]
    if family.sharing is not sharing:
        raise fault("sharing", f"{', '.join(family.components)} share {sharing}")
    if family.needs_shadow and not family.engine.swa_full:
        raise fault(
            "engine.swa_full", "a window cache that drops cells can't be exact in one pool; it must be true"
        )
    for row in family.rows.values():
        start, _, stop = (row.layers or f"0:{row.n_layer}").partition(":")
        if int(stop) - int(start) != row.n_layer:
            raise fault(
                f"rows.{row.name}.layers", f"{row.layers} are not {row.n_layer} layers, as n_layer says"
            )
