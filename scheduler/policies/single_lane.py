"""``single_lane``: one request at a time behind a lock."""

from __future__ import annotations

from collections.abc import Iterable

from scheduler.policy.base import PlanBuilder, Policy
from scheduler.policy.contract import CELLS, HIDDEN_LENGTH, TOKENS, Contract
from scheduler.policy.state import SchedulerState
from scheduler.records import IterationPlan, PolicyIdentity, SessionView


class SingleLane(Policy):
    """The engine that the reference scheduler replaces: a session has the pool to itself until it ends."""

    identity = PolicyIdentity("single_lane")
    contract = Contract(
        scheduling_unit="a whole request",
        protected_identity="the one request that holds the lane",
        visible_state=("submission order", "whether the lane is taken"),
        decision="who gets the lane next",
        unknown_future=HIDDEN_LENGTH + ": everybody waits for it",
        objective="none: the old engine, for comparison at the cutover gate",
        metric="order of first admission",
        denominator="admitted sessions",
        assumptions=("one session at most is resident",),
        foreign_owners=(CELLS, TOKENS),
        not_reproduced=("locks and threads of the old engine",),
        starvation_free=True,
        progress="everybody, one after the other",
        source="the design issue's cutover gate",
    )

    def plan_iteration(self, state: SchedulerState) -> IterationPlan:
        plan = PlanBuilder(state, self)
        views = state.views
        if state.running:
            self.fill(plan, (views[request_id] for request_id in state.running))
            return plan.build()
        self.fill(plan, sorted((views[r] for r in state.suspended), key=lambda view: view.index))
        if not state.suspended:
            self.fill(plan, plan.while_open(self.waiting_order(state)))
        return plan.build()

    def fill(self, plan: PlanBuilder, views: Iterable[SessionView]) -> None:
        for view in views:
            super().fill(plan, (view,))
            if plan.entered:
                plan.closed = True
                return
