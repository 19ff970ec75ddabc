"""``fixed_batch``: the baseline that iteration-level scheduling replaced."""

from __future__ import annotations

from collections.abc import Iterable

from scheduler.policy.base import PlanBuilder, Policy
from scheduler.policy.contract import CELLS, HIDDEN_LENGTH, TOKENS, Contract
from scheduler.policy.state import SchedulerState
from scheduler.records import IterationPlan, PolicyIdentity, SessionView


class FixedBatch(Policy):
    """A cohort is formed when nobody runs; nobody joins it until its longest member has finished.

    Idle work of a cohort of B slots: ``B * max(G) - sum(G)`` slot-iterations.
    """

    identity = PolicyIdentity("fixed_batch")
    contract = Contract(
        scheduling_unit="a cohort of requests, frozen until the longest has finished",
        protected_identity="cohort",
        visible_state=("counts of each session", "available rows and sequences", "submission order"),
        decision="who forms the next cohort, once the last one is gone",
        unknown_future=HIDDEN_LENGTH + ": the cohort lasts as long as its longest member turns out to be",
        objective="none: the baseline against which refill is shown",
        metric="useful slot-iterations",
        denominator="slots times iterations of the whole replay",
        assumptions=("every member's declared maximum fits beside the others'",),
        foreign_owners=(CELLS, TOKENS),
        not_reproduced=(
            "padding to a rectangle",
            "returning all answers together: each is returned when it is done",
        ),
        starvation_free=True,
        progress="everybody: cohorts are formed in submission order",
        source="M5.2 0x02, static batching",
    )

    def plan_iteration(self, state: SchedulerState) -> IterationPlan:
        plan = PlanBuilder(state, self)
        views = state.views
        self.fill(plan, self._in_order(state, state.running))
        self.fill(plan, self._in_order(state, state.suspended))
        if not state.running and not state.suspended:
            self.fill(plan, (views[request_id] for request_id in state.waiting))
        return plan.build()

    def _in_order(self, state: SchedulerState, request_ids: Iterable[str]) -> list[SessionView]:
        return sorted((state.views[r] for r in request_ids), key=lambda view: self.order_key(state, view))
