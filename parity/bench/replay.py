"""The physical limit: a recorded run's native calls again, with no scheduler and no sampling."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter

import numpy as np

from parity.engines.pool import PAD_TOKEN, PoolContext
from scheduler.engine import PAD_ROW, Batch, MemoryOp


@dataclass(frozen=True, slots=True)
class RecordedCall:
    """One native call: memory operations before it, then its rows as arrays (int32; ``wanted`` int8)."""

    ops: tuple[MemoryOp, ...]
    tokens: np.ndarray
    positions: np.ndarray
    seq_ids: np.ndarray
    wanted: np.ndarray


class CallRecorder:
    """Give it to ``InProcessDriver(record_batch=...)``; ``calls`` then holds the run's calls in order."""

    def __init__(self, pool: PoolContext) -> None:
        self._ids_per_row = pool.ids_per_row
        self.calls: list[RecordedCall] = []

    def __call__(self, batch: Batch) -> None:
        wanted = np.zeros(len(batch.tokens), np.int8)
        for sample in batch.samples:
            wanted[sample.row] = 1
        for call in batch.stages[0]:
            rows = np.asarray(call.rows)
            padding = rows == PAD_ROW
            first = np.asarray(call.seq_ids, np.int32)[:, None] * self._ids_per_row
            self.calls.append(
                RecordedCall(
                    call.ops,
                    np.where(padding, PAD_TOKEN, np.asarray(batch.tokens)[rows]).astype(np.int32),
                    np.where(padding, 0, np.asarray(batch.positions)[rows]).astype(np.int32),
                    first + np.arange(self._ids_per_row, dtype=np.int32),
                    np.where(padding, 0, wanted[rows]).astype(np.int8),
                )
            )


def replay_s(
    pool: PoolContext, calls: Sequence[RecordedCall], clock: Callable[[], float] = perf_counter
) -> float:
    """Seconds that the calls take on an empty context: memory operations, filling, ``llama_decode``."""
    context = pool.context
    context.clear()
    begin_s = clock()
    for call in calls:
        pool.apply(call.ops)
        count = len(call.tokens)
        context.tokens[:count] = call.tokens
        context.positions[:count] = call.positions
        context.seq_ids[:count] = call.seq_ids
        context.wanted[:count] = call.wanted
        pool.decode(count)
    seconds = clock() - begin_s
    context.clear()
    return seconds
