"""Faults of the step, to be planted: admission, phases, preemption, resume, cancellation, failures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import scheduler.resume as resume_module
from parity.mutants.records import Complaint, Killer, Reach
from scheduler.engine import Batch, Sample
from scheduler.loop import Flight, Scheduler
from scheduler.memory import Memory
from scheduler.policy.base import PlanBuilder
from scheduler.records import (
    ChunkResult,
    FinishReason,
    IllegalTransition,
    IterationPlan,
    IterationResult,
    Phase,
    Refusal,
    Request,
    SessionState,
    SessionView,
)
from scheduler.resume import ReleaseReceipt, preservation_receipt, suspension_key
from scheduler.sessions import SessionTable


def one_row_is_decode(original: Callable[..., Any], reach: Reach) -> Callable[..., Any]:
    def compose(plan: IterationPlan, views: dict[str, SessionView], *rest: Any) -> Batch:
        batch = original(plan, views, *rest)
        sampled, extra = {sample.request_id for sample in batch.samples}, list(batch.samples)
        for index, chunk in enumerate(plan.chunks):
            if chunk.stop - chunk.start == 1 and chunk.request_id not in sampled:
                row, request = batch.offsets[index], views[chunk.request_id].request
                extra.append(Sample(row, chunk.request_id, chunk.stop, request.sampling))
                reach()
        return replace(batch, samples=tuple(extra))

    return compose


def ticket_without_checks(original: Callable[..., Any], reach: Reach) -> Callable[..., Any]:
    def issue(view: SessionView, release: ReleaseReceipt, preservation: Any, **ready: bool) -> Any:
        key = suspension_key(view)
        if release.key != key:
            reach()
        return original(view, replace(release, key=key), replace(preservation, key=key), **ready)

    return issue


def stale_receipt() -> tuple[Complaint, ...]:
    """A receipt of suspension 10 is offered to suspension 11, which must not be resumed by it."""
    request = Request(request_id="s0", prompt=(1, 2, 3), max_tokens=4)
    view = SessionView(request, 0, SessionState.SUSPENDED, 1, 0, 3, 0, 7, 11, True, 0.0, None, None)
    late = ReleaseReceipt(suspension_key(replace(view, epoch=10)), True, 3)
    try:
        resume_module.issue_ticket(
            view, late, preservation_receipt(view, 0), allocation_ready=True, stages_ready=True
        )
    except IllegalTransition:
        return ()
    return (Complaint(Killer.LEGALITY, "a receipt of epoch 10 resumed the suspension of epoch 11"),)


def rebuild_counts_as_progress(original: Callable[..., Any], reach: Reach) -> Callable[..., Any]:
    def apply_chunk(self: Scheduler, item: ChunkResult, phase: Phase, now_ms: float) -> None:
        if phase is Phase.REBUILD and self._failures.pop(item.request_id, None):
            reach()
        original(self, item, phase, now_ms)

    return apply_chunk


def committed_forgotten(original: Callable[..., Any], reach: Reach) -> Callable[..., Any]:
    def apply_release(self: SessionTable, receipt: ReleaseReceipt) -> SessionView:
        view = original(self, receipt)
        if view.committed:
            reach()
        view = replace(view, committed=0)
        self.releases[view.request_id] = replace(receipt, key=suspension_key(view))
        return self._put(view)

    return apply_release


def suspended_forgotten(original: Callable[..., Any], reach: Reach) -> Callable[..., Any]:
    def apply_release(self: SessionTable, receipt: ReleaseReceipt) -> SessionView:
        view = original(self, receipt)
        self.suspended.pop(view.request_id)
        reach()
        return view

    return apply_release


def victim_kept(original: Callable[..., Any], reach: Reach) -> Callable[..., Any]:
    def without(plan: IterationPlan, request_ids: Any) -> IterationPlan:
        if request_ids:
            reach()
        return original(plan, ())

    return without


def never_full(original: Callable[..., Any], reach: Reach) -> Callable[..., Any]:
    def submit(self: Scheduler, request: Request, now_ms: float) -> Refusal | None:
        most = self.memory.max_session_rows
        if request.num_rows > most:
            reach()
        self.memory.max_session_rows = max(most, request.num_rows)
        try:
            return original(self, request, now_ms)
        finally:
            self.memory.max_session_rows = most

    return submit


def submission_lost(original: Callable[..., Any], reach: Reach) -> Callable[..., Any]:
    def apply_submission(self: SessionTable, request: Request, now_ms: float) -> SessionView:
        view = original(self, request, now_ms)
        if view.index == 2:
            self.waiting.pop(request.request_id)
            reach()
        return view

    return apply_submission


def ends_twice(original: Callable[..., Any], reach: Reach) -> Callable[..., Any]:
    def apply_end(self: SessionTable, request_id: str, reason: FinishReason, error: str = "") -> None:
        original(self, request_id, reason, error)
        self.completions.append(self.completions[-1])
        reach()

    return apply_end


def end_unsaid(original: Callable[..., Any], reach: Reach) -> Callable[..., Any]:
    def apply_end(self: SessionTable, request_id: str, reason: FinishReason, error: str = "") -> None:
        original(self, request_id, reason, error)
        if reason is FinishReason.CANCELLED:
            self.completions.pop()
            reach()

    return apply_end


def token_after_cancel(original: Callable[..., Any], reach: Reach) -> Callable[..., Any]:
    def finish(self: Scheduler, result: IterationResult | None, now_ms: float) -> Any:
        flight: Flight = self._flights[0]
        cancelled = [name for name, what in flight.late.items() if what == "cancel"]
        for name in cancelled:
            del flight.late[name]
            reach()
        record = original(self, result, now_ms)
        for name in cancelled:
            self.cancel(name, now_ms)
        return record

    return finish


def cancel_lost_in_flight(original: Callable[..., Any], reach: Reach) -> Callable[..., Any]:
    def apply_late(self: Scheduler, flight: Flight, now_ms: float) -> None:
        kept = {name: what for name, what in flight.late.items() if what != "cancel"}
        if len(kept) < len(flight.late):
            reach()
        flight.late.clear()
        flight.late.update(kept)
        original(self, flight, now_ms)

    return apply_late


def budget_charged(times: int) -> Callable[..., Any]:
    def make(original: Callable[..., Any], reach: Reach) -> Callable[..., Any]:
        def grant(self: PlanBuilder, *arguments: Any, **rest: Any) -> int:
            if granted := original(self, *arguments, **rest):
                reach()
            self.tokens_left -= (times - 1) * granted
            return granted

        return grant

    return make


def stop_ignored(original: Callable[..., Any], reach: Reach) -> Callable[..., Any]:
    def finish_reason(self: SessionTable, view: SessionView) -> FinishReason | None:
        reason = original(self, view)
        if reason is FinishReason.STOP and view.emitted < view.request.max_tokens:
            reach()
            return None
        return reason

    return finish_reason


def one_token_short(original: Callable[..., Any], reach: Reach) -> Callable[..., Any]:
    def finish_reason(self: SessionTable, view: SessionView) -> FinishReason | None:
        if view.emitted == view.request.max_tokens - 1 > 0:
            reach()
            return FinishReason.LENGTH
        return original(self, view)

    return finish_reason


def stopped_by_any_token(original: Callable[..., Any], reach: Reach) -> Callable[..., Any]:
    def finish_reason(self: SessionTable, view: SessionView) -> FinishReason | None:
        reason = original(self, view)
        if reason is None and view.request.stop_token_ids:
            reach()
            return FinishReason.STOP
        return reason

    return finish_reason


def rebuild_emits(original: Callable[..., Any], reach: Reach) -> Callable[..., Any]:
    def phase_at(self: SessionView, start: int) -> Phase:
        phase = original(self, start)
        if phase is Phase.REBUILD and self.emitted and start == self.committed - 1:
            reach()
            return Phase.DECODE
        return phase

    return phase_at


def failure_keeps_cells(original: Callable[..., Any], reach: Reach) -> Callable[..., Any]:
    def reset(self: Memory) -> None:
        original(self)
        for pool in self.pools:
            if pool.pending:
                reach()
            pool.pending.clear()

    return reset


def failure_loses_sessions(original: Callable[..., Any], reach: Reach) -> Callable[..., Any]:
    def fail(self: Scheduler, failure: Exception, now_ms: float) -> Any:
        running = list(self.table.running)
        record = original(self, failure, now_ms)
        for name in running[:1]:
            if name in self.table.views:
                self.table.apply_end(name, FinishReason.FAILED)
                reach()
        return record

    return fail


def pending_forgotten(original: Callable[..., Any], reach: Reach) -> Callable[..., Any]:
    def apply_pending(self: Scheduler) -> None:
        if any(self.memory.take_pending()):
            reach()

    return apply_pending


def idle_token():
    """A session that had no rows in a step gets a token: row index -1 reads the last row."""
    known: dict[str, ChunkResult] = {}

    def change(plan: IterationPlan, batch: Batch, result: IterationResult) -> IterationResult:
        here = {item.request_id for item in result.chunks}
        idle = next((item for name, item in known.items() if name not in here), None)
        known.update((item.request_id, item) for item in result.chunks)
        if idle is None:
            return result
        return replace(
            result, chunks=(*result.chunks, idle._replace(before=idle.after, after=idle.after + 1, token=0))
        )

    return change


def planned_debits():
    """Every chunk is debited as planned, rebuilds too."""

    def change(plan: IterationPlan, batch: Batch, result: IterationResult) -> IterationResult:
        debits: dict[str, int] = {}
        for chunk, client in zip(plan.chunks, batch.clients, strict=True):
            debits[client] = debits.get(client, 0) + chunk.stop - chunk.start
        return replace(result, debits=debits)

    return change


def backward_clock():
    """The engine says that it ended before it began."""

    def change(plan: IterationPlan, batch: Batch, result: IterationResult) -> IterationResult:
        return replace(result, finished_ms=result.started_ms - 1.0)

    return change


def unplanned_progress():
    """A chunk is said to have gone one row further than planned."""

    def change(plan: IterationPlan, batch: Batch, result: IterationResult) -> IterationResult:
        first, *rest = result.chunks
        return replace(result, chunks=(first._replace(after=first.after + 1), *rest))

    return change
