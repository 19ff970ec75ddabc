"""The seam between scheduler and engine: batches and memory operations go down,
an ``IterationResult`` comes up.

To plug in an engine, implement ``Engine``. To plug in a scheduler, offer what ``scheduler.loop.Scheduler``
offers: ``submit``, ``cancel``, ``preempt``, ``step`` (or ``begin``, ``finish``, ``fail``),
``take_completions``, ``is_idle``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, Protocol

from scheduler.limits import PoolLimits
from scheduler.records import ChunkResult, IterationPlan, IterationResult, SamplingParams

PAD_ROW = -1


class OpKind(Enum):
    """Named after llama.cpp: ``seq_rm``, ``seq_cp``, drop of a recurrent state, ``memory_clear``."""

    REMOVE, COPY, DROP_STATE, CLEAR = "remove", "copy", "drop_state", "clear"


@dataclass(frozen=True, slots=True)
class MemoryOp:
    """One operation on positions ``[start, stop)`` of ``seq_id`` (-1: open
    end); COPY reads from ``source``.
    """

    kind: OpKind
    seq_id: int = -1
    start: int = -1
    stop: int = -1
    source: int = -1


@dataclass(frozen=True, slots=True)
class Call:
    """One native decode call: first ``ops`` in order, then rows. ``rows[i]`` indexes the batch, or is
    ``PAD_ROW``; ``cells[i]`` is where row i must land (-1: the engine's choice).
    """

    ops: tuple[MemoryOp, ...]
    rows: tuple[int, ...]
    seq_ids: tuple[int, ...]
    cells: tuple[int, ...]


class Sample(NamedTuple):
    """A token wanted from batch row ``row``; ``position`` is the position that the new token will have."""

    row: int
    request_id: str
    position: int
    sampling: SamplingParams


@dataclass(frozen=True, slots=True)
class Batch:
    """One step's rows in plan order: ``offsets[i]:offsets[i + 1]`` are those of chunk i; ``tokens`` and
    ``positions`` have one int a row, ``epochs``, ``clients`` and ``committed`` one value a chunk,
    ``stages`` the calls per stage. With ``num_shards`` shards of the memory ``stages`` has those of every
    shard's stages, one shard after the other, and ``shards`` says for every chunk where its session lives.
    """

    tokens: tuple[int, ...]
    positions: tuple[int, ...]
    offsets: tuple[int, ...]
    samples: tuple[Sample, ...]
    epochs: tuple[int, ...]
    clients: tuple[str, ...]
    committed: tuple[int, ...]
    stages: tuple[tuple[Call, ...], ...]
    shards: tuple[int, ...] = ()
    num_shards: int = 1

    def first_calls(self) -> Iterator[tuple[int, Call]]:
        """(index in ``stages``, call) of the first stage of every shard."""
        for index in range(0, len(self.stages), max(1, len(self.stages) // self.num_shards)):
            for call in self.stages[index]:
                yield index, call


class EngineFailure(Exception):
    """A step that the engine could not run: its memory is in doubt, so the
    scheduler clears it and rebuilds all.
    """


class Engine(Protocol):
    """Runs batches. ``limits`` has one entry per stage; an unsplit model has one. An engine whose memory is
    in shards says how many in ``num_shards``: pools for all stages in each, their limits alike, and calls
    and operations listed shard by shard.
    """

    limits: tuple[PoolLimits, ...]

    def execute(self, plan: IterationPlan, batch: Batch, now_ms: float) -> IterationResult:
        """Run the batch, sample, and say what was completed. Raises ``EngineFailure``."""

    def apply(self, stages: Sequence[Sequence[MemoryOp]]) -> None:
        """Apply memory operations outside a step, per stage. Raises ``EngineFailure``."""


class OverlappingEngine(Engine, Protocol):
    """An engine that can be given a step while an earlier one is still on its way through the stages.

    Every stage carries out steps, and the operations in them, in the order of their launch.
    """

    def launch(self, plan: IterationPlan, batch: Batch, now_ms: float) -> None:
        """Begin a step and return at once. Raises ``EngineFailure``."""

    def collect(self) -> IterationResult:
        """The result of the oldest launched step, waited for. Raises ``EngineFailure``: then that step and
        all behind it are over.
        """


def completed_result(
    plan: IterationPlan, batch: Batch, tokens: Sequence[int], *, started_ms: float, finished_ms: float
) -> IterationResult:
    """The result of a batch that ran whole; ``tokens[i]`` answers ``batch.samples[i]``."""
    emitted = {sample.request_id: token for sample, token in zip(batch.samples, tokens, strict=True)}
    chunks: list[ChunkResult] = []
    debits: dict[str, int] = {}
    for chunk, epoch, client, committed in zip(
        plan.chunks, batch.epochs, batch.clients, batch.committed, strict=True
    ):
        name, start, stop = chunk.request_id, chunk.start, chunk.stop
        chunks.append(ChunkResult(name, chunk.generation, epoch, start, stop, emitted.get(name)))
        if start >= committed:  # a rebuild is overhead, not service
            debits[client] = debits.get(client, 0) + stop - start
    return IterationResult(
        plan.decision_id, plan.input_version, tuple(chunks), debits, started_ms, finished_ms
    )
