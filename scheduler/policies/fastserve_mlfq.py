"""``fastserve_mlfq``: skip-join multi-level feedback queue (FastServe, Algorithm 1)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from scheduler.policy.base import PlanBuilder, Policy
from scheduler.policy.contract import CELLS, HIDDEN_LENGTH, TOKENS, Contract
from scheduler.policy.state import SchedulerState
from scheduler.records import IterationPlan, PolicyIdentity, SessionView


@dataclass(frozen=True, slots=True)
class Job:
    """Place of one session: its queue, rows used of that queue's quantum, and since when it waits.

    ``done`` and ``rebuilt`` count rows since it last entered. Until it has completed as many as it computed
    again it is nobody's victim: so all rebuilds together are at most twice the work.
    """

    level: int
    used: int
    stamp: int
    since_ms: float
    done: int = 0
    rebuilt: int = 0

    @property
    def may_be_preempted(self) -> bool:
        return self.done > 0 and self.done >= self.rebuilt


@dataclass(frozen=True, slots=True)
class Queues:
    """All jobs; ``clock`` stamps each push, so that a queue is served in order of arrival in it."""

    clock: int = 0
    jobs: Mapping[str, Job] = field(default_factory=dict)

    def push(self, request_id: str, job: Job) -> Queues:
        return Queues(self.clock + 1, {**self.jobs, request_id: replace(job, stamp=self.clock)})

    def put(self, request_id: str, job: Job) -> Queues:
        return Queues(self.clock, {**self.jobs, request_id: job})


class FastserveMlfq(Policy):
    """Quanta ``quantum_rows * 2**level`` in completed rows. Skip-join, demotion,
    promotion after ``promote_after_ms``.

    A new job joins the first queue whose quantum covers its first step; a depleted one falls to the first
    lower queue whose quantum covers its next step; one that waited too long goes to the first queue. A
    waiting job that finds no room takes the place of a running one of a lower queue, one a step.
    """

    identity = PolicyIdentity("fastserve_mlfq")
    contract = Contract(
        scheduling_unit="one step of each selected job",
        protected_identity="job: no client shares",
        visible_state=("queue and used quantum of each job", "cost of its next step in rows", "waiting time"),
        decision="the batch, from the first queue down; whom to preempt",
        unknown_future=HIDDEN_LENGTH + ": only used quantum tells long jobs from short ones",
        objective="short jobs are not stuck behind long ones",
        metric="completion time of jobs",
        denominator="completed jobs",
        assumptions=("the cost of a step is its rows", "a job may be suspended between steps"),
        foreign_owners=(CELLS, TOKENS, "where a preempted job's rows go: here they are recomputed"),
        not_reproduced=(
            "proactive swapping of K/V",
            "profiled step times",
            "the paper's latency figures",
            "any bound on weighted service between clients",
        ),
        starvation_free=True,
        progress="every job: promotion after promote_after_ms, no preemption before work was done",
        source="FastServe, Algorithm 1; M5.2 0x09A",
    )

    def __init__(
        self,
        *,
        quantum_rows: int = 16,
        levels: int = 6,
        promote_after_ms: float = 300.0,
        max_batch: int | None = None,
        **seams: Any,
    ) -> None:
        super().__init__(**seams)
        if (
            quantum_rows < 1
            or levels < 1
            or not promote_after_ms > 0
            or (max_batch is not None and max_batch < 1)
        ):
            raise ValueError(
                f"queues out of range: {quantum_rows}, {levels}, {promote_after_ms}, {max_batch}"
            )
        self.quanta = tuple(quantum_rows * 2**level for level in range(levels))
        self.promote_after_ms, self.max_batch = promote_after_ms, max_batch

    # -- queues

    def start(self) -> Queues:
        return Queues()

    def observe(self, memory: Queues, event: str, view: SessionView, now_ms: float, amount: int = 0) -> Any:
        request_id = view.request_id
        if event == "submitted":
            return memory.push(request_id, Job(self._covering(view.num_prompt_tokens, 0), 0, 0, now_ms))
        job = memory.jobs[request_id]
        if event in ("finished", "cancelled", "failed"):
            return replace(memory, jobs={r: j for r, j in memory.jobs.items() if r != request_id})
        if event in ("admitted", "resumed", "preempted"):
            return memory.put(request_id, replace(job, done=0, rebuilt=0))
        if event == "rebuilt":
            return memory.put(request_id, replace(job, since_ms=now_ms, rebuilt=job.rebuilt + amount))
        if event in ("prefilled", "decoded"):
            job = replace(job, used=job.used + amount, since_ms=now_ms, done=job.done + amount)
            if job.used >= self.quanta[job.level]:
                next_rows = max(view.num_prompt_tokens - view.computed, 1)
                return memory.push(
                    request_id, replace(job, level=self._covering(next_rows, job.level + 1), used=0)
                )
            return memory.put(request_id, job)
        return memory

    def _covering(self, rows: int, first: int) -> int:
        last = len(self.quanta) - 1
        return next((level for level in range(min(first, last), last) if self.quanta[level] >= rows), last)

    def planned(self, state: SchedulerState, plan: IterationPlan) -> Any:
        memory = state.policy_memory
        for request_id, job in memory.jobs.items():
            if self._is_promoted(state, job):
                memory = memory.push(request_id, replace(job, level=0, used=0, since_ms=state.now_ms))
        return memory

    def _is_promoted(self, state: SchedulerState, job: Job) -> bool:
        return job.level > 0 and state.now_ms - job.since_ms >= self.promote_after_ms

    # -- the plan

    def order_key(self, state: SchedulerState, view: SessionView) -> tuple:
        job = state.policy_memory.jobs[view.request_id]
        if self._is_promoted(state, job):
            return (0, 1, job.stamp)
        return (job.level, 0, job.stamp)

    def plan_iteration(self, state: SchedulerState) -> IterationPlan:
        plan = PlanBuilder(state, self)
        if self.max_batch is not None:
            plan.seqs_left = min(plan.seqs_left, self.max_batch)
        victim: SessionView | None = None
        for view in sorted(state.views.values(), key=lambda view: self.order_key(state, view)):
            if view is victim:
                continue
            was_closed = plan.closed
            self.fill(plan, (view,))
            if plan.closed and not was_closed and plan.tokens_left and plan.seqs_left:
                victim = self._lower_than(state, view)
                if victim is not None:
                    plan.preempt(victim, f"{view.request_id} is in a higher queue")
        return plan.build()

    def _lower_than(self, state: SchedulerState, view: SessionView) -> SessionView | None:
        """The last running job of a lower queue that completed work since it entered."""
        jobs = state.policy_memory.jobs
        level = self.order_key(state, view)[0]
        lower = [
            state.views[r]
            for r in state.running
            if jobs[r].may_be_preempted and self.order_key(state, state.views[r])[0] > level
        ]
        return max(lower, key=lambda v: self.order_key(state, v), default=None)

    victim_tie_break = "none needed: stamps of the queues differ"

    def victim_key(self, state: SchedulerState, view: SessionView) -> tuple:
        return self.order_key(state, view)
