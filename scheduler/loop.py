"""The step: admit, compose, execute, post, preempt. The only caller of an engine.

Up to ``steps_in_flight`` steps are in flight at a time, so that the stages of a chain overlap. A session is
in one of them at most: its next row needs the token of its last one. To policies it is not ready meanwhile.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from types import MappingProxyType

from scheduler import records, resume
from scheduler.engine import Engine, EngineFailure
from scheduler.flight import ENTRIES, Flight, compose_batch, plan_without, rows_of
from scheduler.legality import require, validate_plan, validate_result
from scheduler.limits import StepLimits
from scheduler.memory import Blocked, Memory
from scheduler.policy.base import Policy
from scheduler.policy.cost import deadline_ms
from scheduler.policy.plan import plan_alone
from scheduler.policy.reservation import request_allocation
from scheduler.policy.state import SchedulerState
from scheduler.progress import Progress, Rung
from scheduler.records import (
    Allocation,
    AllocationResult,
    FinishReason,
    IntentKind,
    NoProgress,
    Phase,
    PolicyFailure,
    Preemption,
    PreemptionCause,
    PreemptionMode,
    PreemptionReason,
    Refusal,
    SchedulerFailure,
    SessionState,
    SessionView,
)
from scheduler.sessions import SessionTable
from scheduler.shards import ShardedMemory
from scheduler.telemetry import StepRecord

__all__ = ["EngineFailure", "Flight", "NoProgress", "Scheduler", "SchedulerFailure"]
_TALLIES = {
    Phase.PREFILL: ("prefill_tokens", "prefilled"),
    Phase.DECODE: ("decode_tokens", "decoded"),
    Phase.REBUILD: ("recompute_tokens", "rebuilt"),
}
MAX_ENGINE_FAILURES = 3  # failed steps of a session, with no new row between, that end it with a typed error


class Scheduler:
    """Serves sessions from one shared pool per stage, or from several shards of that. Time comes in as
    ``now_ms``; nothing here reads a clock.

    ``observer(flight, result)`` is called after every executed step: the trace, with the record of every
    preemption in ``flight.preemptions``.
    """

    overlaps_steps = True  # a scheduler without this is driven with one step in flight

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
        self.memory = self._memory_of(engine, steps, model_digest)
        policy.check_limits(steps, max_session_tokens=self.memory.max_session_rows + 1)
        self.table = SessionTable()
        self.policy_memory = policy.start()
        self._policy_asked = _PolicyAsked(self._failure_of_policy)
        self._decision = 0
        self._now_ms = 0.0
        self._progress = Progress(steps.max_idle_steps)
        self._has_ended = False  # somebody, since the last step was judged
        self._is_disturbed = False  # somebody outside took rows away since then
        self._alone: str | None = None  # who has the pool to itself, on the last rung of the escalation
        self._policy_failure: PolicyFailure | None = (
            None  # raised in an event, reported when the books are whole
        )
        self._preemptions: list[Preemption] = []  # since the last step began
        self._allocations: tuple[AllocationResult, ...] = ()  # of the step that begins
        self._suspended_ms: dict[str, float] = {}
        self._failures: dict[str, int] = {}  # failed steps of a session since it last had a new row
        self._flights: deque[Flight] = deque()  # in the order of their launch
        self._record = StepRecord()  # of the oldest step in flight, or of the next one

    def _memory_of(self, engine: Engine, steps: StepLimits, digest: str) -> Memory | ShardedMemory:
        num_shards = getattr(engine, "num_shards", 1)
        if num_shards == 1:
            return Memory(engine.limits, steps, model_digest=digest, rows_to_come=self._rows_to_come)
        return ShardedMemory(
            engine.limits,
            steps,
            num_shards=num_shards,
            model_digest=digest,
            rows_to_come=self._rows_to_come,
        )

    # -- the door

    def submit(self, request: records.Request, now_ms: float) -> Refusal | None:
        """Accept a request (None) or refuse it, typed.

        Raises ``IllegalTransition`` for an id that is in use, ``PolicyFailure`` when the policy does.
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
        with self._policy_asked:
            return self.policy.refuse(self.state(now_ms), request)

    def cancel(self, request_id: str, now_ms: float) -> bool:
        """End a session in whatever state it is; False if it is not live.

        What it has in flight will be dropped.
        """
        view, flight = self.table.views.get(request_id), self._flight_of(request_id)
        if view is None or (flight is not None and flight.late.get(request_id) == "cancel"):
            return False
        if flight is not None:
            flight.late[request_id] = "cancel"  # its cells are in use until the engine returns
            return True
        self._record.cancelled += 1
        self._end(view, FinishReason.CANCELLED, now_ms)
        return True

    def preempt(self, request_id: str, now_ms: float) -> bool:
        """Suspend a running session now, or when its step in flight returns; False if it is not running."""
        view = self.table.views.get(request_id)
        if view is None or view.state is not SessionState.RUNNING:
            return False
        self._suspend_when_landed(view, now_ms, PreemptionCause(self._decision, PreemptionReason.ASKED))
        self._is_disturbed = True
        return True

    def _flight_of(self, request_id: str) -> Flight | None:
        """The step in flight that the session is in, or None."""
        return next((flight for flight in self._flights if request_id in flight.views), None)

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
        return not self.table.views and not self._flights

    @property
    def num_in_flight(self) -> int:
        """Steps that were begun, and neither finished nor failed."""
        return len(self._flights)

    def state(self, now_ms: float) -> SchedulerState:
        """What policies see now. A session in flight is shown as it will be when its rows are computed, and
        not ready.
        """
        table, steps = self.table, self.steps
        views = {**table.views, **self._views_in_flight()} if self._flights else table.views
        return SchedulerState(
            self._decision,
            table.version,
            now_ms,
            table.waiting.keys(),
            table.running.keys(),
            table.suspended.keys(),
            MappingProxyType(views),
            self.memory,
            steps.max_num_batched_tokens,
            steps.max_num_seqs,
            steps.max_chunk_tokens,
            MappingProxyType(table.service),
            self.policy_memory,
            self._seqs_per_step(),
        )

    def _views_in_flight(self) -> dict[str, SessionView]:
        views = {}
        for flight in self._flights:
            for chunk in flight.plan.chunks:
                view = self.table.views[chunk.request_id]
                views[chunk.request_id] = replace(
                    view, computed=chunk.stop, committed=max(view.committed, chunk.stop), ready=False
                )
        return views

    def _seqs_per_step(self) -> int | None:
        """Sessions that one step may run: with several in flight an equal part, so that each has some."""
        most, depth = self.steps.max_num_seqs, self.steps.steps_in_flight
        return None if depth == 1 else max(1, -(-min(len(self.table.views), most) // depth))

    # -- the step

    def step(self, now_ms: float) -> StepRecord:
        """One iteration, with no other step in flight. Raises ``SchedulerFailure``, of which ``NoProgress``
        is one. For several steps in flight there is ``scheduler.pipeline.Pipeline``.
        """
        require(not self._flights, "a step is already in flight", self._decision)
        flight = self.begin(now_ms)
        try:
            result = self.engine.execute(flight.plan, flight.batch, now_ms) if flight.plan.chunks else None
        except EngineFailure as failure:
            return self.fail(failure, now_ms)
        return self.finish(result, now_ms if result is None else result.finished_ms)

    def begin(self, now_ms: float) -> Flight:
        """Plan, make room, admit and compose: everything before the engine. The flight must be finished or
        failed, after those that were begun before it. Raises ``SchedulerFailure``: then this step is not in
        flight, and the books are whole.
        """
        most = self.steps.steps_in_flight
        require(len(self._flights) < most, f"{most} steps are already in flight", self._decision)
        self._decision += 1
        self._now_ms = now_ms
        if self._flights:
            self._record = StepRecord()
        try:
            plan = self._prepare(now_ms)
        except SchedulerFailure:
            self._forget_step()
            self._record = self._flights[0].record if self._flights else self._record
            raise
        views = {chunk.request_id: self.table.views[chunk.request_id] for chunk in plan.chunks}
        stages = tuple(pool.take_calls() for pool in self.memory.pools)
        shards, num_shards = self._shards_of(plan), len(self.memory.shards)
        batch = compose_batch(plan, views, self.table.outputs, stages, shards, num_shards)
        flight = Flight(
            plan,
            batch,
            views,
            now_ms,
            preemptions=self._preemptions,
            allocations=self._allocations,
            record=self._record,
        )
        self._preemptions, self._allocations = [], ()
        self.memory.counts(self._record)  # when rows are placed the pool is fullest
        self._flights.append(flight)
        self._count_bubbles(flight.record)
        self._record = self._flights[0].record
        return flight

    def _shards_of(self, plan: records.IterationPlan) -> tuple[int, ...]:
        """Where the session of every chunk lives; empty where there is one shard."""
        shards = self.memory.shards
        if len(shards) == 1:
            return ()
        return tuple(shards.index(self.memory.home(chunk.request_id)) for chunk in plan.chunks)

    def _count_bubbles(self, record: StepRecord) -> None:
        """At a launch: how many places for steps in flight there are, and how many of them hold no rows."""
        record.steps_in_flight = sum(bool(flight.plan.chunks) for flight in self._flights)
        record.pipeline_places = self.steps.steps_in_flight
        record.pipeline_bubbles = record.pipeline_places - record.steps_in_flight

    def _prepare(self, now_ms: float) -> records.IterationPlan:
        """The plan as it will run: made, its wishes granted, its rows placed, its entries carried out."""
        self.memory.begin_step()
        plan = self._plan(now_ms)
        self._apply_wishes(plan, now_ms)
        entering = {intent.request_id: intent.shard for intent in plan.intents if intent.kind in ENTRIES}
        fitted, has_preempted = self._fit(plan_without(plan, entering), now_ms)
        if entering and not has_preempted:  # nobody enters in a step in which somebody had to give way
            fitted = self._enter_all(plan_without(plan, self._left_out(plan, fitted)), entering, now_ms)
        self._allocations = self._answer_entries(plan, fitted)
        return fitted

    def _forget_step(self) -> None:
        """Take back what a step that was never launched had placed and opened."""
        self.memory.undo()
        for request_id in list(self.memory.residences):
            if request_id not in self.table.running:
                self.memory.retire(request_id)

    def _plan(self, now_ms: float) -> records.IterationPlan:
        """The policy's plan, or on the last rung of the escalation that of one session alone; validated."""
        with self._policy_asked:
            state = self.state(now_ms)
            alone = None if self._alone is None else state.views[self._alone]
            if alone is not None and any(name != self._alone for name in state.running):
                alone = replace(alone, ready=False)  # the pool is its own when the others have landed
            plan = (
                self.policy.plan_iteration(state) if alone is None else plan_alone(state, self.policy, alone)
            )
            validate_plan(state, plan, self.policy)
            for chunk in plan.chunks:
                require(self._flight_of(chunk.request_id) is None, "session is in flight", chunk)
            if self._flights:
                self._check_places(plan)
            self.policy_memory = self.policy.planned(state, plan)
        return plan

    def _check_places(self, plan: records.IterationPlan) -> None:
        """A session that is preempted in flight runs, and holds its place, until its step returns."""
        entering = sum(intent.kind in ENTRIES for intent in plan.intents)
        leaving = sum(
            intent.kind is IntentKind.PREEMPT and self._flight_of(intent.request_id) is None
            for intent in plan.intents
        )
        running = len(self.table.running) + entering - leaving
        require(
            running <= self.steps.max_num_seqs or not entering, "a place in flight is given away", running
        )

    def _apply_wishes(self, plan: records.IterationPlan, now_ms: float) -> None:
        """Carry out the intents that need no room: rejections and preemptions."""
        for intent in plan.intents:
            view = self.table.views[intent.request_id]
            if intent.kind is IntentKind.REJECT:
                self._record.refused += 1
                self._end(view, FinishReason.FAILED, now_ms, error=f"rejected: {intent.reason}")
            elif intent.kind is IntentKind.PREEMPT:
                cause = PreemptionCause(self._decision, PreemptionReason.POLICY_INTENT, note=intent.reason)
                self._suspend_when_landed(view, now_ms, cause)

    # -- room for running sessions

    def _fit(self, plan: records.IterationPlan, now_ms: float) -> tuple[records.IterationPlan, bool]:
        """Make room for every chunk of running sessions: evict idle prefixes, then preempt; a victim in the
        plan is unwound whole. Says whether somebody was preempted.
        """
        has_preempted = False
        while True:
            blocked = self.memory.place(rows_of(plan))
            crowded = self._crowded(plan) if blocked is None else None
            if crowded is not None:
                crowded.evict_one()
            elif blocked is None:
                return plan, has_preempted
            elif not self.memory.home(blocked.request_id).evict_for(blocked):
                plan, gave_way = self._give_way(plan, blocked, now_ms)
                has_preempted = has_preempted or gave_way

    def _give_way(
        self, plan: records.IterationPlan, blocked: Blocked, now_ms: float
    ) -> tuple[records.IterationPlan, bool]:
        """Somebody gives way for a session whose rows found no cells: the policy's victim; only when cells
        enough are left, though none above its own last one, the session itself is rebuilt lower.
        """
        requester = self.table.views[blocked.request_id]
        too_high = blocked.available >= blocked.rows
        with self._policy_asked:
            state = self.state(now_ms).in_shard(self.memory.home(blocked.request_id))
            victim = blocked.request_id if too_high else self.policy.choose_victim(state, requester)
            names = tuple(state.running)
            scores = tuple(self.policy.victim_key(state, state.views[name]) for name in names)
            require(victim is None or victim in names, "the victim does not run", victim)
            index = [chunk.request_id for chunk in plan.chunks].index(blocked.request_id)
            in_flight = victim is not None and self._flight_of(victim) is not None
            # Cells of a victim in flight are free when its step returns: until then the requester waits.
            out = [blocked.request_id] if in_flight else self.policy.unwind(plan, index, victim)
        if victim is not None:
            cause = PreemptionCause(
                self._decision,
                PreemptionReason.OWN_CELLS_TOO_HIGH if too_high else PreemptionReason.NO_CELLS,
                requester=blocked.request_id,
                wanted_rows=blocked.rows,
                available_rows=blocked.available,
                candidates=names,
                scores=scores,
            )
            self._suspend_when_landed(self.table.views[victim], now_ms, cause)
        return plan_without(plan, out), victim is not None

    def _rows_to_come(self) -> dict[str, int]:
        """Rows that are kept free for every running session: the policy's forecast, at least what
        it needs to get one row further.
        """
        with self._policy_asked:
            state = self.state(self._now_ms)
            views = map(state.views.__getitem__, self.table.running)
            return {view.request_id: self._reserved(state, view) for view in views}

    def _reserved(self, state: SchedulerState, view: SessionView) -> int:
        return max(self.policy.future_rows(state, view), view.next_rows)

    def _crowded(self, plan: records.IterationPlan) -> Memory | None:
        """A shard in which what was just placed takes room from somebody who had it before, though an idle
        prefix could go; then all is taken back. None when all may stay.

        Rows go into free cells. An idle prefix below them counts as free, so passing over it can take from
        others what was theirs: then it has to go first.
        """
        shards = [shard for shard in self.memory.shards if shard.prefix.entries and shard.pools[0].ordered]
        if not shards:
            return None
        before = self._rows_before(plan)
        after = _rows_after(plan, before)
        short = [shard for shard in shards if not shard.has_room(after)]
        if not short:
            return None
        self.memory.undo()
        for shard in short:
            if shard.has_room(before) and shard.has_evictable():
                return shard
        self.memory.place(rows_of(plan))  # it was short before, too: optimistic admission
        return None

    def _rows_before(self, plan: records.IterationPlan) -> dict[str, int]:
        """Rows to come, before this step, of running sessions, and of the plan's
        others beyond what they share.
        """
        rows, state = self._rows_to_come(), self.state(self._now_ms)
        with self._policy_asked:
            for chunk in plan.chunks:
                if chunk.request_id not in rows:
                    view = state.views[chunk.request_id]
                    rows[chunk.request_id] = max(self._reserved(state, view) - chunk.start, 0)
        return rows

    # -- admission

    @staticmethod
    def _left_out(whole: records.IterationPlan, fitted: records.IterationPlan) -> list[str]:
        """Running sessions that had to leave the plan."""
        entering = {intent.request_id: None for intent in whole.intents if intent.kind in ENTRIES}
        stay = {chunk.request_id: None for chunk in fitted.chunks} | entering
        return [chunk.request_id for chunk in whole.chunks if chunk.request_id not in stay]

    def _enter_all(
        self, plan: records.IterationPlan, entering: dict[str, int], now_ms: float
    ) -> records.IterationPlan:
        """Let sessions enter (request id: shard) as far as their rows find cells beside those of running
        ones: nobody gives way to an entry, and idle prefixes do. The last one that lacks cells stays out, and
        whoever enters behind it.
        """
        memory, starts = self.memory, {chunk.request_id: chunk.start for chunk in plan.chunks}
        memory.undo()
        roomy = [shard for shard in memory.shards if shard.shares and shard.has_room(self._rows_to_come())]
        opened: dict[str, Memory] = {}
        for name, index in entering.items():
            shard = memory.shards[index]
            if shard.open(self.table.views[name], starts[name]):
                opened[name] = shard
            else:
                plan = plan_without(plan, [name])
        while True:
            blocked = memory.place(rows_of(plan))
            if blocked is None and not opened:
                break
            if blocked is None:
                crowded = self._crowded(plan)
                if crowded is not None and crowded.evict_one():
                    continue
                crowded = self._crowded_by_entry(plan, roomy) if crowded is None else crowded
                if crowded is None:
                    break
                memory.undo()
            else:
                crowded = memory.home(blocked.request_id)
                if crowded.evict_for(blocked):
                    continue
            mine = [name for name, shard in opened.items() if shard is crowded]
            require(bool(mine), "rows of running sessions lost their cells", blocked)
            names = list(opened)
            out = names[names.index(mine[-1]) :]
            for name in out:
                opened.pop(name).retire(name)
            plan = plan_without(plan, out)
        for name in opened:
            self._enter(self.table.views[name], starts[name], now_ms)
        return plan

    def _crowded_by_entry(self, plan: records.IterationPlan, roomy: list[Memory]) -> Memory | None:
        """A shard in which everybody had room, ``roomy``, and has not any more once the plan has run."""
        after = _rows_after(plan, self._rows_before(plan)) if roomy else {}
        return next((shard for shard in roomy if not shard.has_room(after)), None)

    def _answer_entries(
        self, whole: records.IterationPlan, fitted: records.IterationPlan
    ) -> tuple[AllocationResult, ...]:
        """What the memory said to each wish to enter: the epoch of its facts is the step."""
        if not whole.intents:
            return ()
        entered = {intent.request_id: None for intent in fitted.intents if intent.kind in ENTRIES}
        answers = []
        for intent in whole.intents:
            if intent.estimate is None:
                continue
            wish = request_allocation(intent.estimate, epoch=self._decision)
            if wish is not None:
                answer = Allocation.GRANTED if intent.request_id in entered else Allocation.UNAVAILABLE
                answers.append(AllocationResult(wish, answer))
                self._record.not_granted += answer is Allocation.UNAVAILABLE
        return tuple(answers)

    def _enter(self, view: SessionView, cached: int, now_ms: float) -> None:
        record = self._record
        if view.state is SessionState.SUSPENDED:
            self._resume(view, cached, now_ms)  # what it finds again of its own is no hit
        else:
            record.prefix_hits += cached > 0
            record.prefix_misses += cached == 0
            record.prefix_tokens_saved += cached
            record.admitted += 1
            self._observe("admitted", self.table.apply_entry(view.request_id, cached, None), now_ms)

    def _resume(self, view: SessionView, ready_tokens: int, now_ms: float) -> None:
        receipt = resume.preservation_receipt(view, ready_tokens)
        ticket = resume.issue_ticket(
            view,
            self.table.releases[view.request_id],
            receipt,
            allocation_ready=view.request_id in self.memory.residences,
            stages_ready=view.ready,
        )
        self._record.resumed += 1
        self._record.resume_latency_ms += now_ms - self._suspended_ms.pop(view.request_id)
        self._observe("resumed", self.table.apply_entry(view.request_id, ready_tokens, ticket), now_ms)

    # -- after the engine

    def finish(self, result: records.IterationResult | None, now_ms: float) -> StepRecord:
        """Post: apply the result of the oldest step in flight, end sessions, keep prefixes, carry out what
        was asked in flight.

        Raises ``IllegalTransition`` for a result that is not that of the step in flight, which then has to be
        ended by ``fail``; ``NoProgress`` and ``PolicyFailure`` when the result is applied.
        """
        require(bool(self._flights), "a result without a step in flight", now_ms)
        flight = self._flights[0]
        number = flight.plan.decision_id
        require(result is not None or not flight.plan.chunks, "no result for planned rows", number)
        if result is not None:
            validate_result(flight.plan, result, flight.views, now_ms=flight.started_ms)
            self._record.engine_ms = result.finished_ms - result.started_ms
        self._flights.popleft()
        progressed, rebuilt = False, 0
        for item in result.chunks if result is not None else ():
            phase, rows = flight.views[item.request_id].phase_at(item.before), item.after - item.before
            if flight.late.get(item.request_id) == "cancel":
                self._record.stale_receipts += 1  # dropped once, whole
                continue
            progressed = progressed or phase is not Phase.REBUILD
            rebuilt += rows if phase is Phase.REBUILD else 0
            self._apply_chunk(item, phase, now_ms)
        self._apply_late(flight, now_ms)
        flight.preemptions.extend(self._preemptions)
        self._preemptions = []
        self.observer(flight, result)
        record = self._close(flight, now_ms)
        self._judge_progress(record, progressed=progressed, rebuilt=rebuilt, now_ms=now_ms)
        self._raise_policy_failure()
        return record

    def _apply_chunk(self, item: records.ChunkResult, phase: Phase, now_ms: float) -> None:
        before, record = self.table.views[item.request_id], self._record
        view, rows = self.table.apply_chunk(item, phase, now_ms), item.after - item.before
        if phase is not Phase.REBUILD:  # what a failure took away and a rebuild gave back is not new
            self._failures.pop(item.request_id, None)
        counter, event = _TALLIES[phase]
        setattr(record, counter, getattr(record, counter) + rows)
        if phase is Phase.PREFILL:
            self.memory.home(view.request_id).keep_prefix(view)
        self._observe(event, view, now_ms, rows)
        if item.token is not None:
            self._observe("emitted", view, now_ms, 1)
            record.late_after_resume += before.epoch > 0 and now_ms > deadline_ms(before)
            reason = self.table.finish_reason(view)
            if reason is not None:
                record.finished += 1
                self._end(view, reason, now_ms)

    def _apply_late(self, flight: Flight, now_ms: float) -> None:
        for request_id, what in flight.late.items():
            view = self.table.views.get(request_id)
            if view is None:
                continue  # it ended in this step
            if what == "cancel":
                self.cancel(request_id, now_ms)
            elif view.state is SessionState.RUNNING:
                self._suspend(view, now_ms, what)
                # Rows rebuilt until an escalation has cleared the pool are none of the lone session.
                wished = what.reason in (PreemptionReason.ASKED, PreemptionReason.ESCALATION)
                self._is_disturbed = self._is_disturbed or wished

    def fail(self, failure: EngineFailure, now_ms: float) -> StepRecord:
        """The engine broke off in the oldest step in flight: its memory is in doubt, so every running session
        is suspended and the pool cleared. The steps behind that one are given up, whatever became of them.

        A session in whose steps this happens ``MAX_ENGINE_FAILURES`` times while it gets no
        further ends with a typed error.
        """
        require(bool(self._flights), "a failure without a step in flight", now_ms)
        flight, *behind = self._flights
        self._flights.clear()
        self._record.engine_failures += 1
        cause = PreemptionCause(self._decision, PreemptionReason.ENGINE_FAILURE, note=str(failure))
        for view in [self.table.views[request_id] for request_id in self.table.running]:
            self._suspend(view, now_ms, cause)
        for each in (flight, *behind):
            self._apply_late(each, now_ms)
        flight.preemptions.extend(self._preemptions)
        self._preemptions = []
        for view in [self.table.views[name] for name in flight.views if name in self.table.views]:
            count = self._failures[view.request_id] = self._failures.get(view.request_id, 0) + 1
            if count >= MAX_ENGINE_FAILURES:
                self._record.failed += 1
                self._end(view, FinishReason.FAILED, now_ms, error=str(failure))
        self.memory.reset()
        self._is_disturbed = True
        record = self._close(flight, now_ms)
        for each in behind:
            self._record = each.record
            self._close(each, now_ms)
        self._raise_policy_failure()
        return record

    def abandon(self, error: str, now_ms: float) -> None:
        """End every live session with a typed error, whatever is in flight, and begin anew with an empty
        pool: the way on after a ``SchedulerFailure``. Raises ``EngineFailure`` if the engine does not clear.
        """
        if self._flights:
            with contextlib.suppress(PolicyFailure):  # it is the policy that is given up
                self.fail(EngineFailure(error), now_ms)
        self._flights.clear()
        for view in list(self.table.views.values()):
            self._record.failed += 1
            self._end(view, FinishReason.FAILED, now_ms, error=error)
        self.memory.undo()
        self._leave_alone()
        self._policy_failure, self.policy_memory = None, self.policy.start()
        self.memory.reset()
        self._apply_pending()

    # -- progress

    def _judge_progress(self, record: StepRecord, *, progressed: bool, rebuilt: int, now_ms: float) -> None:
        """Measure the step, and climb the next rung of the escalation when it is time to. Raises
        ``NoProgress`` past the last one.
        """
        progress, views = self._progress, self.table.views
        progressed, self._has_ended = progressed or self._has_ended, False
        if self._is_disturbed:
            progress.restart()
            rebuilt, self._is_disturbed = 0, False
        if self._alone is not None and (self._alone not in views or not self._can_run(views[self._alone])):
            self._leave_alone()
        if not views:
            self._leave_alone()
            return
        can_run = progressed or any(self._can_run(view) for view in views.values())
        owed = 0 if progressed else sum(view.committed for view in views.values())
        climbed = progress.note(progressed=progressed, rebuilt=rebuilt, owed=owed, can_run=can_run)
        self.memory.allow_sharing(progress.rung is Rung.NONE)
        if not climbed:
            return
        record.escalations += 1
        while self.memory.evict_one():
            pass
        if progress.rung is Rung.ALONE:
            self._run_alone(now_ms)
        elif progress.rung is Rung.EXHAUSTED:
            oldest = next(iter(views))
            self._leave_alone()
            raise NoProgress(f"{progress.max_idle_steps} steps without progress, alone too: {oldest}")

    def _can_run(self, view: SessionView) -> bool:
        with self._policy_asked:
            return self.policy.can_run(self.state(self._now_ms), view)

    def _run_alone(self, now_ms: float) -> None:
        """The oldest session that can run gets the pool to itself until it ends."""
        views = self.table.views
        self._alone = min((v for v in views.values() if self._can_run(v)), key=lambda v: v.index).request_id
        cause = PreemptionCause(self._decision, PreemptionReason.ESCALATION, requester=self._alone)
        for name in list(self.table.running):
            if name != self._alone:
                self._suspend_when_landed(views[name], now_ms, cause)
        if not self.memory.residences:
            self.memory.reset()

    def _leave_alone(self) -> None:
        self._alone = None
        self.memory.allow_sharing(True)
        self._progress.release()

    def _close(self, flight: Flight, now_ms: float) -> StepRecord:
        """Tidy the pool, publish the step's record."""
        table, record = self.table, self._record
        for shard in self.memory.shards:
            if shard.available_sequences() == 0 and (table.waiting or table.suspended):
                shard.evict_one()  # its cells keep the id until they are used, or until nobody is resident
            if not shard.residences and not shard.prefix.entries and flight.plan.chunks:
                shard.reset()
        if not table.views:
            self._apply_pending()
        record.step, record.now_ms = flight.plan.decision_id, now_ms
        record.step_ms = now_ms - flight.started_ms
        queues = (table.running, table.waiting, table.suspended)
        record.running, record.waiting, record.suspended = map(len, queues)
        record.calls = sum(map(len, flight.batch.stages))
        self._record = self._flights[0].record if self._flights else StepRecord()
        return record

    def drain_prefixes(self) -> None:
        """Evict every idle prefix; with nothing live the pool goes back to empty, in the engine too."""
        while self.memory.evict_one():
            pass
        if self.is_idle:
            self.memory.reset()
        self._apply_pending()

    # -- single transitions

    def _suspend_when_landed(self, view: SessionView, now_ms: float, cause: PreemptionCause) -> None:
        """``_suspend``, for a session in flight when its step returns: its cells are in use until then."""
        flight = self._flight_of(view.request_id)
        if flight is None:
            self._suspend(view, now_ms, cause)
        else:
            flight.late.setdefault(view.request_id, cause)

    def _suspend(self, view: SessionView, now_ms: float, cause: PreemptionCause) -> None:
        """Intent, release, suspended, recorded; a session whose own cells lie too high keeps what rows it
        can and is resumed at once.
        """
        table, request_id = self.table, view.request_id
        memory = self.memory.home(request_id)
        too_high = cause.reason is PreemptionReason.OWN_CELLS_TOO_HIGH
        before = memory.available_cells()
        kept = memory.shorten(view, available=cause.available_rows) if too_high else 0
        mode = PreemptionMode.REBUILD_TAIL if kept else PreemptionMode.RECOMPUTE
        is_fallback = too_high and not kept
        intent = resume.PreemptionIntent(
            resume.suspension_key(view),
            reason=cause.reason,
            mode=PreemptionMode.REBUILD_TAIL if is_fallback else mode,
            fallback=PreemptionMode.RECOMPUTE,
            target_rows=kept,
            policy=self.policy.identity,
            decision_id=cause.decision_id,
        )
        pending = table.apply_preemption(intent)
        if not kept:
            memory.retire(request_id)
        freed = tuple(now - then for now, then in zip(memory.available_cells(), before, strict=True))
        is_released = bool(kept) or request_id not in memory.residences
        released = resume.ReleaseReceipt(resume.suspension_key(pending), is_released, min(freed))
        suspended = table.apply_release(released)
        self._suspended_ms[request_id] = now_ms
        self._preemptions.append(
            Preemption(
                decision_id=cause.decision_id,
                policy=self.policy.identity,
                victim=request_id,
                client_id=view.request.client_id,
                epoch=suspended.epoch,
                reason=cause.reason,
                mode=mode,
                is_fallback=is_fallback,
                requester=cause.requester,
                wanted_rows=cause.wanted_rows,
                available_rows=cause.available_rows,
                candidates=cause.candidates,
                scores=cause.scores,
                tie_break=self.policy.victim_tie_break if cause.reason is PreemptionReason.NO_CELLS else "",
                released_rows=view.computed - kept,
                kept_rows=kept,
                freed_cells=freed,
                suspensions=view.epoch,
                note=cause.note,
            )
        )
        self._record.note_preemption(self._preemptions[-1], freed_bytes=memory.bytes_of(freed))
        self._observe("preempted", suspended, now_ms)
        if kept:
            self._resume(suspended, kept, now_ms)

    def _end(self, view: SessionView, reason: FinishReason, now_ms: float, *, error: str = "") -> None:
        if view.request_id in self.memory.residences:
            self.memory.retire(view.request_id)
        self._failures.pop(view.request_id, None)
        self._suspended_ms.pop(view.request_id, None)
        self._has_ended = True
        self.table.apply_end(view.request_id, reason, error)
        event = {FinishReason.CANCELLED: "cancelled", FinishReason.FAILED: "failed"}.get(reason, "finished")
        self._observe(event, view, now_ms)

    def _apply_pending(self) -> None:
        pending = self.memory.take_pending()
        if any(pending):
            self.engine.apply(pending)

    def _observe(self, event: str, view: SessionView, now_ms: float, amount: int = 0) -> None:
        """Tell the policy. What it raises is reported at the end of the step, when the books are whole."""
        try:
            self.policy_memory = self.policy.observe(self.policy_memory, event, view, now_ms, amount)
        except Exception as error:
            self._policy_failure = self._policy_failure or self._failure_of_policy(error)

    def _raise_policy_failure(self) -> None:
        failure, self._policy_failure = self._policy_failure, None
        if failure is not None:
            raise failure from failure.__cause__

    def _failure_of_policy(self, error: Exception) -> PolicyFailure:
        name = self.policy.identity.policy_id
        failure = PolicyFailure(f"policy {name} raised {type(error).__name__}: {error}")
        failure.__cause__ = error
        return failure


class _PolicyAsked:
    """Whatever a policy raises in this context becomes a ``PolicyFailure``. It has no state: one serves every
    step, and contexts within contexts.
    """

    __slots__ = ("_failure_of",)

    def __init__(self, failure_of: Callable[[Exception], PolicyFailure]) -> None:
        self._failure_of = failure_of

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Exception) and not isinstance(error, SchedulerFailure):
            raise self._failure_of(error) from error


def _rows_after(plan: records.IterationPlan, before: dict[str, int]) -> dict[str, int]:
    """Rows to come when a plan has run."""
    after = dict(before)
    for chunk in plan.chunks:
        after[chunk.request_id] = max(after[chunk.request_id] - (chunk.stop - chunk.start), 0)
    return after
