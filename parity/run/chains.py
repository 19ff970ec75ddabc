"""From a case's split to a running chain: legality first, then stage files, then contexts.

Nothing of llama.cpp is touched before the split has been found legal.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from filelock import FileLock

import parity.models.slice
from parity.engines.chain import StageChain
from parity.engines.chain_processes import ProcessChain
from parity.engines.geometry import CELL_GRAIN, round_cells
from parity.engines.numerics import ROW, NumericsProfile
from parity.engines.shards import ShardedEngine, cores, in_shards
from parity.engines.stage import StageSettings
from parity.errors import UsageError
from parity.models import ModelFile
from parity.models.facts import ModelFacts, read_facts
from parity.models.families import Family
from parity.models.slice import LayerRange, slice_model
from parity.models.splits import Split, check_split_legal, load_splits, split_at
from parity.records import Case, FaultKind
from parity.store import cache_dir, file_sha256, save_text, sidecar, verified_sha256
from scheduler.limits import Layout, PoolLimits, Sharing

KEPT_CHAINS = 4  # every stage has a context of its own: chains beyond this number are closed, oldest first
STREAM_SEQUENCES = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class LegalSplit:
    """A split that was checked against the model that it is to cut."""

    file: ModelFile
    facts: ModelFacts
    split: Split

    def recurrent(self, stage: LayerRange) -> bool:
        """Whether a stage's context keeps a recurrent state per sequence."""
        return any(kind.has_state for kind in self.facts.layers[stage.start : stage.stop])

    def windowed(self, stage: LayerRange) -> bool:
        """Whether a stage's context has a window cache, so that tokens are decoded under two ids."""
        return self.facts.window_tokens is not None


def legal_split(file: ModelFile, name: str) -> LegalSplit:
    """The split ``name`` of a model: a name in ``splits/<family>.yaml`` for its
    row, or boundaries like ``2,4``.

    Raises ``UsageError`` for an unknown name and for a split that llama.cpp could not run, with the reason.
    """
    facts = read_facts(file.path)
    if re.fullmatch(r"\d+(,\d+)*", name):
        split = split_at(facts, [int(part) for part in name.split(",")], family=file.family, row=file.row)
    else:
        pinned = [split for split in load_splits(file.family) if split.row == file.row]
        split = next((split for split in pinned if split.name == name), None)
        if split is None:
            raise UsageError(
                f"model {file.family}:{file.row} has no split {name!r}",
                where=f"splits/{file.family}.yaml",
                why=f"its splits are {', '.join(s.name for s in pinned) or 'none'}",
                todo="name one of them or give boundaries such as 2,4",
            )
    check_split_legal(facts, split, sha256=file.sha256)
    return LegalSplit(file=file, facts=facts, split=split)


def stage_file(file: ModelFile, layers: LayerRange) -> Path:
    """The file of a stage's layers, sliced on demand and kept, checked against
    its digest whenever it is used.
    """
    slicer = hashlib.sha256(Path(parity.models.slice.__file__).read_bytes()).hexdigest()[:8]
    name = f"{file.family}-{file.sha256[:12]}-{layers.start}-{layers.stop}-{slicer}.gguf"
    path = cache_dir("stages") / name
    with FileLock(f"{path}.lock"):
        if not (path.exists() and sidecar(path).exists()):
            slice_model(file.path, layers, path)
            save_text(sidecar(path), json.dumps({"sha256": file_sha256(path), "source_sha256": file.sha256}))
        recorded = json.loads(sidecar(path).read_text())["sha256"]
        found = verified_sha256(path)
    if found != recorded:
        raise UsageError(
            "stage file has changed",
            where=str(path),
            why=f"SHA-256 is {found}, made was {recorded}",
            todo="remove it, it will be made again",
        )
    return path


def stage_limits(
    legal: LegalSplit, whole: PoolLimits, stage_cells: Sequence[int] = ()
) -> tuple[PoolLimits, ...]:
    """Limits of every stage's pool, from those of the unsplit model's pool.

    ``stage_cells`` gives each stage its own number of cells (per stream in ``streams``). Raises
    ``UsageError`` unless it is empty or has one positive number a stage.
    """
    stages = legal.split.stages
    if stage_cells and (len(stage_cells) != len(stages) or min(stage_cells) < 1):
        raise UsageError(
            f"stage_cells {list(stage_cells)}",
            where="case",
            why=f"split {legal.split.label} has {len(stages)} stages",
            todo="give one positive number of cells for each stage, or none",
        )
    streams = whole.num_sequences if whole.layout is Layout.STREAMS else 1
    limits = []
    for index, stage in enumerate(stages):
        recurrent = legal.recurrent(stage)
        sharing = Sharing.WHOLE_STATE if recurrent and whole.sharing is not Sharing.NONE else whole.sharing
        cells = stage_cells[index] * streams if stage_cells else whole.num_cells
        limits.append(replace(whole, num_cells=cells, recurrent=recurrent, sharing=sharing))
    return tuple(limits)


def stage_settings(
    legal: LegalSplit,
    files: Sequence[Path],
    limits: Sequence[PoolLimits],
    *,
    family: Family,
    profile: NumericsProfile,
    kv_type: str,
    n_threads: int,
    num_sequences: int,
    least_cells: int,
) -> tuple[StageSettings, ...]:
    """What every stage is made of; its context has at least ``least_cells`` cells and room for its limits."""
    settings = []
    for index, (stage, path, own) in enumerate(zip(legal.split.stages, files, limits, strict=True)):
        streams = own.layout is Layout.STREAMS
        cells = own.num_cells // own.num_sequences if streams else own.num_cells
        cells = round_cells(max(cells + 2, least_cells))
        settings.append(
            StageSettings(
                path=str(path),
                index=index,
                num_stages=len(legal.split.stages),
                start=stage.start,
                stop=stage.stop,
                layout=own.layout,
                num_sequences=num_sequences,
                num_cells=cells,
                shadow=legal.windowed(stage) and not streams,
                recurrent=own.recurrent,
                profile=profile,
                kv_type=kv_type,
                embedding_scale=legal.facts.embedding_scale,
                n_threads=n_threads,
                swa_full=family.engine.swa_full,
            )
        )
    return tuple(settings)


def hand_settings(
    file: ModelFile,
    family: Family,
    split: str | None,
    *,
    kv_type: str = "f16",
    num_cells: int = 512,
    num_sequences: int = 12,
    n_threads: int = 1,
) -> tuple[StageSettings, ...]:
    """Settings of small contexts under row numerics: of a split's stages, or of the
    unsplit model as its one stage.
    """
    whole = PoolLimits(
        num_cells=num_cells - 2, num_sequences=num_sequences, recurrent=family.is_hybrid, sharing=Sharing.NONE
    )
    facts = read_facts(file.path)
    if split is None:
        everything = split_at(facts, [], family=file.family, row=file.row)
        legal, files = LegalSplit(file=file, facts=facts, split=everything), [file.path]
    else:
        legal = legal_split(file, split)
        files = [stage_file(file, stage) for stage in legal.split.stages]
    return stage_settings(
        legal,
        files,
        stage_limits(legal, whole),
        family=family,
        profile=ROW,
        kv_type=kv_type,
        n_threads=n_threads,
        num_sequences=num_sequences,
        least_cells=num_cells,
    )


Chain = StageChain | ProcessChain | ShardedEngine


class StageChains:
    """Chains of one process, the last few kept between cases.

    ``in_processes`` gives every stage a process of its own.
    """

    def __init__(self, *, n_threads: int = 1, in_processes: bool = False) -> None:
        self.n_threads, self.in_processes = n_threads, in_processes
        self.tight_contexts = (
            False  # True: contexts hardly larger than the pools, instead of the family's size
        )
        self._chains: OrderedDict[tuple, Chain] = OrderedDict()
        self._legal: dict[tuple, LegalSplit] = {}

    def legal(self, file: ModelFile, name: str) -> LegalSplit:
        """``legal_split``, once per model and split."""
        key = (file.sha256, name)
        if key not in self._legal:
            self._legal[key] = legal_split(file, name)
        return self._legal[key]

    def limits(self, case: Case, file: ModelFile, whole: PoolLimits) -> tuple[PoolLimits, ...]:
        """Limits of every stage of a case."""
        return stage_limits(self.legal(file, case.split), whole, case.stage_cells)

    def chain(
        self, case: Case, file: ModelFile, family: Family, profile: NumericsProfile, whole: PoolLimits
    ) -> Chain:
        """The chain of a case, in several shards one each.

        A case that loses a stage runs in processes, whatever ``in_processes`` says.
        """
        legal = self.legal(file, case.split)
        limits = stage_limits(legal, whole, case.stage_cells)
        if case.layout is Layout.STREAMS:
            num_sequences, least = max(STREAM_SEQUENCES, case.num_sequences), 2 * CELL_GRAIN
        else:
            num_sequences, least = (
                max(family.most_sequences, case.num_sequences),
                0 if self.tight_contexts else family.engine.n_ctx,
            )
        files = [stage_file(file, stage) for stage in legal.split.stages]
        settings = stage_settings(
            legal,
            files,
            limits,
            family=family,
            profile=profile,
            kv_type=case.kv_type,
            n_threads=self.n_threads,
            num_sequences=num_sequences,
            least_cells=least,
        )
        lossy = any(fault.kind is FaultKind.STAGE_LOST for fault in case.faults)
        make = ProcessChain if self.in_processes or lossy else StageChain
        return self._kept(
            (make, settings, case.shards),
            lambda: in_shards(case.shards, lambda: make(settings), num_threads=cores() // self.n_threads),
        )

    def _kept(self, key: tuple, make: Callable[[], Chain]) -> Chain:
        if key not in self._chains:
            while len(self._chains) >= KEPT_CHAINS:
                self._chains.popitem(last=False)[1].close()
            self._chains[key] = make()
        self._chains.move_to_end(key)
        return self._chains[key]

    def close(self) -> None:
        """Close every chain; processes of stages end."""
        while self._chains:
            self._chains.popitem()[1].close()
