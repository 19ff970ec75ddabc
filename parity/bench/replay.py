"""The physical limit: a recorded run's native calls again, with no scheduler and no sampling."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from time import perf_counter

import numpy as np

from parity.engines.pool import PAD_TOKEN, LlamaEngine, PoolContext
from parity.engines.shards import ShardedEngine
from scheduler.engine import PAD_ROW, Batch, MemoryOp
from scheduler.records import IterationPlan, IterationResult


@dataclass(frozen=True, slots=True)
class RecordedCall:
    """One native call: memory operations before it, then its rows as arrays (int32; ``wanted`` int8)."""

    ops: tuple[MemoryOp, ...]
    tokens: np.ndarray
    positions: np.ndarray
    seq_ids: np.ndarray
    wanted: np.ndarray


class CallRecorder:
    """Stands in front of an engine and keeps what passes: ``calls`` holds a run's calls in
    order. Operations that the scheduler applies between steps are kept as a call without rows:
    without them the pool would fill up.
    """

    def __init__(self, engine: LlamaEngine) -> None:
        self._engine = engine
        self.limits = engine.limits
        self.calls: list[RecordedCall] = []

    def execute(self, plan: IterationPlan, batch: Batch, now_ms: float) -> IterationResult:
        """The engine's answer. Raises like it."""
        ids_per_row = self._engine.pool.ids_per_row
        wanted = np.zeros(len(batch.tokens), np.int8)
        for sample in batch.samples:
            wanted[sample.row] = 1
        for call in batch.stages[0]:
            rows = np.asarray(call.rows)
            padding = rows == PAD_ROW
            first = np.asarray(call.seq_ids, np.int32)[:, None] * ids_per_row
            self.calls.append(
                RecordedCall(
                    call.ops,
                    np.where(padding, PAD_TOKEN, np.asarray(batch.tokens)[rows]).astype(np.int32),
                    np.where(padding, 0, np.asarray(batch.positions)[rows]).astype(np.int32),
                    first + np.arange(ids_per_row, dtype=np.int32),
                    np.where(padding, 0, wanted[rows]).astype(np.int8),
                )
            )
        return self._engine.execute(plan, batch, now_ms)

    def apply(self, stages: Sequence[Sequence[MemoryOp]]) -> None:
        """Operations outside a step."""
        nothing = np.zeros(0, np.int32)
        self.calls.append(
            RecordedCall(tuple(stages[0]), nothing, nothing, nothing[:, None], nothing.astype(np.int8))
        )
        self._engine.apply(stages)


def record_calls(
    engine: LlamaEngine | ShardedEngine,
) -> tuple[CallRecorder | ShardedEngine, list[CallRecorder]]:
    """An engine that stands for this one, and what records the calls of each of its shards."""
    if not isinstance(engine, ShardedEngine):
        recorder = CallRecorder(engine)
        return recorder, [recorder]
    recorders = [CallRecorder(shard) for shard in engine.shards]
    return ShardedEngine(recorders, num_threads=engine.num_threads), recorders


def replay_s(
    pools: Sequence[PoolContext],
    calls: Sequence[Sequence[RecordedCall]],
    clock: Callable[[], float] = perf_counter,
    *,
    num_threads: int = 1,
) -> float:
    """Seconds that the calls of every pool take on empty contexts: memory operations, filling,
    ``llama_decode``. Pools run side by side, ``num_threads`` at a time.
    """
    for pool in pools:
        pool.context.clear()
    with ThreadPoolExecutor(num_threads) as threads:
        begin_s = clock()
        if num_threads == 1:  # in this thread: the clock may be that of its CPU time
            for pool, own in zip(pools, calls, strict=True):
                _replay(pool, own)
        else:
            list(threads.map(_replay, pools, calls))
        seconds = clock() - begin_s
    for pool in pools:
        pool.context.clear()
    return seconds


def _replay(pool: PoolContext, calls: Sequence[RecordedCall]) -> None:
    context = pool.context
    for call in calls:
        pool.apply(call.ops)
        count = len(call.tokens)
        if not count:
            continue
        context.tokens[:count] = call.tokens
        context.positions[:count] = call.positions
        context.seq_ids[:count] = call.seq_ids
        context.wanted[:count] = call.wanted
        pool.decode(count)
