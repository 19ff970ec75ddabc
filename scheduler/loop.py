"""The step: admit, compose, execute, post, preempt. The only caller of an engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import MappingProxyType

from scheduler.engine import Batch, Engine, EngineFailure, Sample
from scheduler.legality import interval_limit, phase_at, validate_plan, validate_result
from scheduler.limits import StepLimits
from scheduler.memory import Memory
from scheduler.policies.base import Policy
from scheduler.records import (
    Completion, FinishReason, IllegalTransition, IntentKind, IterationPlan, IterationResult, Phase, PlannedChunk,
    Refusal, Request, SchedulerState, SessionState, SessionView,
)
from scheduler.resume import ReleaseReceipt, issue_ticket, suspension_key
from scheduler.sessions import SessionTable, recompute_receipt
from scheduler.telemetry import StepRecord

MAX_ENGINE_FAILURES = 3  # consecutive failed steps after which the sessions in them end with a typed error


class NoProgress(Exception):
    """A bounded number of steps passed without any progress; the message names the session at the head."""


@dataclass(slots=True)
class Flight:
    """A step between launch and commit."""

    plan: IterationPlan
    batch: Batch
    views: dict[str, SessionView]
    record: StepRecord
    late: dict[str, str] = field(default_factory=dict)  # ended or preempted in flight: request id -> what to do


class Scheduler:
    """Serves sessions from one shared pool per stage. Time comes in as ``now_ms``; nothing here reads a clock.

    ``observer`` is called with every executed (state, plan, batch, result): the trace.
    """

    def __init__(self, engine: Engine, policy: Policy, steps: StepLimits, *, model_digest: str = "",
                 observer: Callable[..., None] | None = None) -> None:
        self.engine, self.policy, self.steps, self.observer = engine, policy, steps, observer
        self.memory = Memory(engine.limits, steps, model_digest=model_digest)
        self.table = SessionTable()
        self.policy_memory = policy.start()
        self._decision = 0
        self._idle_steps = 0
        self._failures = 0
        self._flight: Flight | None = None
        self._record = StepRecord()

    # -- the door ----------------------------------------------------------------------------------------------------

    def submit(self, request: Request, now_ms: float) -> Refusal | None:
        """Accept a request (None) or refuse it, typed. Raises ``IllegalTransition`` for an id that is in use."""
        refusal = self._refusal(request, now_ms)
        if refusal is not None:
            self._record.refused += 1
            return refusal
        self._observe("submitted", self.table.apply_submission(request, now_ms), now_ms)
        return None

    def _refusal(self, request: Request, now_ms: float) -> Refusal | None:
        rows, most = request.num_rows, self.memory.max_session_rows
        if rows > most:
            return Refusal(request.request_id, f"needs {rows} cells, an empty pool gives one session {most}", False,
                           rows, most)
        if len(self.table.waiting) >= self.steps.max_waiting:
            return Refusal(request.request_id, f"queue is full with {self.steps.max_waiting} requests", True,
                           1, 0)
        reason = self.policy.refuse(self.state(now_ms), request)
        return Refusal(request.request_id, reason, True) if reason is not None else None

    def cancel(self, request_id: str, now_ms: float) -> bool:
        """End a session in whatever state it is; False if it is not live. Its late results will be dropped."""
        view = self.table.views.get(request_id)
        if view is None or (self._flight is not None and self._flight.late.get(request_id) == "cancel"):
            return False
        if self._in_flight(request_id):
            self._flight.late[request_id] = "cancel"  # cells are in use until the engine returns
            return True
        self._record.cancelled += 1
        self._end(view, FinishReason.CANCELLED, now_ms)
        return True

    def preempt(self, request_id: str, now_ms: float) -> bool:
        """Suspend a running session now, or when its step in flight returns; False if it is not running."""
        view = self.table.views.get(request_id)
        if view is None or view.state is not SessionState.RUNNING:
            return False
        if self._in_flight(request_id):
            self._flight.late.setdefault(request_id, "preempt")
            return True
        self._suspend(view, now_ms)
        return True

    def set_ready(self, request_id: str, ready: bool) -> None:
        """A foreign owner reports that a session's next work can or cannot run."""
        self.table.apply_ready(request_id, ready)

    def take_completions(self) -> list[Completion]:
        """Sessions that ended since the last call; each accepted session appears exactly once."""
        taken, self.table.completions = self.table.completions, []
        return taken

    @property
    def is_idle(self) -> bool:
        """Nothing is live and nothing is in flight."""
        return not self.table.views and self._flight is None

    def state(self, now_ms: float) -> SchedulerState:
        """What policies see now."""
        table, steps = self.table, self.steps
        return SchedulerState(self._decision, table.version, now_ms, table.waiting.keys(), table.running.keys(),
                              table.suspended.keys(), MappingProxyType(table.views), self.memory,
                              steps.max_num_batched_tokens, steps.max_num_seqs, steps.max_chunk_tokens,
                              MappingProxyType(table.service), self.policy_memory)

    # -- the step ----------------------------------------------------------------------------------------------------

    def step(self, now_ms: float) -> StepRecord:
        """One iteration: plan, execute, apply. Raises ``NoProgress`` after ``max_idle_steps`` steps without progress."""
        flight = self.begin(now_ms)
        try:
            result = self.engine.execute(flight.plan, flight.batch, now_ms) if flight.plan.chunks else None
        except EngineFailure as failure:
            return self.fail(failure, now_ms)
        return self.finish(result, now_ms if result is None else result.finished_ms)

    def begin(self, now_ms: float) -> Flight:
        """Admit and compose: everything before the engine. The flight must be finished or failed."""
        if self._flight is not None:
            raise IllegalTransition("a step is already in flight")
        self._decision += 1
        plan = self._admit(self._plan(now_ms), now_ms)
        plan = self._fit(plan, now_ms)
        views = {chunk.request_id: self.table.views[chunk.request_id] for chunk in plan.chunks}
        self._flight = Flight(plan, self._compose(plan, views), views, self._record)
        self._gauge_memory(self._record)
        return self._flight

    def _gauge_memory(self, record: StepRecord) -> None:
        """Memory is measured when the step's rows are placed: that is when the pool is fullest."""
        counts = self.memory.counts()
        record.cells_used, record.cells_available = counts.cells_used, counts.cells_available
        record.cells_shared, record.ids_retired = counts.cells_shared, counts.ids_retired
        record.slots_used = counts.sequences_used

    def _plan(self, now_ms: float) -> IterationPlan:
        state = self.state(now_ms)
        plan = self.policy.plan_iteration(state)
        validate_plan(state, plan, self.policy)
        if not plan.chunks and not plan.intents and not self.table.running and len(self.table.views) \
                and self.memory.evict_one():
            return self._plan(now_ms)  # a hit can pin more than it saves: rather than wait for ever, compute it anew
        return plan

    def _admit(self, plan: IterationPlan, now_ms: float) -> IterationPlan:
        """Carry out the plan's intents; a session whose shared prefix changed meanwhile is left for the next step."""
        dropped: list[str] = []
        for intent in plan.intents:
            view = self.table.views[intent.request_id]
            if intent.kind is IntentKind.REJECT:
                self._record.refused += 1
                self._end(view, FinishReason.FAILED, now_ms, error=f"rejected: {intent.reason}")
                continue
            chunk = next(chunk for chunk in plan.chunks if chunk.request_id == intent.request_id)
            if self.memory.cached_tokens(view) != chunk.start or not self._enter(view, now_ms):
                dropped.append(intent.request_id)
        return _without(plan, dropped)

    def _enter(self, view: SessionView, now_ms: float) -> bool:
        try:
            cached = self.memory.open(view)
        except IndexError:
            return False
        record = self._record
        ticket = None
        if view.state is SessionState.SUSPENDED:
            ticket = issue_ticket(view, self.table.releases[view.request_id], recompute_receipt(view, cached),
                                  allocation_ready=True, stages_ready=view.ready)
            record.resumed += 1
        else:
            record.admitted += 1
        record.prefix_hits += cached > 0
        record.prefix_misses += cached == 0
        record.prefix_tokens_saved += cached
        resumed = ticket is not None
        view = self.table.apply_entry(view.request_id, cached, ticket)
        self._observe("resumed" if resumed else "admitted", view, now_ms)
        return True

    def _fit(self, plan: IterationPlan, now_ms: float) -> IterationPlan:
        """Make room for every chunk: evict idle prefixes, then preempt; a victim in the plan is unwound whole."""
        while True:
            rows = [(chunk.request_id, chunk.stop - chunk.start) for chunk in plan.chunks]
            blocked = self.memory.allocate(rows)
            if blocked is None:
                self.memory.undo()
                return plan
            requester = self.table.views[rows[blocked][0]]
            if self.memory.evict_one():
                continue
            if self.memory.pools_have(rows[blocked][1]):
                victim = requester.request_id  # cells enough, but none above its last one: rebuild it lower
            else:
                victim = self.policy.choose_victim(self.state(now_ms), requester)
            if victim is not None:
                self._suspend(self.table.views[victim], now_ms)
            plan = _without(plan, [requester.request_id if victim is None else victim])

    def _compose(self, plan: IterationPlan, views: dict[str, SessionView]) -> Batch:
        tokens: list[int] = []
        positions: list[int] = []
        offsets, samples, rows = [0], [], []
        for chunk in plan.chunks:
            request_id, start, stop = chunk.request_id, chunk.start, chunk.stop
            view = views[request_id]
            prompt = view.request.prompt
            count = len(prompt)
            if stop <= count:
                tokens += prompt[start:stop]
            else:
                output = self.table.outputs[request_id]
                tokens += [prompt[i] if i < count else output[i - count] for i in range(start, stop)]
            positions += range(start, stop)
            rows.append((request_id, offsets[-1], stop - start))
            offsets.append(offsets[-1] + stop - start)
            phase = phase_at(view, start)
            if phase is Phase.DECODE or (phase is Phase.PREFILL and stop == count):
                samples.append(Sample(offsets[-1] - 1, request_id, stop, view.request.sampling))
        return Batch(tuple(tokens), tuple(positions), tuple(offsets), tuple(samples),
                     tuple(view.epoch for view in views.values()),
                     tuple(view.request.client_id for view in views.values()),
                     tuple(view.committed for view in views.values()),
                     self.memory.commit(rows))

    # -- after the engine --------------------------------------------------------------------------------------------

    def finish(self, result: IterationResult | None, now_ms: float) -> StepRecord:
        """Post: apply a result, end sessions, keep prefixes, carry out what was asked in flight."""
        flight = self._flight
        if flight is None:
            raise IllegalTransition("a result without a step in flight")
        if result is not None:
            validate_result(flight.plan, result, flight.views, now_ms=result.started_ms)
            self._failures = 0
        self._flight = None
        progressed = bool(flight.plan.intents)
        for item in result.chunks if result is not None else ():
            view = self.table.views.get(item.request_id)
            late = flight.late.get(item.request_id)
            if view is None or view.epoch != item.epoch or late == "cancel":
                continue  # a stale result is dropped once, whole
            progressed = progressed or item.after > item.before
            self._apply_chunk(item, now_ms)
        self._apply_late(flight, now_ms)
        if self.observer is not None:
            self.observer(flight, result)
        return self._close(flight, progressed, now_ms)

    def _apply_chunk(self, item, now_ms: float) -> None:
        phase, record = self.table.apply_chunk(item, now_ms), self._record
        rows = item.after - item.before
        view = self.table.views[item.request_id]
        if phase is Phase.REBUILD:
            record.recompute_tokens += rows
            self._observe("rebuilt", view, now_ms, rows)
        elif phase is Phase.PREFILL:
            record.prefill_tokens += rows
            self.memory.keep_prefix(view)
            self._observe("prefilled", view, now_ms, rows)
        else:
            record.decode_tokens += rows
            self._observe("decoded", view, now_ms, rows)
        if item.token is not None:
            self._observe("emitted", view, now_ms, 1)
            reason = self.table.finish_reason(view)
            if reason is not None:
                record.finished += 1
                self._end(view, reason, now_ms)

    def _apply_late(self, flight: Flight, now_ms: float) -> None:
        for request_id, what in flight.late.items():
            if request_id in self.table.views:
                (self.cancel if what == "cancel" else self.preempt)(request_id, now_ms)

    def _close(self, flight: Flight, progressed: bool, now_ms: float) -> StepRecord:
        table, memory = self.table, self.memory
        if not table.running and not table.suspended and not memory.prefix.entries and flight.plan.chunks:
            memory.reset()
        if table.running or table.suspended or table.waiting:
            self._idle_steps = 0 if progressed else self._idle_steps + 1
            if self._idle_steps >= self.steps.max_idle_steps:
                head = next(iter(table.running or table.suspended or table.waiting))
                raise NoProgress(f"{self._idle_steps} steps without progress; at the head: {table.views[head]}")
        else:
            self._idle_steps = 0
            self._apply_pending()
        memory.check_conservation()
        return self._publish(flight, now_ms)

    def _publish(self, flight: Flight, now_ms: float) -> StepRecord:
        record, table = self._record, self.table
        record.step, record.now_ms = self._decision, now_ms
        record.running, record.waiting, record.suspended = len(table.running), len(table.waiting), len(table.suspended)
        record.calls = sum(len(calls) for calls in flight.batch.stages)
        self._record = StepRecord()
        return record

    def fail(self, failure: EngineFailure, now_ms: float) -> StepRecord:
        """The engine broke off: its memory is in doubt, so every running session is suspended and the pool cleared.

        After ``MAX_ENGINE_FAILURES`` steps in a row the sessions of the failing plan end with a typed error.
        """
        flight = self._flight
        if flight is None:
            raise IllegalTransition("a failure without a step in flight")
        self._flight = None
        self._failures += 1
        self._record.engine_failures += 1
        for request_id in list(self.table.running):
            self._suspend(self.table.views[request_id], now_ms)
        self._apply_late(flight, now_ms)
        if self._failures >= MAX_ENGINE_FAILURES:
            self._failures = 0
            for chunk in flight.plan.chunks:
                if chunk.request_id in self.table.views:
                    self._record.failed += 1
                    self._end(self.table.views[chunk.request_id], FinishReason.FAILED, now_ms, error=str(failure))
        self.memory.reset()
        self.memory.check_conservation()
        return self._publish(flight, now_ms)

    def drain_prefixes(self) -> None:
        """Evict every idle prefix; with nothing live the pool goes back to empty, in the engine too."""
        while self.memory.evict_one():
            pass
        if self.is_idle:
            self.memory.reset()
        self._apply_pending()

    # -- single transitions ------------------------------------------------------------------------------------------

    def _in_flight(self, request_id: str) -> bool:
        return self._flight is not None and request_id in self._flight.views

    def _suspend(self, view: SessionView, now_ms: float) -> None:
        """Intent, release, suspended: with recompute the release is confirmed as soon as the cells are available."""
        pending = self.table.apply_preemption(view.request_id)
        self.memory.retire(view.request_id)
        self.table.apply_release(ReleaseReceipt(suspension_key(pending), True, view.computed))
        self._record.preempted += 1
        self._observe("preempted", self.table.views[view.request_id], now_ms)

    def _end(self, view: SessionView, reason: FinishReason, now_ms: float, *, error: str = "") -> None:
        if view.request_id in self.memory.residences:
            self.memory.retire(view.request_id)
        self.memory.forget(view.request_id)
        self.table.apply_end(view.request_id, reason, error)
        event = {FinishReason.CANCELLED: "cancelled", FinishReason.FAILED: "failed"}.get(reason, "finished")
        self._observe(event, view, now_ms)

    def _apply_pending(self) -> None:
        pending = self.memory.take_pending()
        if any(pending):
            self.engine.apply(pending)

    def _observe(self, event: str, view: SessionView, now_ms: float, amount: int = 0) -> None:
        self.policy_memory = self.policy.observe(self.policy_memory, event, view, now_ms, amount)


def _without(plan: IterationPlan, request_ids: list[str]) -> IterationPlan:
    """The plan less whole sessions, its ledger and evidence recounted."""
    if not request_ids:
        return plan
    kept = [i for i, chunk in enumerate(plan.chunks) if chunk.request_id not in request_ids]
    chunks: tuple[PlannedChunk, ...] = tuple(plan.chunks[i] for i in kept)
    ledger = type(plan.ledger)(plan.ledger.max_num_batched_tokens, plan.ledger.max_num_seqs,
                               sum(chunk.stop - chunk.start for chunk in chunks), len(chunks))
    return IterationPlan(plan.decision_id, plan.input_version, plan.policy, chunks, ledger, plan.intents,
                         tuple(plan.order[i] for i in kept))


__all__ = ["NoProgress", "Scheduler", "Flight", "interval_limit"]
