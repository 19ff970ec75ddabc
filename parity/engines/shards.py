"""Engines of several shards as one: each has pools of its own over the same model, and runs its part of a
step beside the others.

Native calls release the interpreter, so shards compute at the same time on threads of their own. What comes
of a step is put together in the order of its plan, whatever finished first.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import numpy as np

from parity.engines.pool import LogitsObserver
from scheduler.engine import PAD_ROW, Batch, Call, EngineFailure, MemoryOp
from scheduler.limits import PoolLimits
from scheduler.records import IterationPlan, IterationResult

T = TypeVar("T")


class Part(NamedTuple):
    """One shard's share of a step: a plan and a batch that know of no other shard."""

    shard: int
    plan: IterationPlan
    batch: Batch


class ShardedEngine:
    """Implements ``scheduler.engine.Engine``, and ``OverlappingEngine`` where its shards do, with
    ``num_shards`` engines. ``num_threads`` of them run at a time.

    ``observe_logits`` gets its rows when a step is complete, shard by shard. ``fail_before_call`` counts a
    step's native calls over all shards; ``break_next`` is for the first shard that has rows.
    """

    def __init__(self, shards: Sequence[Any], *, num_threads: int = 1) -> None:
        self.shards = tuple(shards)
        self.num_shards = len(self.shards)
        self.limits: tuple[PoolLimits, ...] = self.shards[0].limits
        self.fail_before_call: int | None = None
        self.break_next: tuple[int, str] | None = None
        self._observer: LogitsObserver | None = None
        self._seen: list[list[tuple[str, int, np.ndarray]]] = [[] for _ in self.shards]
        self._launched: deque[tuple[IterationPlan, float, list[int]]] = deque()
        self.num_threads = min(num_threads, self.num_shards)
        self._threads = ThreadPoolExecutor(self.num_threads, "shard") if self.num_threads > 1 else None

    # -- what is set from outside

    @property
    def observe_logits(self) -> LogitsObserver | None:
        return self._observer

    @observe_logits.setter
    def observe_logits(self, observer: LogitsObserver | None) -> None:
        self._observer = observer
        for engine, seen in zip(self.shards, self._seen, strict=True):
            engine.observe_logits = None if observer is None else _Keep(seen)

    @property
    def restarts(self) -> bool:
        return getattr(self.shards[0], "restarts", False)

    @property
    def lost(self) -> str:
        """Why the first shard that cannot go on cannot; empty while all can."""
        return next(filter(None, (getattr(engine, "lost", "") for engine in self.shards)), "")

    def configure(self, *limits: PoolLimits) -> None:
        """Use ``limits``, one per stage, in every shard from now on; the pools must be idle."""
        self._launched.clear()
        for engine in self.shards:
            engine.configure(*limits)
        self.limits, self.break_next = self.shards[0].limits, None

    def close(self) -> None:
        if self._threads is not None:
            self._threads.shutdown()
        for engine in self.shards:
            engine.close()

    def leftover_sequences(self) -> list[int]:
        """Logical ids that still hold something in any shard."""
        return sorted({seq_id for engine in self.shards for seq_id in engine.leftover_sequences()})

    # -- engine

    def execute(self, plan: IterationPlan, batch: Batch, now_ms: float) -> IterationResult:
        """Run every shard's part. Raises ``EngineFailure`` when all are through, the first shard's of those
        that failed.
        """
        parts = self._parts(plan, batch)
        return self._merged(
            plan,
            now_ms,
            self._beside([(part.shard, self._execution(part, now_ms)) for part in parts]),
        )

    def launch(self, plan: IterationPlan, batch: Batch, now_ms: float) -> None:
        """Begin a step in every shard that has rows in it."""
        parts = self._parts(plan, batch)
        self._launched.append((plan, now_ms, [part.shard for part in parts]))
        self._beside([(part.shard, self._launch_of(part, now_ms)) for part in parts])

    def collect(self) -> IterationResult:
        """The oldest launched step's result. Raises ``EngineFailure``: those behind it are given up."""
        plan, now_ms, shards = self._launched.popleft()
        try:
            return self._merged(plan, now_ms, self._beside([(k, self.shards[k].collect) for k in shards]))
        except EngineFailure:
            self._launched.clear()
            for engine in self.shards:
                engine.give_up_launched()
            raise

    def apply(self, stages: Sequence[Sequence[MemoryOp]]) -> None:
        """Apply memory operations outside a step, per pool, shard by shard."""
        self._launched.clear()
        count = len(stages) // self.num_shards
        for index, engine in enumerate(self.shards):
            own = stages[index * count : (index + 1) * count]
            if any(own):
                engine.apply(own)

    def _execution(self, part: Part, now_ms: float) -> Callable[[], IterationResult]:
        return lambda: self.shards[part.shard].execute(part.plan, part.batch, now_ms)

    def _launch_of(self, part: Part, now_ms: float) -> Callable[[], None]:
        return lambda: self.shards[part.shard].launch(part.plan, part.batch, now_ms)

    def _parts(self, plan: IterationPlan, batch: Batch) -> list[Part]:
        """Every shard's share of a step, of those that have one; faults that are armed go with them."""
        parts = list(parts_of(plan, batch))
        begun = 0
        for part in parts:
            calls, engine = sum(map(len, part.batch.stages)), self.shards[part.shard]
            if self.fail_before_call is not None and begun <= self.fail_before_call < begun + calls:
                engine.fail_before_call, self.fail_before_call = self.fail_before_call - begun, None
            begun += calls
        if self.break_next is not None and parts:
            self.shards[parts[0].shard].break_next, self.break_next = self.break_next, None
        return parts

    def _beside(self, work: Sequence[tuple[int, Callable[[], T]]]) -> list[T]:
        """Do every shard's work, side by side where there are threads; what came of it, in the given order.

        Raises what the first of them raised, when all are through.
        """
        if self._threads is None or len(work) < 2:
            waits = [_outcome(do) for _, do in work]
        else:
            futures = [self._threads.submit(do) for _, do in work]
            waits = [_outcome(future.result) for future in futures]
        for _, error in waits:
            if error is not None:
                raise error
        return [value for value, _ in waits]

    def _merged(
        self, plan: IterationPlan, now_ms: float, results: Iterable[IterationResult]
    ) -> IterationResult:
        """One result, its chunks in the order of the plan; the step took as long as its slowest shard."""
        chunks: dict[str, Any] = {}
        debits: dict[str, int] = {}
        finished_ms = now_ms
        for result in results:
            chunks |= {chunk.request_id: chunk for chunk in result.chunks}
            finished_ms = max(finished_ms, result.finished_ms)
            for client, rows in result.debits.items():
                debits[client] = debits.get(client, 0) + rows
        for seen in self._seen:
            for row in seen:
                if self._observer is not None:
                    self._observer(*row)
            seen.clear()
        whole = tuple(chunks[chunk.request_id] for chunk in plan.chunks if chunk.request_id in chunks)
        return IterationResult(plan.decision_id, plan.input_version, whole, debits, now_ms, finished_ms)


def in_shards(num_shards: int, make: Callable[[], T], *, num_threads: int = 1) -> T | ShardedEngine:
    """One engine that ``make`` makes, or so many of them as one, ``num_threads`` at a time."""
    if num_shards == 1:
        return make()
    return ShardedEngine([make() for _ in range(num_shards)], num_threads=num_threads)


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


class _Keep:
    """A logits observer that keeps copies until the step is complete."""

    def __init__(self, seen: list[tuple[str, int, np.ndarray]]) -> None:
        self._seen = seen

    def __call__(self, request_id: str, position: int, row: np.ndarray) -> None:
        self._seen.append((request_id, position, row.copy()))


def _outcome(do: Callable[[], T]) -> tuple[Any, Exception | None]:
    try:
        return do(), None
    except Exception as error:  # raised again when the other shards are through
        return None, error


def parts_of(plan: IterationPlan, batch: Batch) -> Iterable[Part]:
    """The step cut by shard; rows are numbered anew within each. Shards without rows have no part."""
    count = len(batch.stages) // batch.num_shards
    for shard in dict.fromkeys(sorted(batch.shards)):
        mine = [index for index, home in enumerate(batch.shards) if home == shard]
        rows = [row for index in mine for row in range(batch.offsets[index], batch.offsets[index + 1])]
        number = {row: at for at, row in enumerate(rows)} | {PAD_ROW: PAD_ROW}
        offsets = [0]
        for index in mine:
            offsets.append(offsets[-1] + batch.offsets[index + 1] - batch.offsets[index])
        own = Batch(
            tuple([batch.tokens[row] for row in rows]),
            tuple([batch.positions[row] for row in rows]),
            tuple(offsets),
            tuple([s._replace(row=number[s.row]) for s in batch.samples if s.row in number]),
            tuple([batch.epochs[index] for index in mine]),
            tuple([batch.clients[index] for index in mine]),
            tuple([batch.committed[index] for index in mine]),
            tuple(
                tuple([_renumbered(call, number) for call in calls])
                for calls in batch.stages[shard * count : (shard + 1) * count]
            ),
        )
        yield Part(shard, replace(plan, chunks=tuple([plan.chunks[index] for index in mine])), own)


def _renumbered(call: Call, number: dict[int, int]) -> Call:
    return Call(call.ops, tuple([number[row] for row in call.rows]), call.seq_ids, call.cells)
