"""Mutants of cells and ids: where rows lie, when cells are freed, what a freed id holds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import scheduler.cells as cells_module
from parity.engines.numerics import NumericsProfile
from parity.mutants import cases, sharing_cases
from parity.mutants.mutant import Killer, Reach, mutant
from parity.mutants.rows import everywhere
from parity.mutants.seam import Change, in_batches, in_method, with_ops
from parity.mutants.trials import exact_trial, real_trial
from scheduler.cells import PAD_SEQUENCE, CellPool
from scheduler.engine import PAD_ROW, Batch, Call, MemoryOp, OpKind
from scheduler.limits import Layout
from scheduler.loop import Scheduler
from scheduler.memory import Memory
from scheduler.records import FinishReason, IterationPlan, SessionView

ANY_DAMAGE = (Killer.BITS, Killer.CRASH, Killer.ENGINE, Killer.MEMORY)


@mutant(
    in_method(CellPool, "_allocate"),
    part="cells",
    killers=(Killer.BITS,),
    trials=everywhere(cases.refilled),
)
def cell_below_the_last_one(original: Callable[..., Any], reach: Reach) -> Callable[..., Any]:
    """A session gets the lowest available cell, also below its last one."""

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


@mutant(
    in_batches,
    part="cells",
    killers=ANY_DAMAGE,
    trials=everywhere(cases.refilled, ("llama", "deepseek2", "gemma2")),
)
def freed_cells_kept_by_the_engine() -> Change:
    """Cells of a finished session are never given back to the engine."""

    def change(plan: IterationPlan, batch: Batch) -> Batch:
        return with_ops(
            batch, lambda op: () if op.kind is OpKind.REMOVE and op.seq_id != PAD_SEQUENCE else (op,)
        )

    return change


@mutant(
    in_batches,
    part="cells",
    killers=ANY_DAMAGE,
    trials=everywhere(cases.refilled),
)
def retired_cells_freed_too_early() -> Change:
    """All cells of a retired id are freed when the first of them is needed."""

    def widen(op: MemoryOp) -> tuple[MemoryOp, ...]:
        partial = op.kind is OpKind.REMOVE and op.seq_id != PAD_SEQUENCE and op.start >= 0
        return (MemoryOp(OpKind.REMOVE, op.seq_id),) if partial else (op,)

    def change(plan: IterationPlan, batch: Batch) -> Batch:
        return with_ops(batch, widen)

    return change


@mutant(
    in_batches,
    part="cells",
    killers=ANY_DAMAGE,
    trials=everywhere(cases.refilled),
)
def retired_cells_freed_too_late() -> Change:
    """Retired cells are freed after the call whose rows needed them."""

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


@mutant(
    in_method(CellPool, "retire"),
    part="cells",
    killers=(Killer.CONSERVATION,),
    trials=tuple(exact_trial(cases.refilled(family)) for family in cases.FAMILIES),
)
def retired_id_used_while_it_has_cells(original: Callable[..., Any], reach: Reach) -> Callable[..., Any]:
    """An id is free for use while it still keeps retired cells, which its next owner would see."""

    def retire(self: CellPool, seq_id: int) -> None:
        original(self, seq_id)
        if seq_id not in self.free_ids:
            self.free_ids.append(seq_id)
            reach()

    return retire


@mutant(
    in_method(CellPool, "others_mask"),
    part="cells",
    killers=(Killer.CONSERVATION,),
    trials=tuple(exact_trial(sharing_cases.publisher_cancelled(family)) for family in cases.ATTENTION),
)
def shared_cells_freed_with_one_owner(original: Callable[..., Any], reach: Reach) -> Callable[..., Any]:
    """Cells are available again although another owner still uses them."""

    def others_mask(self: CellPool, seq_id: int) -> int:
        if original(self, seq_id) & self.owners[seq_id].mask:
            reach()
        return 0

    return others_mask


@mutant(
    in_method(CellPool, "retire"),
    part="cells",
    killers=(Killer.CONSERVATION,),
    trials=(exact_trial(cases.mixed("llama")),),
)
def cell_leaked_at_every_end(original: Callable[..., Any], reach: Reach) -> Callable[..., Any]:
    """One cell of every finished session is lost."""

    def retire(self: CellPool, seq_id: int) -> None:
        before = self.available
        original(self, seq_id)
        freed = self.available & ~before
        if freed:
            self.available ^= freed & -freed
            reach()

    return retire


@mutant(
    in_method(Memory, "retire"),
    part="cells",
    killers=(Killer.CONSERVATION,),
    trials=(exact_trial(cases.mixed("llama")), exact_trial(cases.mixed("gemma2", **cases.STREAMS))),
)
def id_released_twice(original: Callable[..., Any], reach: Reach) -> Callable[..., Any]:
    """The id of a session is given back twice."""

    def retire(self: Memory, request_id: str) -> None:
        residence = self.residences[request_id]
        original(self, request_id)
        for pool, seq_id in zip(self.pools, residence.seq_ids, strict=True):
            pool.free_ids.append(seq_id)
        reach()

    return retire


@mutant(
    in_method(Scheduler, "_end"),
    part="cells",
    killers=(Killer.CONSERVATION,),
    trials=tuple(exact_trial(cases.cancelled(family)) for family in cases.FAMILIES),
)
def cancel_leaves_cells_behind(original: Callable[..., Any], reach: Reach) -> Callable[..., Any]:
    """A cancelled session's cells and id stay taken."""

    def end(self: Scheduler, view: SessionView, reason: FinishReason, now_ms: float, **rest: Any) -> None:
        if reason is FinishReason.CANCELLED and view.request_id in self.memory.residences:
            kept = self.memory.residences.pop(view.request_id)
            if kept.entry is not None:
                kept.entry.users -= 1
            reach()
        original(self, view, reason, now_ms, **rest)

    return end


@mutant(
    in_batches,
    part="cells",
    killers=ANY_DAMAGE,
    trials=(exact_trial(cases.mixed("llama")), exact_trial(cases.mixed("falcon_h1"))),
)
def padding_row_never_removed() -> Change:
    """Padding rows pile up in the pool."""

    def change(plan: IterationPlan, batch: Batch) -> Batch:
        return with_ops(
            batch, lambda op: () if op.kind is OpKind.REMOVE and op.seq_id == PAD_SEQUENCE else (op,)
        )

    return change


@mutant(
    in_batches,
    part="cells",
    killers=(Killer.CRASH, Killer.BITS),
    trials=(
        *(exact_trial(cases.mixed(family)) for family in cases.FAMILIES),
        real_trial(cases.long_and_alone("llama")),
        real_trial(cases.long_and_alone("gemma2")),
    ),
)
def lone_row_not_padded() -> Change:
    """A lone row runs through the kernel for one row."""

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


@mutant(
    in_method(cells_module, "split_rows"),
    part="cells",
    killers=(Killer.ENGINE, Killer.BITS),
    trials=(exact_trial(cases.wide("llama")), exact_trial(cases.wide("gemma2"))),
)
def call_wider_than_the_kernel(original: Callable[..., Any], reach: Reach) -> Callable[..., Any]:
    """All rows of a step go into one call."""

    def split_rows(count: int, width: int) -> list[int]:
        if count > width:
            reach()
        return [count]

    return split_rows


@mutant(
    in_method(NumericsProfile, "for_layout"),
    part="cells",
    killers=(Killer.BITS,),
    trials=tuple(real_trial(cases.wide(family, kv_type="f32")) for family in cases.FAMILIES),
)
def micro_batch_wider_than_the_row_kernel(original: Callable[..., Any], reach: Reach) -> Callable[..., Any]:
    """Micro-batches of more than 63 rows run through the tiled attention kernel."""

    def for_layout(self: NumericsProfile, layout: Layout) -> NumericsProfile:
        reach()
        return replace(original(self, layout), max_call_rows=256)

    return for_layout


@mutant(
    in_method(CellPool, "share"),
    part="cells",
    killers=(Killer.CRASH,),
    trials=(
        exact_trial(sharing_cases.shared_prefix("llama", **cases.STREAMS)),
        real_trial(sharing_cases.shared_prefix("llama", **cases.STREAMS)),
    ),
)
def partial_copy_between_streams(original: Callable[..., Any], reach: Reach) -> Callable[..., Any]:
    """A share between private streams asks for a partial range, which aborts llama.cpp."""

    def share(self: CellPool, source: int, count: int) -> int:
        seq_id = original(self, source, count)
        if self.pending[-1].stop < 0:
            self.pending[-1] = replace(self.pending[-1], start=0, stop=count)
            reach()
        return seq_id

    return share
