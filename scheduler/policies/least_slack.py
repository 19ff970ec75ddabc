"""``least_slack``: the smallest predicted slack first."""

from __future__ import annotations

from typing import Any

from scheduler.policy.base import PlanBuilder, Policy
from scheduler.policy.contract import CELLS, HIDDEN_LENGTH, TOKENS, Contract
from scheduler.policy.cost import ExclusiveCost, slack_ms
from scheduler.policy.state import SchedulerState
from scheduler.records import IterationPlan, PolicyIdentity, SessionState, SessionView


class LeastSlack(Policy):
    """Sessions of all phases by predicted slack; ties: next tokens first, then arrival, then request id."""

    identity = PolicyIdentity("least_slack")
    contract = Contract(
        scheduling_unit="the next emission of a session",
        protected_identity="deadline of a request's next emission",
        visible_state=(
            "arrival",
            "previous emission",
            "declared TTFT and TBT",
            "uncomputed rows",
            "cost model",
        ),
        decision="who runs in this step, in order of slack",
        unknown_future=HIDDEN_LENGTH + ", queue contention and batch effects: the cost model ignores them",
        objective="meet first-token and next-token deadlines",
        metric="requests that met every declared objective",
        denominator="offered requests",
        assumptions=(
            "the cost model is a lower bound of the engine's time",
            "clocks start at arrival and at the previous emission and are never restarted",
        ),
        foreign_owners=(CELLS, TOKENS),
        not_reproduced=("a calibrated predictor",),
        starvation_free=False,
        progress="looser deadlines starve while tighter ones keep coming; no fairness",
        source="M5.2 0x07",
    )

    def __init__(self, *, tick_ms: float = 10.0, tokens_per_tick: int = 2048, **seams: Any) -> None:
        super().__init__(**seams)
        self.cost = ExclusiveCost(tick_ms, tokens_per_tick)

    def order_key(self, state: SchedulerState, view: SessionView) -> tuple:
        cached = 0 if view.state is SessionState.RUNNING else state.memory.cached_tokens(view)
        return (
            slack_ms(view, state.now_ms, self.cost, cached),
            view.emitted == 0,
            view.request.arrival_ms,
            view.request_id,
        )

    def plan_iteration(self, state: SchedulerState) -> IterationPlan:
        plan = PlanBuilder(state, self)
        self.fill(plan, sorted(state.views.values(), key=lambda view: self.order_key(state, view)))
        return plan.build()
