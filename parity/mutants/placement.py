"""Faults of cells and ids, to be planted: where rows lie, when cells are freed, what a freed id holds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from parity.engines.numerics import NumericsProfile
from parity.mutants.records import Reach
from parity.mutants.seam import Change, with_ops
from scheduler.cells import PAD_SEQUENCE, CellPool
from scheduler.engine import PAD_ROW, Batch, Call, MemoryOp, OpKind
from scheduler.limits import Layout
from scheduler.loop import Scheduler
from scheduler.memory import Memory
from scheduler.records import FinishReason, IterationPlan, SessionView


def lowest_available(original: Callable[..., Any], reach: Reach) -> Callable[..., Any]:
    def allocate(self: CellPool, seq_id: int, count: int) -> bool:
        cells = self.owners[seq_id].cells
        below = self.available & ((1 << cells[-1]) - 1) if cells else 0
        if below.bit_count() < count:
            return original(
                self, seq_id, count
            )  # only the step back is wrong: a chunk's own rows stay in order
        kept, cells[:] = list(cells), []
        done = original(self, seq_id, count)
        owner, _, mask = self._undo[-1]
        self._undo[-1] = (owner, len(kept), mask)
        cells[:0] = kept
        reach()
        return done

    return allocate


def dropped_removals() -> Change:
    """Cells of a retired id are not freed when their turn comes."""

    def change(plan: IterationPlan, batch: Batch) -> Batch:
        return with_ops(
            batch, lambda op: () if op.kind is OpKind.REMOVE and op.seq_id != PAD_SEQUENCE else (op,)
        )

    return change


def early_removals() -> Change:
    """The first removal of cells of a retired id takes all that the id still has."""

    def widen(op: MemoryOp) -> tuple[MemoryOp, ...]:
        partial = op.kind is OpKind.REMOVE and op.seq_id != PAD_SEQUENCE and op.start >= 0
        return (MemoryOp(OpKind.REMOVE, op.seq_id),) if partial else (op,)

    def change(plan: IterationPlan, batch: Batch) -> Batch:
        return with_ops(batch, widen)

    return change


def late_removals() -> Change:
    """Removals happen one call after the rows that they make room for."""
    held: list[MemoryOp] = []

    def change(plan: IterationPlan, batch: Batch) -> Batch:
        def late(call: Call) -> Call:
            removals = tuple(op for op in call.ops if op.kind is OpKind.REMOVE and op.seq_id != PAD_SEQUENCE)
            ops = tuple(op for op in call.ops if op not in removals)
            earlier = tuple(held)
            held[:] = removals
            return replace(call, ops=(*earlier, *ops))

        return replace(batch, stages=tuple(tuple(map(late, calls)) for calls in batch.stages))

    return change


def growing_padding() -> Change:
    """The padding row is never taken out again."""

    def change(plan: IterationPlan, batch: Batch) -> Batch:
        return with_ops(
            batch, lambda op: () if op.kind is OpKind.REMOVE and op.seq_id == PAD_SEQUENCE else (op,)
        )

    return change


def lone_rows() -> Change:
    """A lone row goes to the kernel for one row, without its padding."""

    def change(plan: IterationPlan, batch: Batch) -> Batch:
        def strip(call: Call) -> Call:
            if PAD_ROW not in call.rows or len(call.rows) != 2:
                return call
            index = 1 - call.rows.index(PAD_ROW)
            return replace(
                call, rows=(call.rows[index],), seq_ids=(call.seq_ids[index],), cells=(call.cells[index],)
            )

        return replace(batch, stages=tuple(tuple(map(strip, calls)) for calls in batch.stages))

    return change


def id_freed_with_cells(original: Callable[..., Any], reach: Reach) -> Callable[..., Any]:
    def retire(self: CellPool, seq_id: int) -> None:
        original(self, seq_id)
        if seq_id not in self.free_ids:
            self.free_ids.append(seq_id)
            reach()

    return retire


def owners_ignored(original: Callable[..., Any], reach: Reach) -> Callable[..., Any]:
    def others_mask(self: CellPool, seq_id: int) -> int:
        if original(self, seq_id) & self.owners[seq_id].mask:
            reach()
        return 0

    return others_mask


def leaked_cell(original: Callable[..., Any], reach: Reach) -> Callable[..., Any]:
    def retire(self: CellPool, seq_id: int) -> None:
        before = self.available
        original(self, seq_id)
        freed = self.available & ~before
        if freed:
            self.available ^= freed & -freed
            reach()

    return retire


def released_twice(original: Callable[..., Any], reach: Reach) -> Callable[..., Any]:
    def retire(self: Memory, request_id: str) -> None:
        residence = self.residences[request_id]
        original(self, request_id)
        for pool, seq_id in zip(self.pools, residence.seq_ids, strict=True):
            pool.free_ids.append(seq_id)
        reach()

    return retire


def cancel_keeps_cells(original: Callable[..., Any], reach: Reach) -> Callable[..., Any]:
    def end(self: Scheduler, view: SessionView, reason: FinishReason, now_ms: float, **rest: Any) -> None:
        if reason is FinishReason.CANCELLED and view.request_id in self.memory.residences:
            kept = self.memory.residences.pop(view.request_id)
            if kept.entry is not None:
                kept.entry.users -= 1
            reach()
        original(self, view, reason, now_ms, **rest)

    return end


def one_wide_call(original: Callable[..., Any], reach: Reach) -> Callable[..., Any]:
    def split_rows(count: int, width: int) -> list[int]:
        if count > width:
            reach()
        return [count]

    return split_rows


def partial_stream_copy(original: Callable[..., Any], reach: Reach) -> Callable[..., Any]:
    def share(self: CellPool, source: int, count: int) -> int:
        seq_id = original(self, source, count)
        if self.pending[-1].stop < 0:
            self.pending[-1] = replace(self.pending[-1], start=0, stop=count)
            reach()
        return seq_id

    return share


def wide_micro_batches(original: Callable[..., Any], reach: Reach) -> Callable[..., Any]:
    def for_layout(self: NumericsProfile, layout: Layout) -> NumericsProfile:
        reach()
        return replace(original(self, layout), max_call_rows=256)

    return for_layout
