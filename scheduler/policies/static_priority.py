"""``static_priority``: phase, then priority, then arrival; the order of the mixed
step, and aging's counterexample.
"""

from __future__ import annotations

from scheduler.policy.base import PlanBuilder, Policy
from scheduler.policy.contract import CELLS, FORECAST, HIDDEN_LENGTH, READINESS, TOKENS, Contract
from scheduler.policy.state import SchedulerState
from scheduler.records import IterationPlan, Phase, PolicyIdentity, SessionState, SessionView


class StaticPriority(Policy):
    """Ready decodes before ready prefills, then ``(priority, arrival, request id,
    generation)``; low numbers first.
    """

    identity = PolicyIdentity("static_priority")
    contract = Contract(
        scheduling_unit="one step: a chunk per session under a token and a sequence budget",
        protected_identity="priority class",
        visible_state=("phase", "declared priority", "arrival", "readiness"),
        decision="who runs which interval, in key order",
        unknown_future=f"{HIDDEN_LENGTH}: {FORECAST}",
        objective="a favoured session is never behind a less favoured one of its phase",
        metric="order of the plan's chunks",
        denominator="chunks of the plan",
        assumptions=("lower numbers are favoured",),
        foreign_owners=(CELLS, TOKENS, READINESS),
        not_reproduced=(),
        starvation_free=False,
        progress="a low priority starves for as long as a higher one arrives every step: see aging",
        source="M5.2 0x01A, mixed iteration, and 0x09A, static priority",
    )

    def order_key(self, state: SchedulerState, view: SessionView) -> tuple:
        request = view.request
        decodes = view.state is SessionState.RUNNING and view.phase is Phase.DECODE
        return (
            0 if decodes else 1,
            self.priority(state, view),
            request.arrival_ms,
            request.request_id,
            request.generation,
        )

    def priority(self, state: SchedulerState, view: SessionView) -> int:
        """The priority that counts now; lower numbers first."""
        return view.request.priority

    def plan_iteration(self, state: SchedulerState) -> IterationPlan:
        plan = PlanBuilder(state, self)
        self.fill(plan, sorted(state.views.values(), key=lambda view: self.order_key(state, view)))
        return plan.build()

    victim_tie_break = "later arrival, then later submission"

    def victim_key(self, state: SchedulerState, view: SessionView) -> tuple:
        return (self.priority(state, view), view.request.arrival_ms, view.index)
