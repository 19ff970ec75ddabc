"""From a model's name to a verified file.

Generated on demand, quantised on demand, found in a package or the Hub cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock

from parity.errors import UsageError
from parity.models.builder import ModelSize, replaced_file
from parity.models.facts import read_facts
from parity.models.families import (
    Family,
    KvClass,
    ModelRow,
    RowSource,
    family_names,
    load_families,
    load_family,
)
from parity.models.gguf import read_header, shown
from parity.models.package_source import resolve_package_file
from parity.models.quantise import FILE_TYPES, quantised_file
from parity.store import cache_dir, file_sha256, verified_sha256

ROW_ALIASES = {"f32_256": "wide"}
QUANTISED_FROM = "wide"
MID_FROM = "mid"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFile:
    """A model that is on disk and whose content was verified."""

    path: Path
    sha256: str
    family: str
    row: str


def resolve_model(spec: str) -> ModelFile:
    """The file that ``spec`` names, made if it can be made here; ``UsageError`` if not.

    ``llama`` (the tiny row), ``llama:<row>`` (``tiny``, ``wide`` or ``f32_256``, ``real``, ...),
    ``llama:q8_0``, ``llama:q4_0``, ``llama:q4_k_m`` (the 256-wide row quantised by llama.cpp),
    ``llama:scaled:q8_0`` (any generated row), ``mid:q8_0`` (the 150M model), ``smollm2-135m``, or a path.
    """
    if spec.endswith(".gguf") or "/" in spec:
        return _any_file(Path(spec))
    head, _, tail = spec.partition(":")
    if head in family_names():  # another family's bad manifest is nothing to this one
        return _of_family(load_family(head), tail or "tiny")
    families = load_families()
    if head == MID_FROM:
        return _quantised(families["llama"], MID_FROM, tail or "q8_0")
    for family in families.values():
        if spec in family.rows and spec not in ("tiny", "real"):
            return _row_file(family, family.rows[spec])
    raise UsageError(
        f"unknown model {spec!r}",
        why=f"families are {', '.join(families)}",
        todo="name a family, family:row or the path of a .gguf file; `parity models` lists them",
    )


def _of_family(family: Family, tail: str) -> ModelFile:
    if tail in FILE_TYPES:
        return _quantised(family, QUANTISED_FROM, tail)
    name, colon, file_type = tail.partition(":")
    row = ROW_ALIASES.get(name, name)
    return _quantised(family, row, file_type) if colon else _row_file(family, family.row(row))


def _quantised(family: Family, source_row: str, file_type: str) -> ModelFile:
    """A generated row quantised to ``file_type`` (``f32``: the row itself)."""
    source = family.row(source_row)
    if source.source is not RowSource.GENERATED:
        raise UsageError(
            f"model row {source_row!r} of {family.name} is not quantised here",
            why=f"it has the quantisation of its file, {source.quantisation}",
            todo=f"name {family.name}:{source_row}, or a generated row; `parity models` lists them",
        )
    if file_type == "f32":
        return _row_file(family, source)
    if file_type not in FILE_TYPES:
        raise UsageError(
            f"unknown quantisation {file_type!r}", why=f"made here are f32, {', '.join(FILE_TYPES)}"
        )
    path, digest = quantised_file(
        source_sha256=source.sha256,
        stem=f"{family.name}-{source_row}",
        file_type=file_type,
        make_source=lambda: _generated_file(family, source),
    )
    row = file_type if source_row == QUANTISED_FROM else f"{source_row}-{file_type}"
    return ModelFile(path=path, sha256=digest, family=family.name, row=row)


def _row_file(family: Family, row: ModelRow) -> ModelFile:
    if row.source is RowSource.GENERATED:
        path = _generated_file(family, row)
    elif row.source is RowSource.PACKAGE:
        path = resolve_package_file(row)
    else:
        path = _hub_file(family, row)
    if row.source is not RowSource.GENERATED:
        check_file_is_row(path, family, row)
    return ModelFile(path=path, sha256=row.sha256, family=family.name, row=row.name)


def check_file_is_row(path: Path, family: Family, row: ModelRow) -> None:
    """Is a file that others made what its row claims? ``UsageError`` if its structure is another one."""
    facts = read_facts(path)
    why = ""
    if facts.architecture != family.architecture:
        why = f"its architecture is {shown(facts.architecture)}, the family's is {family.architecture!r}"
    elif facts.n_layer != row.n_layer:
        why = f"it has {facts.n_layer} layers, the row says {row.n_layer}"
    elif facts.is_mla is not (family.kv_class is KvClass.MLA):
        # Files from before llama.cpp's MLA (April 2025) hold attn_kv_b: full keys and values are cached.
        why = "it was converted without the tensors for a latent cache, so llama.cpp keeps a dense one"
    if why:
        raise UsageError(
            f"model {family.name}:{row.name} is not what its row says",
            where=str(path),
            why=why,
            todo=f"correct the row in {family.path}",
        )


def find_row_file(family: Family, row: ModelRow) -> Path | None:
    """The row's file if it is on disk, else None.

    Nothing is made or fetched. ``UsageError`` says what a package lacks.
    """
    if row.source is RowSource.GENERATED:
        path = generated_path(family, row)
    elif row.source is RowSource.PACKAGE:
        path = resolve_package_file(row)
    else:
        path = next(iter(_downloads(row)), None) if row.locked else None
    return path if path and path.exists() else None


def generated_path(family: Family, row: ModelRow) -> Path:
    """Where a generated row's file is kept. The digest is in the name: a new pin never meets an old file."""
    return cache_dir("models") / f"{family.name}-{row.name}-{row.sha256[:12]}.gguf"


def build_row(family: Family, row: ModelRow, target: Path) -> None:
    """Write a generated row's model to ``target`` (atomic), whatever its digest."""
    from parity.models.tiny import find_builder

    builder = find_builder(family.name, row.variant)
    if builder is None:
        raise UsageError(
            f"family {family.name} has no model writer"
            + (f" for the variant {row.variant!r}" if row.variant else ""),
            where=str(family.path),
            why=f"row {row.name} says source: generated",
            todo="add one to parity/models/tiny",
        )
    chosen = {
        key: getattr(row, key) for key in ("n_head", "n_head_kv", "ffn_dim") if getattr(row, key) is not None
    }
    builder(ModelSize(width=row.width, n_layer=row.n_layer, **chosen)).save(target)


def _generated_file(family: Family, row: ModelRow) -> Path:
    path = generated_path(family, row)
    with FileLock(f"{path}.lock"):
        if not path.exists():
            with replaced_file(path) as target:
                build_row(family, row, target)
                _check_digest(target, row, family, made=True)
        _check_digest(path, row, family, made=False)
    return path


def _check_digest(path: Path, row: ModelRow, family: Family, *, made: bool) -> None:
    found = file_sha256(path) if made else verified_sha256(path)
    if found != row.sha256:
        todo = (
            "the model writer and the manifest disagree: change the pin only on purpose"
            if made
            else f"remove {path}, it will be made again"
        )
        raise UsageError(
            f"model {family.name}:{row.name} has the wrong digest",
            where=str(family.path if made else path),
            why=f"SHA-256 is {found}, pinned is {row.sha256}",
            todo=todo,
        )


def _hub_file(family: Family, row: ModelRow) -> Path:
    """The row's file in the Hub's cache. Nothing is downloaded here: that is asked for by a command."""
    name = f"model {family.name}:{row.name}"
    if not row.locked:
        raise UsageError(
            f"{name} is unlocked",
            where=str(family.path),
            why="its digest was never looked up",
            todo=f"run `parity lock --family {family.name}` and `parity fetch --family {family.name}`",
        )
    todo = f"run `parity fetch --family {family.name}`"
    found = {path: verified_sha256(path) for path in _downloads(row)}
    for path, digest in found.items():
        if digest == row.sha256:
            return path
    for path, digest in found.items():
        raise UsageError(
            f"{name} has the wrong digest",
            where=str(path),
            why=f"SHA-256 is {digest}, pinned is {row.sha256}",
            todo=todo,
        )
    raise UsageError(f"{name} is not here", why=f"{row.repo}/{row.file} is not in the Hub's cache", todo=todo)


def _downloads(row: ModelRow) -> list[Path]:
    """What the Hub's cache may hold of the row, not verified."""
    from parity.models import hub, hub_cut  # here: it takes a third of a second, and most commands never ask

    if row.layers is not None:
        return [path for path in [hub_cut.cut_path(row.sha256)] if path.is_file()]
    return hub.cached_files(hub.hub_file(row), hub.HubSettings.from_environment().cache)


def _any_file(path: Path) -> ModelFile:
    if not path.is_file():
        raise UsageError("model not found", where=str(path), why="no such file")
    architecture = read_header(path).architecture
    owner = next((family for family in load_families().values() if family.architecture == architecture), None)
    if owner is None:
        known = ", ".join(family.architecture for family in load_families().values())
        raise UsageError(
            f"architecture {shown(architecture)} belongs to no family",
            where=str(path),
            why=f"known are {known}",
            todo="add a manifest for it",
        )
    return ModelFile(path=path, sha256=verified_sha256(path), family=owner.name, row=path.stem)
