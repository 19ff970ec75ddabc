"""A process as a scheduler, at its level: over our memory and composition, or with cells of its own."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from parity.errors import UsageError
from parity.protocol.messages import (
    PROTOCOL,
    Answer,
    Cancel,
    Done,
    Failed,
    Hello,
    Interval,
    Level,
    Live,
    Plan,
    Planned,
    Preempt,
    Ready,
    Result,
    Submit,
)
from parity.protocol.peer import ANSWER_TIMEOUT_S, Peer, PeerFailure
from scheduler.engine import PAD_ROW, Engine, EngineFailure, MemoryOp, OpKind
from scheduler.flight import Flight, compose_batch
from scheduler.legality import require, validate_result
from scheduler.limits import StepLimits
from scheduler.loop import MAX_ENGINE_FAILURES, Scheduler
from scheduler.policy.base import Policy
from scheduler.policy.plan import PlanBuilder
from scheduler.policy.state import SchedulerState
from scheduler.records import (
    BudgetLedger,
    Completion,
    FinishReason,
    IntentKind,
    IterationPlan,
    IterationResult,
    PlannedChunk,
    PolicyIdentity,
    PreemptionCause,
    PreemptionReason,
    QueueIntent,
    Refusal,
    Request,
    SessionState,
    SessionView,
)
from scheduler.resume import (
    PreemptionIntent,
    ReleaseReceipt,
    issue_ticket,
    preservation_receipt,
    suspension_key,
)
from scheduler.sessions import SessionTable
from scheduler.telemetry import StepRecord

__all__ = ["IntervalScheduler", "PeerFailure", "PlacingScheduler", "make_process_scheduler", "open_peer"]
IDENTITY = PolicyIdentity("process")


def open_peer(
    command: str, engine: Engine, steps: StepLimits, *, timeout_s: float = ANSWER_TIMEOUT_S
) -> tuple[Peer, Ready]:
    """A new process, greeted. Raises ``UsageError`` for one that can't serve this engine or speaks another
    version, ``PeerFailure`` for one that says no such thing.
    """
    peer = Peer(command, timeout_s=timeout_s)
    try:
        ready = peer.ask(Hello(protocol=PROTOCOL, pools=tuple(engine.limits), steps=steps), Ready)
        why = ""
        if ready.protocol != PROTOCOL:
            why = f"it speaks protocol {ready.protocol}, this is {PROTOCOL}"
        elif ready.one_context and len(engine.limits) > 1:
            why = f"it declares one context, and the model is cut into {len(engine.limits)} stages"
        if why:
            raise UsageError(f"scheduler {ready.name} cannot be used", where=command, why=why)
    except BaseException:
        peer.close()
        raise
    return peer, ready


def make_process_scheduler(command: str) -> Callable[..., Scheduler]:
    """A scheduler factory (``parity.run.under_test``) that starts ``command`` for every scheduler."""

    def make(engine: Engine, policy: Policy, steps: StepLimits, *, model_digest: str = "") -> Scheduler:
        peer, ready = open_peer(command, engine, steps)
        if ready.level is Level.CELLS:
            return PlacingScheduler(engine, steps, peer, ready)
        steps = dataclasses.replace(steps, prefix_cache=steps.prefix_cache and ready.prefix_cache)
        return IntervalScheduler(engine, steps, peer, ready, model_digest=model_digest)

    return make


def interval_text(interval: Interval) -> str:
    return f"session {interval.session} [{interval.start},{interval.stop})"


def check_interval(view: SessionView | None, interval: Interval, *, start: int, steps: StepLimits) -> None:
    """Raise ``IllegalTransition``, naming session and interval, unless it goes on at ``start`` and stops
    where its phase does at the latest.
    """
    told = interval_text(interval)
    require(view is not None, "interval of a session that is unknown or has ended", told)
    require(interval.start == start, f"interval does not start at {start}, the computed frontier", told)
    require(interval.stop > interval.start, "interval is empty", told)
    limit = view.limit_at(start)
    require(interval.stop <= limit, f"interval passes {limit}, where its phase ends", told)
    length = interval.stop - interval.start
    require(length <= steps.max_chunk_tokens, "interval exceeds max_chunk_tokens", told)


def check_budgets(planned: Planned, steps: StepLimits) -> None:
    """Raise ``IllegalTransition`` for a step beyond its budgets, or a session in it twice."""
    names = [interval.session for interval in planned.chunks]
    tokens = sum(interval.stop - interval.start for interval in planned.chunks)
    require(len(dict.fromkeys(names)) == len(names), "session planned twice", names)
    require(tokens <= steps.max_num_batched_tokens, "token budget exceeded", tokens)
    require(len(names) <= steps.max_num_seqs, "sequence budget exceeded", len(names))


# -- intervals: we place, compose and account


class IntervalPolicy(Policy):
    """Asks the process who runs what; who finds no room in the pool waits, whoever asked for it."""

    identity = IDENTITY

    def __init__(self, peer: Peer, ready: Ready, steps: StepLimits) -> None:
        super().__init__()
        self.peer, self.ready, self.steps = peer, ready, steps
        self._rank: dict[str, int] = {}

    def order_key(self, state: SchedulerState, view: SessionView) -> tuple:
        return (self._rank.get(view.request_id, len(self._rank)), view.index)

    def plan_iteration(self, state: SchedulerState) -> IterationPlan:
        live = [_live(view, self._start(state, view)) for view in state.views.values()]
        question = Plan(
            step=state.decision_id,
            now_ms=state.now_ms,
            available_rows=state.memory.available_rows(),
            sessions=tuple(live),
        )
        planned = self.peer.ask(question, Planned)
        require(not planned.calls, "calls of a scheduler whose level is intervals", len(planned.calls))
        check_budgets(planned, self.steps)
        self._rank = {interval.session: rank for rank, interval in enumerate(planned.chunks)}
        plan = PlanBuilder(state, self)
        for name in planned.preempted:
            require(self.ready.preemption, "declared: no preemption, yet it preempts", name)
            require(name in state.running and name not in self._rank, "preempted, but does not run", name)
            plan.preempt(state.views[name], "the process asked for it")
        for interval in planned.chunks:
            view = state.views.get(interval.session)
            start = 0 if view is None else self._start(state, view)
            check_interval(view, interval, start=start, steps=self.steps)
            length = interval.stop - interval.start
            if view.state is SessionState.RUNNING:
                plan.add(view, limit=length)
            else:
                plan.enter(view, limit=length)
        return plan.build()

    @staticmethod
    def _start(state: SchedulerState, view: SessionView) -> int:
        return view.computed if view.state is SessionState.RUNNING else state.memory.cached_tokens(view)


class IntervalScheduler(Scheduler):
    """Our loop and memory; the process says who runs which interval, and is told what became of it."""

    overlaps_steps = False  # a question at a time

    def __init__(
        self, engine: Engine, steps: StepLimits, peer: Peer, ready: Ready, *, model_digest: str = ""
    ) -> None:
        super().__init__(engine, IntervalPolicy(peer, ready, steps), steps, model_digest=model_digest)
        self.peer, self.ready = peer, ready

    def submit(self, request: Request, now_ms: float) -> Refusal | None:
        refusal = super().submit(request, now_ms)
        if refusal is None:
            answer = self.peer.ask(_submit(request, now_ms), Answer)
            if not answer.accepted:
                self.table.views.pop(request.request_id)
                self.table.waiting.pop(request.request_id)
                self.table.outputs.pop(request.request_id)
                refusal = Refusal(request.request_id, answer.reason, answer.retryable)
        return refusal

    def cancel(self, request_id: str, now_ms: float) -> bool:
        done = super().cancel(request_id, now_ms)
        if done and request_id not in self.table.views:
            self.peer.ask(Cancel(session=request_id), Answer)
        return done

    def preempt(self, request_id: str, now_ms: float) -> bool:
        return self.ready.preemption and super().preempt(request_id, now_ms)

    def finish(self, result: IterationResult | None, now_ms: float) -> StepRecord:
        record = super().finish(result, now_ms)
        chunks = () if result is None else result.chunks
        ended = tuple(item.request_id for item in chunks if item.request_id not in self.table.views)
        self.peer.ask(Result(chunks=_done(chunks), ended=ended), Answer)
        return record

    def fail(self, failure: EngineFailure, now_ms: float) -> StepRecord:
        before = list(self.table.views)
        record = super().fail(failure, now_ms)
        ended = tuple(name for name in before if name not in self.table.views)
        self.peer.ask(Failed(reason=str(failure), ended=ended), Answer)
        return record

    def close(self) -> None:
        self.peer.close()


# -- cells: the process places; we keep the sessions' books and hold it to the rules


class PlacingScheduler:
    """What ``scheduler.loop.Scheduler`` offers, for a process that places cells itself."""

    def __init__(self, engine: Engine, steps: StepLimits, peer: Peer, ready: Ready) -> None:
        self.engine, self.steps, self.peer, self.ready = engine, steps, peer, ready
        self.table = SessionTable()
        self._flight: Flight | None = None
        self._decision = 0
        self._failures: dict[str, int] = {}

    # -- the door

    def submit(self, request: Request, now_ms: float) -> Refusal | None:
        answer = self._tell(_submit(request, now_ms))
        if answer.accepted:
            self.table.apply_submission(request, now_ms)
            return None
        most = min(limits.max_session_rows for limits in self.engine.limits)
        return Refusal(request.request_id, answer.reason, answer.retryable, request.num_rows, most)

    def cancel(self, request_id: str, now_ms: float) -> bool:
        if request_id not in self.table.views or self._late(request_id) == "cancel":
            return False
        if self._flight is not None and request_id in self._flight.views:
            self._flight.late[request_id] = "cancel"
            return True
        self.table.apply_end(request_id, FinishReason.CANCELLED)
        self._tell(Cancel(session=request_id))
        return True

    def preempt(self, request_id: str, now_ms: float) -> bool:
        if not self.ready.preemption or request_id not in self.table.running:
            return False
        if self._flight is not None and request_id in self._flight.views:
            self._flight.late.setdefault(request_id, PreemptionCause(self._decision, PreemptionReason.ASKED))
            return True
        self._suspend(self.table.views[request_id])
        self._tell(Preempt(session=request_id))
        return True

    def take_completions(self) -> list[Completion]:
        taken, self.table.completions = self.table.completions, []
        return taken

    @property
    def is_idle(self) -> bool:
        return not self.table.views and self._flight is None

    def _late(self, request_id: str) -> str | None:
        return None if self._flight is None else self._flight.late.get(request_id)

    # -- the step

    def step(self, now_ms: float) -> StepRecord:
        """One iteration. Raises ``SchedulerFailure``."""
        flight = self.begin(now_ms)
        try:
            result = self.engine.execute(flight.plan, flight.batch, now_ms) if flight.plan.chunks else None
        except EngineFailure as failure:
            return self.fail(failure, now_ms)
        return self.finish(result, now_ms if result is None else result.finished_ms)

    def begin(self, now_ms: float) -> Flight:
        """Ask for the step and hold it to the rules. Raises ``SchedulerFailure``."""
        require(self._flight is None, "a step is already in flight", self._decision)
        self._decision += 1
        live = tuple(_live(view, view.computed) for view in self.table.views.values())
        question = Plan(step=self._decision, now_ms=now_ms, available_rows=-1, sessions=live)
        planned = self.peer.ask(question, Planned)
        check_budgets(planned, self.steps)
        for name in planned.preempted:
            require(self.ready.preemption, "declared: no preemption, yet it preempts", name)
            require(name in self.table.running, "preempted, but does not run", name)
            self._suspend(self.table.views[name])
        version, entries = self.table.version, []
        chunks = tuple(self._chunk(interval, entries) for interval in planned.chunks)
        running = len(self.table.running)
        require(running <= self.steps.max_num_seqs, "more sessions run than max_num_seqs", running)
        tokens = sum(chunk.stop - chunk.start for chunk in chunks)
        ledger = BudgetLedger(self.steps.max_num_batched_tokens, self.steps.max_num_seqs, tokens, len(chunks))
        plan = IterationPlan(
            self._decision,
            version,
            IDENTITY,
            chunks,
            ledger,
            tuple(entries),
            tuple((i,) for i in range(len(chunks))),
        )
        self._check_calls(planned, tokens)
        views = {chunk.request_id: self.table.views[chunk.request_id] for chunk in chunks}
        batch = compose_batch(plan, views, self.table.outputs, planned.calls if chunks else ())
        self._flight = Flight(plan, batch, views, now_ms)
        return self._flight

    def _chunk(self, interval: Interval, entries: list[QueueIntent]) -> PlannedChunk:
        """An interval as a legal chunk; a session that waits enters with it."""
        view = self.table.views.get(interval.session)
        enters = view is not None and view.state is not SessionState.RUNNING
        start = interval.start if enters else 0 if view is None else view.computed
        check_interval(view, interval, start=start, steps=self.steps)
        if enters:
            told = interval_text(interval)
            require(start == 0 or self.ready.prefix_cache, "declared: no prefix cache, yet it shares", told)
            require(start == 0 or self.steps.prefix_cache, "shares although that is switched off", told)
            require(start < view.request.num_rows, "interval starts behind the session's end", told)
            kind = IntentKind.ADMIT if view.state is SessionState.WAITING else IntentKind.RESUME
            entries.append(QueueIntent(kind, view.request_id, view.request.generation))
            view = self._enter(view, start)
        return PlannedChunk(
            view.request_id, view.request.generation, view.version, interval.start, interval.stop
        )

    def _enter(self, view: SessionView, cached: int) -> SessionView:
        ticket = None
        if view.state is SessionState.SUSPENDED:
            receipt = preservation_receipt(view, cached)
            release = self.table.releases[view.request_id]
            ticket = issue_ticket(view, release, receipt, allocation_ready=True, stages_ready=view.ready)
        return self.table.apply_entry(view.request_id, cached, ticket)

    def _check_calls(self, planned: Planned, tokens: int) -> None:
        """Every row once in every stage, each session under one id, calls as wide as they may be."""
        due = len(self.engine.limits) if planned.chunks else 0
        require(len(planned.calls) == due, f"calls of {due} stages are due", len(planned.calls))
        for stage, (calls, limits) in enumerate(zip(planned.calls, self.engine.limits, strict=False)):
            rows = sorted(row for call in calls for row in call.rows if row != PAD_ROW)
            require(rows == list(range(tokens)), f"stage {stage} does not compute every row once", rows)
            ids: dict[int, int] = {}
            for call in calls:
                same = len(call.rows) == len(call.seq_ids) == len(call.cells)
                require(same, "rows, seq_ids and cells of a call differ in length", call)
                require(len(call.rows) <= limits.max_call_rows, "call is too wide", len(call.rows))
                ids |= dict(zip(call.rows, call.seq_ids, strict=True))
            row = 0
            for interval in planned.chunks:
                stop = row + interval.stop - interval.start
                own = list(dict.fromkeys(ids[index] for index in range(row, stop)))
                require(len(own) == 1, f"{interval_text(interval)} has several sequence ids", own)
                row = stop

    def finish(self, result: IterationResult | None, now_ms: float) -> StepRecord:
        """Apply a result, end sessions, carry out what was asked in flight. Raises ``SchedulerFailure``."""
        flight = self._flight
        require(flight is not None, "a result without a step in flight", now_ms)
        chunks = () if result is None else result.chunks
        if result is not None:
            validate_result(flight.plan, result, flight.views, now_ms=flight.started_ms)
        self._flight = None
        ended: list[str] = []
        for item in chunks:
            if flight.late.get(item.request_id) == "cancel":
                self._end(item.request_id, FinishReason.CANCELLED, ended)
                continue
            self._failures.pop(item.request_id, None)
            phase = flight.views[item.request_id].phase_at(item.before)
            view = self.table.apply_chunk(item, phase, now_ms)
            if item.token is not None and (reason := self.table.finish_reason(view)):
                self._end(item.request_id, reason, ended)
        self._tell(Result(chunks=_done(chunks), ended=tuple(ended)))
        for name, what in flight.late.items():
            if what != "cancel" and name in self.table.running:
                self.preempt(name, now_ms)
        return self._close(flight, now_ms)

    def fail(self, failure: EngineFailure, now_ms: float) -> StepRecord:
        """The engine broke off: it is cleared, and every running session is computed again."""
        flight, self._flight = self._flight, None
        require(flight is not None, "a failure without a step in flight", now_ms)
        ended: list[str] = []
        for name in list(self.table.running):
            self._suspend(self.table.views[name])
        for name in flight.views:
            count = self._failures[name] = self._failures.get(name, 0) + 1
            if flight.late.get(name) == "cancel":
                self._end(name, FinishReason.CANCELLED, ended)
            elif count >= MAX_ENGINE_FAILURES:
                self._end(name, FinishReason.FAILED, ended, error=str(failure))
        self.engine.apply(((MemoryOp(OpKind.CLEAR),),) * len(self.engine.limits))
        self._tell(Failed(reason=str(failure), ended=tuple(ended)))
        return self._close(flight, now_ms)

    def close(self) -> None:
        """End the process."""
        self.peer.close()

    # -- single transitions

    def _suspend(self, view: SessionView) -> None:
        pending = self.table.apply_preemption(PreemptionIntent(suspension_key(view)))
        self.table.apply_release(ReleaseReceipt(suspension_key(pending), True, view.computed))

    def _end(self, name: str, reason: FinishReason, ended: list[str], *, error: str = "") -> None:
        self._failures.pop(name, None)
        self.table.apply_end(name, reason, error)
        ended.append(name)

    def _tell(self, message: Submit | Cancel | Preempt | Result | Failed) -> Answer:
        answer = self.peer.ask(message, Answer)
        if any(answer.operations):
            count = len(answer.operations)
            require(count == len(self.engine.limits), "operations are due for every stage", count)
            self.engine.apply(answer.operations)
        return answer

    def _close(self, flight: Flight, now_ms: float) -> StepRecord:
        record = StepRecord()
        record.step, record.now_ms, record.step_ms = self._decision, now_ms, now_ms - flight.started_ms
        record.calls = sum(map(len, flight.batch.stages))
        return record


def _live(view: SessionView, start: int) -> Live:
    return Live(
        session=view.request_id,
        state=view.state.value,
        computed=start,
        committed=view.committed,
        emitted=view.emitted,
        until=view.limit_at(start),
        num_rows=view.request.num_rows,
    )


def _submit(request: Request, now_ms: float) -> Submit:
    return Submit(
        session=request.request_id,
        generation=request.generation,
        prompt=request.prompt,
        max_tokens=request.max_tokens,
        client_id=request.client_id,
        priority=request.priority,
        now_ms=now_ms,
    )


def _done(chunks: Sequence) -> tuple[Done, ...]:
    return tuple(Done(session=item.request_id, stop=item.after, token=item.token) for item in chunks)
