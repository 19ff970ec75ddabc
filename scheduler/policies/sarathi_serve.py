"""``sarathi_serve``: stall-free batches under a token budget (Sarathi-Serve, OSDI 2024, Algorithm 3)."""

from __future__ import annotations

from typing import Any

from scheduler.policy.base import PlanBuilder, Policy
from scheduler.policy.contract import CELLS, FORECAST, HIDDEN_LENGTH, TOKENS, Contract
from scheduler.policy.state import SchedulerState
from scheduler.records import IterationPlan, Phase, PolicyIdentity


class SarathiServe(Policy):
    """All running decodes, then partial prefills within ``tau - n_t``, then new sessions within what is left.

    ``tau`` is the token budget profiled under the TBT objective; default and upper
    bound is the step's own budget.
    """

    identity = PolicyIdentity("sarathi_serve")
    contract = Contract(
        scheduling_unit="one step under the profiled token budget tau",
        protected_identity="ongoing decodes",
        visible_state=("counts of each session", "tau", "available rows and sequences"),
        decision="decodes, then the partial prefill, then admissions",
        unknown_future=f"{HIDDEN_LENGTH}: {FORECAST}",
        objective="no decode waits behind a prefill",
        metric="steps in which a ready decode was left out while a prefill ran",
        denominator="steps with a ready decode",
        assumptions=("tau was profiled for the TBT objective", "tau exceeds the number of running decodes"),
        foreign_owners=(CELLS, TOKENS),
        not_reproduced=("the profiling of tau", "the paper's latency under pipeline parallelism"),
        starvation_free=True,
        progress="everybody; when running decodes alone exhaust tau, prefills wait until one ends",
        source="Sarathi-Serve, Algorithm 3; M5.2 0x09",
    )

    def __init__(self, *, tau: int | None = None, **seams: Any) -> None:
        super().__init__(**seams)
        if tau is not None and tau < 1:
            raise ValueError(f"token budget tau of {tau}: must be at least 1")
        self.tau = tau

    def plan_iteration(self, state: SchedulerState) -> IterationPlan:
        plan = PlanBuilder(state, self)
        if self.tau is not None:
            plan.tokens_left = min(plan.tokens_left, self.tau)
        unused = state.max_num_batched_tokens - plan.tokens_left
        running = sorted((state.views[r] for r in state.running), key=lambda view: view.index)
        self.fill(plan, (view for view in running if view.phase is Phase.DECODE))
        self.fill(plan, (view for view in running if view.phase is not Phase.DECODE))
        self.fill(plan, sorted((state.views[r] for r in state.suspended), key=lambda view: view.index))
        if not plan.closed:
            self.fill(plan, plan.while_open(self.waiting_order(state)))
        plan.tokens_left += unused  # the ledger counts what was planned, tau only bounds it
        return plan.build()
