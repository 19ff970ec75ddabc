"""Mutants of cells and ids: where rows lie, when cells are freed, what a freed id still holds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import scheduler.cells as cells_module
from parity.mutants import cases
from parity.mutants.records import Killer, Mutant, Plant, Reach, replaced
from parity.mutants.rows import everywhere
from parity.mutants.seam import Change, batch_plant, with_ops
from parity.mutants.trials import exact_trial, real_trial
from parity.numerics import NumericsProfile
from scheduler.cells import PAD_SEQUENCE, CellPool
from scheduler.engine import PAD_ROW, Batch, Call, MemoryOp, OpKind
from scheduler.limits import Layout
from scheduler.loop import Scheduler
from scheduler.memory import Memory
from scheduler.records import FinishReason, IterationPlan, SessionView

ANY_DAMAGE = (Killer.BITS, Killer.CRASH, Killer.ENGINE, Killer.MEMORY)


def method_plant(
    owner: Any, name: str, make: Callable[[Callable[..., Any], Reach], Callable[..., Any]]
) -> Plant:
    """A plant that replaces one method or function: ``make(original, reach)`` gives the faulty one."""

    @contextmanager
    def plant(reach: Reach) -> Iterator[None]:
        with replaced(owner, name, lambda original: make(original, reach)):
            yield

    return plant


def _lowest_available(original: Callable[..., Any], reach: Reach) -> Callable[..., Any]:
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


def _id_freed_with_cells(original: Callable[..., Any], reach: Reach) -> Callable[..., Any]:
    def retire(self: CellPool, seq_id: int) -> None:
        original(self, seq_id)
        if seq_id not in self.free_ids:
            self.free_ids.append(seq_id)
            reach()

    return retire


def _owners_ignored(original: Callable[..., Any], reach: Reach) -> Callable[..., Any]:
    def others_mask(self: CellPool, seq_id: int) -> int:
        if original(self, seq_id) & self.owners[seq_id].mask:
            reach()
        return 0

    return others_mask


def _leaked_cell(original: Callable[..., Any], reach: Reach) -> Callable[..., Any]:
    def retire(self: CellPool, seq_id: int) -> None:
        before = self.available
        original(self, seq_id)
        freed = self.available & ~before
        if freed:
            self.available ^= freed & -freed
            reach()

    return retire


def _released_twice(original: Callable[..., Any], reach: Reach) -> Callable[..., Any]:
    def retire(self: Memory, request_id: str) -> None:
        residence = self.residences[request_id]
        original(self, request_id)
        for pool, seq_id in zip(self.pools, residence.seq_ids, strict=True):
            pool.free_ids.append(seq_id)
        reach()

    return retire


def _cancel_keeps_cells(original: Callable[..., Any], reach: Reach) -> Callable[..., Any]:
    def end(self: Scheduler, view: SessionView, reason: FinishReason, now_ms: float, **rest: Any) -> None:
        if reason is FinishReason.CANCELLED and view.request_id in self.memory.residences:
            kept = self.memory.residences.pop(view.request_id)
            if kept.entry is not None:
                kept.entry.users -= 1
            reach()
        original(self, view, reason, now_ms, **rest)

    return end


def _one_wide_call(original: Callable[..., Any], reach: Reach) -> Callable[..., Any]:
    def split_rows(count: int, width: int) -> list[int]:
        if count > width:
            reach()
        return [count]

    return split_rows


def _partial_stream_copy(original: Callable[..., Any], reach: Reach) -> Callable[..., Any]:
    def share(self: CellPool, source: int, count: int) -> int:
        seq_id = original(self, source, count)
        if self.pending[-1].stop < 0:
            self.pending[-1] = replace(self.pending[-1], start=0, stop=count)
            reach()
        return seq_id

    return share


def _wide_micro_batches(original: Callable[..., Any], reach: Reach) -> Callable[..., Any]:
    def for_layout(self: NumericsProfile, layout: Layout) -> NumericsProfile:
        reach()
        return replace(original(self, layout), max_call_rows=256)

    return for_layout


MUTANTS = (
    Mutant(
        name="cell_below_the_last_one",
        part="cells",
        killers=(Killer.BITS,),
        plant=method_plant(CellPool, "_allocate", _lowest_available),
        fault="A session gets the lowest available cell, also below its last one.",
        trials=everywhere(cases.refilled),
    ),
    Mutant(
        name="freed_cells_kept_by_the_engine",
        part="cells",
        killers=ANY_DAMAGE,
        plant=batch_plant(dropped_removals),
        fault="Cells of a finished session are never given back to the engine.",
        trials=everywhere(cases.refilled, ("llama", "deepseek2", "gemma2")),
    ),
    Mutant(
        name="retired_cells_freed_too_early",
        part="cells",
        killers=ANY_DAMAGE,
        plant=batch_plant(early_removals),
        fault="All cells of a retired id are freed when the first of them is needed.",
        trials=everywhere(cases.refilled),
    ),
    Mutant(
        name="retired_cells_freed_too_late",
        part="cells",
        killers=ANY_DAMAGE,
        plant=batch_plant(late_removals),
        fault="Retired cells are freed after the call whose rows needed them.",
        trials=everywhere(cases.refilled),
    ),
    Mutant(
        name="retired_id_used_while_it_has_cells",
        part="cells",
        killers=(Killer.CONSERVATION,),
        plant=method_plant(CellPool, "retire", _id_freed_with_cells),
        fault="An id is free for use while it still keeps retired cells, which its next owner would see.",
        trials=tuple(exact_trial(cases.refilled(family)) for family in cases.FAMILIES),
    ),
    Mutant(
        name="shared_cells_freed_with_one_owner",
        part="cells",
        killers=(Killer.CONSERVATION,),
        plant=method_plant(CellPool, "others_mask", _owners_ignored),
        fault="Cells are available again although another owner still uses them.",
        trials=tuple(exact_trial(cases.publisher_cancelled(family)) for family in cases.ATTENTION),
    ),
    Mutant(
        name="cell_leaked_at_every_end",
        part="cells",
        killers=(Killer.CONSERVATION,),
        plant=method_plant(CellPool, "retire", _leaked_cell),
        fault="One cell of every finished session is lost.",
        trials=(exact_trial(cases.mixed("llama")),),
    ),
    Mutant(
        name="id_released_twice",
        part="cells",
        killers=(Killer.CONSERVATION,),
        plant=method_plant(Memory, "retire", _released_twice),
        fault="The id of a session is given back twice.",
        trials=(exact_trial(cases.mixed("llama")), exact_trial(cases.mixed("gemma2", **cases.STREAMS))),
    ),
    Mutant(
        name="cancel_leaves_cells_behind",
        part="cells",
        killers=(Killer.CONSERVATION,),
        plant=method_plant(Scheduler, "_end", _cancel_keeps_cells),
        fault="A cancelled session's cells and id stay taken.",
        trials=tuple(exact_trial(cases.cancelled(family)) for family in cases.FAMILIES),
    ),
    Mutant(
        name="padding_row_never_removed",
        part="cells",
        killers=ANY_DAMAGE,
        plant=batch_plant(growing_padding),
        fault="Padding rows pile up in the pool.",
        trials=(exact_trial(cases.mixed("llama")), exact_trial(cases.mixed("falcon_h1"))),
    ),
    Mutant(
        name="lone_row_not_padded",
        part="cells",
        killers=(Killer.CRASH, Killer.BITS),
        plant=batch_plant(lone_rows),
        fault="A lone row runs through the kernel for one row.",
        trials=(
            *(exact_trial(cases.mixed(family)) for family in cases.FAMILIES),
            real_trial(cases.long_and_alone("llama")),
            real_trial(cases.long_and_alone("gemma2")),
        ),
    ),
    Mutant(
        name="call_wider_than_the_kernel",
        part="cells",
        killers=(Killer.ENGINE, Killer.BITS),
        plant=method_plant(cells_module, "split_rows", _one_wide_call),
        fault="All rows of a step go into one call.",
        trials=(exact_trial(cases.wide("llama")), exact_trial(cases.wide("gemma2"))),
    ),
    Mutant(
        name="micro_batch_wider_than_the_row_kernel",
        part="cells",
        killers=(Killer.BITS,),
        plant=method_plant(NumericsProfile, "for_layout", _wide_micro_batches),
        fault="Micro-batches of more than 63 rows run through the tiled attention kernel.",
        trials=tuple(real_trial(cases.wide(family, kv_type="f32")) for family in cases.FAMILIES),
    ),
    Mutant(
        name="partial_copy_between_streams",
        part="cells",
        killers=(Killer.CRASH,),
        plant=method_plant(CellPool, "share", _partial_stream_copy),
        fault="A share between private streams asks for a partial range, which aborts llama.cpp.",
        trials=(
            exact_trial(cases.shared_prefix("llama", **cases.STREAMS)),
            real_trial(cases.shared_prefix("llama", **cases.STREAMS)),
        ),
    ),
)
