"""``vllm_fcfs``: frontier catch-up over a running queue, then a waiting queue (shaped like vLLM v0.23.0)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from scheduler.limits import StepLimits
from scheduler.policy.base import PlanBuilder, Policy
from scheduler.policy.contract import CELLS, HIDDEN_LENGTH, READINESS, TOKENS, Contract
from scheduler.policy.overload import QUEUE, Overload
from scheduler.policy.state import SchedulerState
from scheduler.records import IterationPlan, PolicyIdentity, SessionState, SessionView


@dataclass(frozen=True, slots=True)
class QueueMemory:
    """When each session entered the running queue, or was put back at the front of the waiting one."""

    clock: int = 0
    stamps: Mapping[str, int] = field(default_factory=dict)


class VllmFcfs(Policy):
    """Running sessions in queue order catch up to their frontier, clamped by
    ``long_prefill_threshold`` and the budget.

    No phases. Waiting sessions follow only if no running one lacks rows; each needs room for its next chunk
    only. On a failed allocation the tail of the running queue is preempted, at the worst the requester
    itself, which ends the step's running pass.
    """

    identity = PolicyIdentity("vllm_fcfs")
    contract = Contract(
        scheduling_unit="rows that bring a request's computed count to its target frontier",
        protected_identity="request, in order of the running queue",
        visible_state=("computed and target counts", "order of both queues", "available rows", "readiness"),
        decision="rows of each running request, then of waiting ones; whom to preempt",
        unknown_future=HIDDEN_LENGTH + ": nothing is reserved beyond the next chunk",
        objective="keep the engine full; recompute when the optimism was wrong",
        metric="preempted sessions and recomputed rows",
        denominator="steps",
        assumptions=("recompute is exact", "the head of the running queue fits alone"),
        foreign_owners=(CELLS, TOKENS, READINESS),
        not_reproduced=(
            "blocks, connectors, encoder and LoRA budgets",
            "speculative tokens and output placeholders",
            "the async scheduler",
            "full-input reservation and other optional controls",
        ),
        starvation_free=False,
        progress="nobody preempts the head of the running queue; others starve while it lacks rows",
        source="vLLM v0.23.0, Scheduler.schedule; M5.2 0x0D",
    )

    def __init__(self, *, long_prefill_threshold: int = 0, overload: Overload = QUEUE) -> None:
        super().__init__(overload=overload)
        if long_prefill_threshold < 0:
            raise ValueError(f"long_prefill_threshold {long_prefill_threshold}: must not be negative")
        self.long_prefill_threshold = long_prefill_threshold

    def check_limits(self, steps: StepLimits, *, max_session_tokens: int) -> None:
        """As vLLM's ``SchedulerConfig`` checks its fields against each other."""
        if steps.max_num_batched_tokens < steps.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens {steps.max_num_batched_tokens} is below "
                f"max_num_seqs {steps.max_num_seqs}"
            )
        if self.long_prefill_threshold > max_session_tokens:
            raise ValueError(
                f"long_prefill_threshold {self.long_prefill_threshold} is above the "
                f"{max_session_tokens} tokens that a session can have"
            )

    # -- memory: order of the queues

    def start(self) -> QueueMemory:
        return QueueMemory()

    def observe(
        self, memory: QueueMemory, event: str, view: SessionView, now_ms: float, amount: int = 0
    ) -> Any:
        if event in ("admitted", "resumed", "preempted"):
            stamps = {**memory.stamps, view.request_id: memory.clock}
            return QueueMemory(memory.clock + 1, stamps)
        if event in ("finished", "cancelled", "failed") and view.request_id in memory.stamps:
            return replace(memory, stamps={r: n for r, n in memory.stamps.items() if r != view.request_id})
        return memory

    # -- order

    def order_key(self, state: SchedulerState, view: SessionView) -> tuple:
        if view.state is SessionState.RUNNING:
            return (0, state.policy_memory.stamps[view.request_id], 0)
        return (1, *self.queue_key(state, view))

    def queue_key(self, state: SchedulerState, view: SessionView) -> tuple:
        """Place in the waiting queue: preempted sessions were put in front, the last one first."""
        if view.state is SessionState.SUSPENDED:
            return (0, -state.policy_memory.stamps[view.request_id])
        return (1, view.index)

    victim_tie_break = "none needed: stamps of the running queue differ"

    def victim_key(self, state: SchedulerState, view: SessionView) -> tuple:
        return (state.policy_memory.stamps[view.request_id],)

    def choose_victim(self, state: SchedulerState, requester: SessionView) -> str | None:
        return max(state.running, key=lambda name: self.victim_key(state, state.views[name]))

    def unwind(self, plan: IterationPlan, blocked: int, victim: str | None) -> list[str]:
        requester = plan.chunks[blocked].request_id
        if victim == requester:
            return [chunk.request_id for chunk in plan.chunks[blocked:]]
        return super().unwind(plan, blocked, victim)

    # -- batching

    @property
    def reserves_whole_need(self) -> bool:
        return False

    def future_rows(self, state: SchedulerState, view: SessionView) -> int:
        return 0

    def reserved_rows(self, state: SchedulerState, plan: PlanBuilder) -> int:
        return plan.planned_rows(state.memory)

    def chunk_tokens(self, state: SchedulerState, view: SessionView, available: int) -> int:
        if self.long_prefill_threshold > 0:
            return min(available, self.long_prefill_threshold)
        return available

    def plan_iteration(self, state: SchedulerState) -> IterationPlan:
        plan = PlanBuilder(state, self)
        self.fill(
            plan, sorted((state.views[r] for r in state.running), key=lambda v: self.order_key(state, v))
        )
        if plan.lacks_cells:
            return plan.build()  # somebody will be preempted: no waiting pass
        queue = [state.views[r] for r in (*state.suspended, *state.waiting)]
        for view in sorted(queue, key=lambda v: self.order_key(state, v)):
            reason = self.rejects(state, view) if view.state is SessionState.WAITING else None
            if reason is not None:
                plan.reject(view, reason)
                continue
            cached = plan.cached_tokens(view)
            available = min(plan.tokens_left, state.max_chunk_tokens)
            rows = min(view.limit_at(cached) - cached, self.chunk_tokens(state, view, available))
            if not plan.enter(view, future_rows=cached + rows) and not self.keeps_scanning(state, view):
                break
        return plan.build()
