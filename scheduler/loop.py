"""The step: admit, compose, execute, post, preempt. The only caller of an engine."""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType

from scheduler import records, resume
from scheduler.engine import Engine, EngineFailure
from scheduler.flight import Flight, compose_batch, plan_without
from scheduler.legality import require, validate_plan, validate_result
from scheduler.limits import StepLimits
from scheduler.memory import Memory
from scheduler.policy.base import Policy
from scheduler.policy.state import SchedulerState
from scheduler.records import FinishReason, IntentKind, Phase, Refusal, SessionState, SessionView
from scheduler.sessions import SessionTable
from scheduler.telemetry import StepRecord

_PROGRESS = (IntentKind.ADMIT, IntentKind.RESUME, IntentKind.REJECT)
_TALLIES = {
    Phase.PREFILL: ("prefill_tokens", "prefilled"),
    Phase.DECODE: ("decode_tokens", "decoded"),
    Phase.REBUILD: ("recompute_tokens", "rebuilt"),
}
MAX_ENGINE_FAILURES = 3  # failed steps of a session, with no new row between, that end it with a typed error


class NoProgress(Exception):
    """A bounded number of steps passed without any progress; the message names the session at the head."""


class Scheduler:
    """Serves sessions from one shared pool per stage. Time comes in as
    ``now_ms``; nothing here reads a clock.

    ``observer(flight, result)`` is called after every executed step: the trace.
    """

    def __init__(
        self,
        engine: Engine,
        policy: Policy,
        steps: StepLimits,
        *,
        model_digest: str = "",
        observer: Callable[..., None] | None = None,
    ) -> None:
        self.engine, self.policy, self.steps = engine, policy, steps
        self.observer = observer or (lambda flight, result: None)
        self.memory = Memory(engine.limits, steps, model_digest=model_digest)
        policy.check_limits(steps, max_session_tokens=self.memory.max_session_rows + 1)
        self.table = SessionTable()
        self.policy_memory = policy.start()
        self._decision = self._idle_steps = 0
        self._failures: dict[str, int] = {}  # failed steps of a session since it last had a new row
        self._flight: Flight | None = None
        self._record = StepRecord()

    # -- the door

    def submit(self, request: records.Request, now_ms: float) -> Refusal | None:
        """Accept a request (None) or refuse it, typed.

        Raises ``IllegalTransition`` for an id that is in use.
        """
        refusal = self._refusal(request, now_ms)
        if refusal is None:
            self._observe("submitted", self.table.apply_submission(request, now_ms), now_ms)
        self._record.refused += refusal is not None
        return refusal

    def _refusal(self, request: records.Request, now_ms: float) -> Refusal | None:
        name, rows, most = request.request_id, request.num_rows, self.memory.max_session_rows
        if rows > most:
            why = f"needs {rows} cells, an empty pool gives one session {most}"
            return Refusal(name, why, False, rows, most)
        if len(self.table.waiting) >= self.steps.max_waiting:
            return Refusal(name, f"queue is full with {self.steps.max_waiting} requests", True, 1)
        return self.policy.refuse(self.state(now_ms), request)

    def cancel(self, request_id: str, now_ms: float) -> bool:
        """End a session in whatever state it is; False if it is not live.

        What it has in flight will be dropped.
        """
        view, flight = self.table.views.get(request_id), self._flight
        if view is None or (flight is not None and flight.late.get(request_id) == "cancel"):
            return False
        if flight is not None and request_id in flight.views:
            flight.late[request_id] = "cancel"  # its cells are in use until the engine returns
            return True
        self._record.cancelled += 1
        self._end(view, FinishReason.CANCELLED, now_ms)
        return True

    def preempt(self, request_id: str, now_ms: float) -> bool:
        """Suspend a running session now, or when its step in flight returns; False if it is not running."""
        view, flight = self.table.views.get(request_id), self._flight
        if view is None or view.state is not SessionState.RUNNING:
            return False
        if flight is not None and request_id in flight.views:
            flight.late.setdefault(request_id, "preempt")
        else:
            self._suspend(view, now_ms)
        return True

    def set_ready(self, request_id: str, ready: bool) -> None:
        """A foreign owner reports that a session's next work can or cannot run."""
        self.table.apply_ready(request_id, ready)

    def take_completions(self) -> list[records.Completion]:
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
        return SchedulerState(
            self._decision,
            table.version,
            now_ms,
            table.waiting.keys(),
            table.running.keys(),
            table.suspended.keys(),
            MappingProxyType(table.views),
            self.memory,
            steps.max_num_batched_tokens,
            steps.max_num_seqs,
            steps.max_chunk_tokens,
            MappingProxyType(table.service),
            self.policy_memory,
        )

    # -- the step

    def step(self, now_ms: float) -> StepRecord:
        """One iteration. Raises ``NoProgress`` after ``max_idle_steps`` steps without progress."""
        flight = self.begin(now_ms)
        try:
            result = self.engine.execute(flight.plan, flight.batch, now_ms) if flight.plan.chunks else None
        except EngineFailure as failure:
            return self.fail(failure, now_ms)
        return self.finish(result, now_ms if result is None else result.finished_ms)

    def begin(self, now_ms: float) -> Flight:
        """Plan, admit and compose: everything before the engine. The flight must be finished or failed."""
        require(self._flight is None, "a step is already in flight", self._decision)
        self._decision += 1
        state = self.state(now_ms)
        plan = self.policy.plan_iteration(state)
        validate_plan(state, plan, self.policy)
        self.policy_memory = self.policy.planned(state, plan)
        plan = self._fit(self._admit(plan, now_ms), now_ms)
        views = {chunk.request_id: self.table.views[chunk.request_id] for chunk in plan.chunks}
        stages = tuple(pool.take_calls() for pool in self.memory.pools)
        batch = compose_batch(plan, views, self.table.outputs, stages)
        self._flight = Flight(plan, batch, views, now_ms)
        self.memory.counts(self._record)  # when rows are placed the pool is fullest
        return self._flight

    def _admit(self, plan: records.IterationPlan, now_ms: float) -> records.IterationPlan:
        """Carry out the plan's intents; a session whose shared prefix changed
        meanwhile is left for the next step.
        """
        starts = {chunk.request_id: chunk.start for chunk in plan.chunks}
        for intent in plan.intents:
            view = self.table.views[intent.request_id]
            if intent.kind is IntentKind.REJECT:
                self._record.refused += 1
                self._end(view, FinishReason.FAILED, now_ms, error=f"rejected: {intent.reason}")
            elif intent.kind is IntentKind.PREEMPT:
                self._suspend(view, now_ms)
            elif intent.kind is not IntentKind.DEFER:
                fresh = self.memory.cached_tokens(view) == starts[view.request_id]
                if not (fresh and self._enter(view, now_ms)):
                    plan = plan_without(plan, [view.request_id])
        return plan

    def _enter(self, view: SessionView, now_ms: float) -> bool:
        cached = self.memory.open(view)
        if cached is None:
            return False
        record = self._record
        if view.state is SessionState.SUSPENDED:
            self._resume(view, cached, now_ms)  # what it finds again of its own is no hit
        else:
            record.prefix_hits += cached > 0
            record.prefix_misses += cached == 0
            record.prefix_tokens_saved += cached
            record.admitted += 1
            self._observe("admitted", self.table.apply_entry(view.request_id, cached, None), now_ms)
        return True

    def _resume(self, view: SessionView, ready_tokens: int, now_ms: float) -> None:
        receipt = resume.preservation_receipt(view, ready_tokens)
        ticket = resume.issue_ticket(
            view,
            self.table.releases[view.request_id],
            receipt,
            allocation_ready=True,
            stages_ready=view.ready,
        )
        self._record.resumed += 1
        self._observe("resumed", self.table.apply_entry(view.request_id, ready_tokens, ticket), now_ms)

    def _fit(self, plan: records.IterationPlan, now_ms: float) -> records.IterationPlan:
        """Make room for every chunk: evict idle prefixes, then preempt; a
        victim in the plan is unwound whole.
        """
        while True:
            rows, first = [], 0
            for chunk in plan.chunks:
                rows.append((chunk.request_id, first, chunk.stop - chunk.start))
                first += chunk.stop - chunk.start
            blocked = self.memory.place(rows)
            if blocked is None:
                return plan
            if self.memory.evict_one():
                continue
            requester, names = self.table.views[blocked], [name for name, _, _ in rows]
            if all(pool.num_available() >= rows[names.index(blocked)][2] for pool in self.memory.pools):
                victim = blocked  # cells enough, but none above its last one: rebuild some of it lower
                kept = self.memory.shorten(requester)
            else:
                victim, kept = self.policy.choose_victim(self.state(now_ms), requester), 0
            if victim is not None:
                self._suspend(self.table.views[victim], now_ms, kept=kept)
            plan = plan_without(plan, self.policy.unwind(plan, names.index(blocked), victim))

    # -- after the engine

    def finish(self, result: records.IterationResult | None, now_ms: float) -> StepRecord:
        """Post: apply a result, end sessions, keep prefixes, carry out what was asked in flight."""
        flight = self._flight
        require(flight is not None, "a result without a step in flight", now_ms)
        progressed = any(intent.kind in _PROGRESS for intent in flight.plan.intents)
        if result is not None:
            validate_result(flight.plan, result, flight.views, now_ms=flight.started_ms)
            self._record.engine_ms = result.finished_ms - result.started_ms
        self._flight = None
        for item in result.chunks if result is not None else ():
            view = self.table.views.get(item.request_id)
            if view is None or view.epoch != item.epoch or flight.late.get(item.request_id) == "cancel":
                continue  # a stale result is dropped once, whole
            progressed = progressed or item.after > item.before
            self._apply_chunk(item, view.phase_at(item.before), now_ms)
        self._apply_late(flight, now_ms)
        self.observer(flight, result)
        self._check_progress(progressed)
        return self._close(flight, now_ms)

    def _apply_chunk(self, item: records.ChunkResult, phase: Phase, now_ms: float) -> None:
        view, rows = self.table.apply_chunk(item, phase, now_ms), item.after - item.before
        record = self._record
        if phase is not Phase.REBUILD:  # what a failure took away and a rebuild gave back is not new
            self._failures.pop(item.request_id, None)
        counter, event = _TALLIES[phase]
        setattr(record, counter, getattr(record, counter) + rows)
        if phase is Phase.PREFILL:
            self.memory.keep_prefix(view)
        self._observe(event, view, now_ms, rows)
        if item.token is not None:
            self._observe("emitted", view, now_ms, 1)
            reason = self.table.finish_reason(view)
            if reason is not None:
                record.finished += 1
                self._end(view, reason, now_ms)

    def _apply_late(self, flight: Flight, now_ms: float) -> None:
        for request_id, what in flight.late.items():
            (self.cancel if what == "cancel" else self.preempt)(request_id, now_ms)

    def fail(self, failure: EngineFailure, now_ms: float) -> StepRecord:
        """The engine broke off: its memory is in doubt, so every running session is
        suspended and the pool cleared.

        A session in whose steps this happens ``MAX_ENGINE_FAILURES`` times while it gets no
        further ends with a typed error.
        """
        flight, self._flight = self._flight, None
        require(flight is not None, "a failure without a step in flight", now_ms)
        self._record.engine_failures += 1
        for view in [self.table.views[request_id] for request_id in self.table.running]:
            self._suspend(view, now_ms)
        self._apply_late(flight, now_ms)
        for view in [self.table.views[name] for name in flight.views if name in self.table.views]:
            count = self._failures[view.request_id] = self._failures.get(view.request_id, 0) + 1
            if count >= MAX_ENGINE_FAILURES:
                self._record.failed += 1
                self._end(view, FinishReason.FAILED, now_ms, error=str(failure))
        self.memory.reset()
        return self._close(flight, now_ms)

    def _check_progress(self, progressed: bool) -> None:
        """Raise ``NoProgress`` if work that could run has not run for too long."""
        stuck = not progressed and any(view.ready for view in self.table.views.values())
        self._idle_steps = self._idle_steps + 1 if stuck else 0
        if self._idle_steps >= self.steps.max_idle_steps:
            raise NoProgress(f"{self._idle_steps} steps without progress: {next(iter(self.table.views))}")

    def _close(self, flight: Flight, now_ms: float) -> StepRecord:
        """Tidy the pool, publish the step's record."""
        table, memory, record = self.table, self.memory, self._record
        if memory.available_sequences() == 0 and (table.waiting or table.suspended):
            memory.evict_one()  # its cells keep the id until they are used, or until nobody is resident
        if not memory.residences and not memory.prefix.entries and flight.plan.chunks:
            memory.reset()
        if not table.views:
            self._apply_pending()
        record.step, record.now_ms, record.step_ms = self._decision, now_ms, now_ms - flight.started_ms
        queues = (table.running, table.waiting, table.suspended)
        record.running, record.waiting, record.suspended = map(len, queues)
        record.calls = sum(map(len, flight.batch.stages))
        self._record = StepRecord()
        return record

    def drain_prefixes(self) -> None:
        """Evict every idle prefix; with nothing live the pool goes back to empty, in the engine too."""
        while self.memory.evict_one():
            pass
        if self.is_idle:
            self.memory.reset()
        self._apply_pending()

    # -- single transitions

    def _suspend(self, view: SessionView, now_ms: float, *, kept: int = 0) -> None:
        """Intent, release, suspended; a session that keeps its first ``kept`` rows is resumed at once."""
        table, request_id = self.table, view.request_id
        pending = table.apply_preemption(resume.PreemptionIntent(resume.suspension_key(view)))
        if not kept:
            self.memory.retire(request_id)
        released = resume.ReleaseReceipt(resume.suspension_key(pending), True, view.computed - kept)
        suspended = table.apply_release(released)
        self._record.preempted += 1
        self._observe("preempted", suspended, now_ms)
        if kept:
            self._resume(suspended, kept, now_ms)

    def _end(self, view: SessionView, reason: FinishReason, now_ms: float, *, error: str = "") -> None:
        if view.request_id in self.memory.residences:
            self.memory.retire(view.request_id)
        self._failures.pop(view.request_id, None)
        self.table.apply_end(view.request_id, reason, error)
        event = {FinishReason.CANCELLED: "cancelled", FinishReason.FAILED: "failed"}.get(reason, "finished")
        self._observe(event, view, now_ms)

    def _apply_pending(self) -> None:
        pending = self.memory.take_pending()
        if any(pending):
            self.engine.apply(pending)

    def _observe(self, event: str, view: SessionView, now_ms: float, amount: int = 0) -> None:
        self.policy_memory = self.policy.observe(self.policy_memory, event, view, now_ms, amount)
