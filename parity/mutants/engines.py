"""Mutants of engines: what a row sees, recurrent states, windows, refused removals, a
second cache that is forgotten.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from parity.engines.exact import ExactEngine
from parity.engines.exact_memory import ExactPool
from parity.engines.pool import PoolContext
from parity.mutants import cases, sharing_cases
from parity.mutants.cells import ANY_DAMAGE
from parity.mutants.mutant import Killer, Reach, mutant
from parity.mutants.rows import DIFFERS, everywhere
from parity.mutants.seam import Change, in_batches, in_method, with_ops
from parity.mutants.trials import exact_trial, real_trial
from parity.run.faults import hang_here
from scheduler.engine import Batch, EngineFailure, MemoryOp, OpKind
from scheduler.records import IterationPlan


@mutant(
    in_batches,
    part="states",
    killers=(*DIFFERS, Killer.ENGINE, Killer.MEMORY),
    trials=everywhere(cases.refilled, cases.HYBRIDS),
)
def recurrent_state_of_the_last_tenant() -> Change:
    """A retired id keeps its recurrent state, and its next owner goes on from it."""

    def change(plan: IterationPlan, batch: Batch) -> Batch:
        return with_ops(batch, lambda op: () if op.kind is OpKind.DROP_STATE else (op,))

    return change


@mutant(
    in_method(PoolContext, "apply"),
    part="states",
    killers=ANY_DAMAGE,
    trials=tuple(real_trial(cases.refilled(family)) for family in cases.HYBRIDS),
)
def refused_removal_ignored(original: Callable[..., Any], reach: Reach) -> Callable[..., Any]:
    """llama.cpp refuses to remove part of a sequence with a state, and nobody looks at the answer."""

    def apply(self: PoolContext, ops: tuple[MemoryOp, ...]) -> None:
        for op in ops:
            if op.kind is OpKind.DROP_STATE:
                continue  # the order of the two calls that every retirement needs is wrong as well
            try:
                original(self, (op,))
            except EngineFailure:
                reach()

    return apply


@mutant(
    in_method(ExactPool, "decode"),
    part="states",
    killers=DIFFERS,
    trials=tuple(exact_trial(cases.one_row_tenants(family)) for family in cases.HYBRIDS),
)
def stale_state_for_a_one_token_chunk(original: Callable[..., Any], reach: Reach) -> Callable[..., Any]:
    """A first chunk of one token looks like a decode, so the state of the slot is not cleared."""

    def decode(self: ExactPool, rows: Any) -> list[int]:
        for _, position, seq_id, _ in rows:
            sequence = self.sequences[seq_id]
            alone = sum(row[2] == seq_id for row in rows) == 1
            if alone and seq_id and position == 0 and sequence.state and self.limits.recurrent:
                sequence.state_position = max(sequence.state_position, 0)
                reach()
        return original(self, rows)

    return decode


@mutant(
    in_method(ExactPool, "decode"),
    part="states",
    killers=DIFFERS,
    trials=tuple(exact_trial(cases.mixed(family)) for family in cases.HYBRIDS),
)
def state_lost_at_a_chunk_boundary(original: Callable[..., Any], reach: Reach) -> Callable[..., Any]:
    """A chunk of more than one token starts from an empty state, right for a first chunk only."""

    def decode(self: ExactPool, rows: Any) -> list[int]:
        for seq_id in dict.fromkeys(row[2] for row in rows):
            own = [row for row in rows if row[2] == seq_id]
            if len(own) > 1 and own[0][1] > 0 and self.limits.recurrent:
                self.sequences[seq_id].state = 0
                reach()
        return original(self, rows)

    return decode


@mutant(
    in_method(ExactPool, "_split"),
    part="states",
    killers=(Killer.CRASH, *DIFFERS),
    trials=tuple(exact_trial(cases.mixed(family)) for family in cases.HYBRIDS),
)
def split_of_unequal_lengths_reversed(original: Callable[..., Any], reach: Reach) -> Callable[..., Any]:
    """A batch split into groups of equal length is computed last group first."""

    def split(self: ExactPool, rows: Any) -> list:
        parts = original(self, rows)
        if len(parts) > 1 or len(parts[0]) > 1 and self.limits.recurrent:
            reach()
        return [list(reversed(part)) for part in reversed(parts)] if self.limits.recurrent else parts

    return split


@mutant(
    in_method(ExactPool, "_place"),
    part="visibility",
    killers=DIFFERS,
    trials=tuple(exact_trial(cases.lockstep(family)) for family in cases.FAMILIES),
)
def neighbour_visible(original: Callable[..., Any], reach: Reach) -> Callable[..., Any]:
    """A cell array keyed by position alone: the last writer at a position is seen by everybody."""

    def place(self: ExactPool, row: Any, cell: int) -> int:
        value, position, seq_id, wanted = row
        neighbours = [
            other
            for other, sequence in enumerate(self.sequences)
            if other != seq_id and position in sequence.cells and self.limits.pads and other
        ]
        if neighbours and position >= 4:
            stream = self.streams[0]
            value ^= stream.contents[self.sequences[neighbours[-1]].cells[position]]
            reach()
        return original(self, (value, position, seq_id, wanted), cell)

    return place


@mutant(
    in_method(ExactPool, "_regular_row"),
    part="window",
    killers=DIFFERS,
    trials=(exact_trial(cases.lockstep("gemma2")),),
)
def window_one_position_short(original: Callable[..., Any], reach: Reach) -> Callable[..., Any]:
    """A window cell is used again one position before it has left the window."""

    def regular_row(self: ExactPool, sequence: Any, value: int, position: int) -> tuple[int, int]:
        if self.window is None or position < self.window:
            return original(self, sequence, value, position)
        reach()
        self.window -= 1
        try:
            return original(self, sequence, value, position)
        finally:
            self.window += 1

    return regular_row


@mutant(
    in_method(PoolContext, "fill"),
    part="window",
    killers=ANY_DAMAGE,
    trials=(real_trial(cases.past_the_window("gemma2")),),
)
def window_cell_reused_early(original: Callable[..., Any], reach: Reach) -> Callable[..., Any]:
    """Rows have one owner, so the window cache gives their cells away and places rows elsewhere."""

    def fill(self: PoolContext, call: Any, batch: Batch, *rest: Any) -> int:
        count = original(self, call, batch, *rest)
        if self.ids_per_row == 2:
            self.context.seq_ids[:count, 1] = self.context.seq_ids[:count, 0]
            reach()
        return count

    return fill


@mutant(
    in_method(PoolContext, "apply"),
    part="window",
    killers=ANY_DAMAGE,
    trials=(real_trial(sharing_cases.long_followers("gemma2")),),
)
def second_cache_forgotten_in_copy(original: Callable[..., Any], reach: Reach) -> Callable[..., Any]:
    """A share copies the cells of one id of the pair and forgets the other."""

    def apply(self: PoolContext, ops: tuple[MemoryOp, ...]) -> None:
        for op in ops:
            if op.kind is OpKind.COPY and self.ids_per_row == 2:
                reach()
                self.context.copy(op.source * 2, op.seq_id * 2, op.start, op.stop)
            else:
                original(self, (op,))

    return apply


@mutant(
    in_method(PoolContext, "apply"),
    part="window",
    killers=ANY_DAMAGE,
    trials=(real_trial(cases.refilled("gemma2")),),
)
def second_cache_forgotten_in_remove(original: Callable[..., Any], reach: Reach) -> Callable[..., Any]:
    """A removal frees the cells of one id of the pair and forgets the other."""

    def apply(self: PoolContext, ops: tuple[MemoryOp, ...]) -> None:
        for op in ops:
            if op.kind is OpKind.REMOVE and self.ids_per_row == 2:
                reach()
                self.context.remove(op.seq_id * 2, op.start, op.stop)
            else:
                original(self, (op,))

    return apply


@mutant(
    in_method(ExactPool, "_copy"),
    part="visibility",
    killers=DIFFERS,
    trials=tuple(exact_trial(sharing_cases.shared_prefix(family)) for family in cases.ATTENTION),
)
def copy_misses_its_last_row(original: Callable[..., Any], reach: Reach) -> Callable[..., Any]:
    """A follower does not see the last row that it shares."""

    def copy(self: ExactPool, source_id: int, seq_id: int, start: int, stop: int) -> None:
        original(self, source_id, seq_id, start, stop)
        target = self.sequences[seq_id]
        if target.cells and len(target.folds) > 2:
            target.folds[-1] = target.folds[-2]
            reach()

    return copy


@mutant(
    in_method(ExactEngine, "execute"),
    part="reproducibility",
    killers=(Killer.REPRODUCIBILITY,),
    trials=(exact_trial(cases.mixed("llama")),),
)
def second_run_differs(original: Callable[..., Any], reach: Reach) -> Callable[..., Any]:
    """The same case in the same process gives another answer the second time."""

    runs: list[int] = []

    def execute(self: ExactEngine, plan: IterationPlan, batch: Batch, now_ms: float) -> Any:
        runs.append(plan.decision_id)
        result = original(self, plan, batch, now_ms)
        second = runs.count(1) > 1
        if not second or result.chunks[0].token is None:
            return result
        reach()
        first = result.chunks[0]._replace(token=result.chunks[0].token ^ 1)
        return replace(result, chunks=(first, *result.chunks[1:]))

    return execute


@mutant(
    in_method(PoolContext, "decode"),
    part="containment",
    killers=(Killer.CRASH,),
    trials=(real_trial(cases.mixed("llama")),),
    timeout_s=3.0,
)
def call_that_never_returns(original: Callable[..., Any], reach: Reach) -> Callable[..., Any]:
    """A native call never returns."""

    def decode(self: PoolContext, count: int) -> None:
        reach()
        hang_here({})

    return decode
