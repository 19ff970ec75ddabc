"""Mutants of the step: admission, phases, preemption, resume, cancellation, results, failures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import scheduler.loop as loop_module
import scheduler.resume as resume_module
from parity.mutants import cases
from parity.mutants.mutant import Complaint, Killer, Reach, Trial, mutant
from parity.mutants.rows import DIFFERS, everywhere
from parity.mutants.seam import ResultChange, in_method, in_results
from parity.mutants.trials import exact_trial
from parity.records import Case, Fault, FaultKind
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
    PreemptionCause,
    Refusal,
    Request,
    SessionState,
    SessionView,
)
from scheduler.resume import ReleaseReceipt, preservation_receipt, suspension_key
from scheduler.sessions import SessionTable


def on_exact(make: Callable[[str], Case], families: Sequence[str] = ("llama",)) -> tuple[Trial, ...]:
    """The case on the exact engine for each family."""
    return tuple(exact_trial(make(family)) for family in families)


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


def budget_charged(times: int) -> Callable[..., Any]:
    def make(original: Callable[..., Any], reach: Reach) -> Callable[..., Any]:
        def grant(self: PlanBuilder, *arguments: Any, **rest: Any) -> int:
            if granted := original(self, *arguments, **rest):
                reach()
            self.tokens_left -= (times - 1) * granted
            return granted

        return grant

    return make


@mutant(
    in_method(loop_module, "compose_batch"),
    part="phases",
    killers=(Killer.LEGALITY,),
    trials=on_exact(cases.one_token_chunks, cases.FAMILIES),
)
def one_token_chunk_taken_for_decode(original: Callable[..., Any], reach: Reach) -> Callable[..., Any]:
    """A prefill or rebuild chunk of one token is sampled like a decode."""

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


@mutant(
    in_method(SessionView, "phase_at"),
    part="phases",
    killers=(Killer.LEGALITY, *DIFFERS),
    trials=on_exact(cases.preempted_by_rows, cases.FAMILIES),
)
def resumed_session_taken_for_decoder(original: Callable[..., Any], reach: Reach) -> Callable[..., Any]:
    """The last rebuilt row of a resumed session emits a token again."""

    def phase_at(self: SessionView, start: int) -> Phase:
        phase = original(self, start)
        if phase is Phase.REBUILD and self.emitted and start == self.committed - 1:
            reach()
            return Phase.DECODE
        return phase

    return phase_at


@mutant(
    in_method(resume_module, "issue_ticket"),
    part="resume",
    killers=(Killer.LEGALITY,),
    trials=(Trial(name="receipt of epoch 10 for epoch 11", run=stale_receipt),),
)
def stale_receipt_accepted(original: Callable[..., Any], reach: Reach) -> Callable[..., Any]:
    """A late receipt of an earlier suspension resumes the session."""

    def issue(view: SessionView, release: ReleaseReceipt, preservation: Any, **ready: bool) -> Any:
        key = suspension_key(view)
        if release.key != key:
            reach()
        return original(view, replace(release, key=key), replace(preservation, key=key), **ready)

    return issue


@mutant(
    in_method(SessionTable, "apply_release"),
    part="resume",
    killers=(*DIFFERS, Killer.ENGINE, Killer.LEGALITY),
    trials=on_exact(cases.preempted, cases.FAMILIES),
)
def generated_tokens_not_rebuilt(original: Callable[..., Any], reach: Reach) -> Callable[..., Any]:
    """A preempted session forgets how far it had come and goes on decoding from its first row."""

    def apply_release(self: SessionTable, receipt: ReleaseReceipt) -> SessionView:
        view = original(self, receipt)
        if view.committed:
            reach()
        view = replace(view, committed=0)
        self.releases[view.request_id] = replace(receipt, key=suspension_key(view))
        return self._put(view)

    return apply_release


@mutant(
    in_method(SessionTable, "apply_release"),
    part="resume",
    killers=(Killer.LIVENESS, Killer.LEGALITY),
    trials=on_exact(cases.preempted),
)
def preempted_session_lost(original: Callable[..., Any], reach: Reach) -> Callable[..., Any]:
    """A preempted session is in no queue."""

    def apply_release(self: SessionTable, receipt: ReleaseReceipt) -> SessionView:
        view = original(self, receipt)
        self.suspended.pop(view.request_id)
        reach()
        return view

    return apply_release


@mutant(
    in_method(loop_module, "plan_without"),
    part="preemption",
    killers=(Killer.INTERNAL, Killer.CONSERVATION),
    trials=on_exact(cases.crowded, ("llama", "falcon_h1")),
)
def victim_left_in_the_plan(original: Callable[..., Any], reach: Reach) -> Callable[..., Any]:
    """A session that gave up its cells still has rows in the step."""

    def without(plan: IterationPlan, request_ids: Any) -> IterationPlan:
        if request_ids:
            reach()
        return original(plan, ())

    return without


@mutant(
    in_method(Scheduler, "submit"),
    part="admission",
    killers=(Killer.LIVENESS,),
    trials=on_exact(cases.exactly_full, cases.FAMILIES),
)
def misfit_accepted(original: Callable[..., Any], reach: Reach) -> Callable[..., Any]:
    """A session that can never fit waits for ever instead of being refused."""

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


@mutant(
    in_method(SessionTable, "apply_submission"),
    part="admission",
    killers=(Killer.LIVENESS, Killer.LEGALITY),
    trials=on_exact(cases.mixed),
)
def submission_lost(original: Callable[..., Any], reach: Reach) -> Callable[..., Any]:
    """An accepted session is in no queue."""

    def apply_submission(self: SessionTable, request: Request, now_ms: float) -> SessionView:
        view = original(self, request, now_ms)
        if view.index == 2:
            self.waiting.pop(request.request_id)
            reach()
        return view

    return apply_submission


mutant(
    in_method(PlanBuilder, "_grant"),
    name="token_budget_not_charged",
    fault="Chunks do not reduce what is left of the step's token budget.",
    part="budget",
    killers=(Killer.LEGALITY,),
    trials=on_exact(cases.mixed),
)(budget_charged(0))


mutant(
    in_method(PlanBuilder, "_grant"),
    name="budget_counted_twice",
    fault="Chunks are charged to the step's token budget twice.",
    part="budget",
    killers=(Killer.LEGALITY,),
    trials=on_exact(cases.mixed),
)(budget_charged(2))


@mutant(
    in_method(Scheduler, "_apply_chunk"),
    part="failures",
    killers=(Killer.ENDS,),
    trials=on_exact(cases.rebuilt_in_vain, cases.FAMILIES),
)
def failures_forgotten_by_a_rebuild(original: Callable[..., Any], reach: Reach) -> Callable[..., Any]:
    """A session whose rebuild succeeds and whose next step fails is tried again for ever."""

    def apply_chunk(self: Scheduler, item: ChunkResult, phase: Phase, now_ms: float) -> None:
        if phase is Phase.REBUILD and self._failures.pop(item.request_id, None):
            reach()
        original(self, item, phase, now_ms)

    return apply_chunk


@mutant(
    in_method(SessionTable, "apply_end"),
    part="ends",
    killers=(Killer.ENDS,),
    trials=on_exact(cases.mixed),
)
def session_ends_twice(original: Callable[..., Any], reach: Reach) -> Callable[..., Any]:
    """A finished session is reported twice."""

    def apply_end(self: SessionTable, request_id: str, reason: FinishReason, error: str = "") -> None:
        original(self, request_id, reason, error)
        self.completions.append(self.completions[-1])
        reach()

    return apply_end


@mutant(
    in_method(SessionTable, "apply_end"),
    part="ends",
    killers=(Killer.ENDS,),
    trials=on_exact(cases.cancelled),
)
def cancelled_session_never_reported(original: Callable[..., Any], reach: Reach) -> Callable[..., Any]:
    """A cancelled session has no end."""

    def apply_end(self: SessionTable, request_id: str, reason: FinishReason, error: str = "") -> None:
        original(self, request_id, reason, error)
        if reason is FinishReason.CANCELLED:
            self.completions.pop()
            reach()

    return apply_end


@mutant(
    in_method(Scheduler, "finish"),
    part="cancel",
    killers=(Killer.ENDS,),
    trials=everywhere(cases.cancelled),
)
def token_after_cancel(original: Callable[..., Any], reach: Reach) -> Callable[..., Any]:
    """A token of the step in flight is delivered after the cancel was acknowledged."""

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


@mutant(
    in_method(Scheduler, "_apply_late"),
    part="cancel",
    killers=(Killer.ENDS, Killer.LIVENESS, *DIFFERS),
    trials=on_exact(cases.cancelled, cases.FAMILIES),
)
def cancel_in_flight_lost(original: Callable[..., Any], reach: Reach) -> Callable[..., Any]:
    """A cancel between launch and result is forgotten, its token is dropped."""

    def apply_late(self: Scheduler, flight: Flight, now_ms: float) -> None:
        kept = {name: what for name, what in flight.late.items() if what != "cancel"}
        if len(kept) < len(flight.late):
            reach()
        flight.late.clear()
        flight.late.update(kept)
        original(self, flight, now_ms)

    return apply_late


def cancelled_and_preempted(family: str) -> Case:
    """A session that is cancelled with its row in flight, and preempted before that has returned."""
    faults = (
        Fault(kind=FaultKind.CANCEL, step=3, session=1, in_flight=True),
        Fault(kind=FaultKind.PREEMPT, step=3, session=1, in_flight=True),
    )
    return cases.cancelled(family, faults=faults)


@mutant(
    in_method(Scheduler, "_suspend_when_landed"),
    part="cancel",
    killers=(Killer.ENDS,),
    trials=on_exact(cancelled_and_preempted, cases.FAMILIES),
)
def preemption_overrules_a_cancel(original: Callable[..., Any], reach: Reach) -> Callable[..., Any]:
    """What was asked last of a session in flight is done: a preemption, and its cancel is forgotten."""

    def suspend(self: Scheduler, view: SessionView, now_ms: float, cause: PreemptionCause) -> None:
        flight = self._flight_of(view.request_id)
        if flight is not None and flight.late.get(view.request_id) == "cancel":
            del flight.late[view.request_id]
            reach()
        original(self, view, now_ms, cause)

    return suspend


@mutant(
    in_method(SessionTable, "finish_reason"),
    part="ends",
    killers=(Killer.BYTES,),
    trials=on_exact(cases.stopped, ("llama", "qwen3next")),
)
def stop_token_ignored(original: Callable[..., Any], reach: Reach) -> Callable[..., Any]:
    """A session goes on after its stop token."""

    def finish_reason(self: SessionTable, view: SessionView) -> FinishReason | None:
        reason = original(self, view)
        if reason is FinishReason.STOP and view.emitted < view.request.max_tokens:
            reach()
            return None
        return reason

    return finish_reason


@mutant(
    in_method(SessionTable, "finish_reason"),
    part="ends",
    killers=(Killer.BYTES,),
    trials=on_exact(cases.stopped, ("llama", "qwen3next")),
)
def stopped_by_any_token(original: Callable[..., Any], reach: Reach) -> Callable[..., Any]:
    """A session that has stop tokens ends at its first token, whatever it is."""

    def finish_reason(self: SessionTable, view: SessionView) -> FinishReason | None:
        reason = original(self, view)
        if reason is None and view.request.stop_token_ids:
            reach()
            return FinishReason.STOP
        return reason

    return finish_reason


@mutant(
    in_method(SessionTable, "finish_reason"),
    part="ends",
    killers=(Killer.BYTES,),
    trials=everywhere(cases.mixed, ("llama",)),
)
def one_token_short(original: Callable[..., Any], reach: Reach) -> Callable[..., Any]:
    """A session ends one token before its limit."""

    def finish_reason(self: SessionTable, view: SessionView) -> FinishReason | None:
        if view.emitted == view.request.max_tokens - 1 > 0:
            reach()
            return FinishReason.LENGTH
        return original(self, view)

    return finish_reason


@mutant(
    in_results,
    part="results",
    killers=(Killer.LEGALITY,),
    trials=everywhere(cases.one_token_chunks, ("llama",)),
)
def idle_session_gets_a_token() -> ResultChange:
    """A session without rows in a step gets the token of a padding row."""

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


@mutant(
    in_results,
    part="results",
    killers=(Killer.LEGALITY,),
    trials=on_exact(cases.preempted),
)
def rebuild_debited_as_service() -> ResultChange:
    """Rebuilt rows are charged to the client again."""

    def change(plan: IterationPlan, batch: Batch, result: IterationResult) -> IterationResult:
        debits: dict[str, int] = {}
        for chunk, client in zip(plan.chunks, batch.clients, strict=True):
            debits[client] = debits.get(client, 0) + chunk.stop - chunk.start
        return replace(result, debits=debits)

    return change


@mutant(
    in_results,
    part="results",
    killers=(Killer.LEGALITY,),
    trials=on_exact(cases.mixed),
)
def clock_runs_backward() -> ResultChange:
    """A step ends before it began."""

    def change(plan: IterationPlan, batch: Batch, result: IterationResult) -> IterationResult:
        return replace(result, finished_ms=result.started_ms - 1.0)

    return change


@mutant(
    in_results,
    part="results",
    killers=(Killer.LEGALITY,),
    trials=on_exact(cases.mixed),
)
def unplanned_progress() -> ResultChange:
    """An engine claims a row that nobody planned."""

    def change(plan: IterationPlan, batch: Batch, result: IterationResult) -> IterationResult:
        first, *rest = result.chunks
        return replace(result, chunks=(first._replace(after=first.after + 1), *rest))

    return change


@mutant(
    in_method(Memory, "reset"),
    part="failures",
    killers=(Killer.CRASH, Killer.ENGINE, *DIFFERS, Killer.MEMORY),
    trials=everywhere(cases.failing),
)
def failed_step_leaves_cells(original: Callable[..., Any], reach: Reach) -> Callable[..., Any]:
    """After a failed native call the engine keeps the rows of the calls before it."""

    def reset(self: Memory) -> None:
        original(self)
        for pool in self.pools:
            if pool.pending:
                reach()
            pool.pending.clear()

    return reset


@mutant(
    in_method(Scheduler, "fail"),
    part="failures",
    killers=(Killer.ENDS, Killer.CONSERVATION),
    trials=on_exact(cases.failing, cases.FAMILIES),
)
def failed_step_loses_a_session(original: Callable[..., Any], reach: Reach) -> Callable[..., Any]:
    """A session in a failed step ends without an error."""

    def fail(self: Scheduler, failure: Exception, now_ms: float) -> Any:
        running = list(self.table.running)
        record = original(self, failure, now_ms)
        for name in running[:1]:
            if name in self.table.views:
                self.table.apply_end(name, FinishReason.FAILED)
                reach()
        return record

    return fail


@mutant(
    in_method(Scheduler, "_apply_pending"),
    part="ends",
    killers=(Killer.MEMORY,),
    trials=everywhere(cases.mixed, ("llama",)),
)
def idle_pool_not_cleared(original: Callable[..., Any], reach: Reach) -> Callable[..., Any]:
    """When nothing is live any more the engine is not told to give its cells back."""

    def apply_pending(self: Scheduler) -> None:
        if any(self.memory.take_pending()):
            reach()

    return apply_pending
