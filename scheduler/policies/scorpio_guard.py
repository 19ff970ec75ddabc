"""``scorpio_guard``: deadline order with a TTFT guard and a TPOT guard (shaped like SCORPIO)."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from scheduler.policy.base import PlanBuilder, Policy
from scheduler.policy.contract import CELLS, FORECAST, HIDDEN_LENGTH, TOKENS, Contract
from scheduler.policy.cost import ExclusiveCost, deadline_ms, why_infeasible
from scheduler.policy.state import SchedulerState
from scheduler.records import IterationPlan, Phase, PolicyIdentity, SessionState, SessionView

Credits = Mapping[str, Fraction]


class ScorpioGuard(Policy):
    """TTFT guard: waiting sessions by deadline, the infeasible ones rejected. TPOT guard: a virtual batch
    size bounds admission, credits bound the batch.

    A session whose TBT limit is k times the tightest running one counts 1/k in the virtual batch size and
    decodes in one step of k on average: its mean time per output token is its limit when a step takes the
    tightest one, and a single gap is less than one step longer. A session enters only while ``step_ms(size) =
    base_ms + ms_per_session * size`` stays within the tightest limit; a session alone always enters.
    """

    identity = PolicyIdentity("scorpio_guard")
    contract = Contract(
        scheduling_unit="one step: due decodes, then prefills by deadline",
        protected_identity="deadline of a request",
        visible_state=("arrival", "declared TTFT and TBT", "uncomputed rows", "cost model", "credits"),
        decision="who is rejected, who enters, which decodes are due",
        unknown_future=f"{HIDDEN_LENGTH}: {FORECAST}",
        objective="requests that meet both objectives",
        metric="requests that met every declared objective",
        denominator="offered requests",
        assumptions=(
            "the step time is base_ms + ms_per_session * virtual batch size",
            "declared limits are true",
            "a TBT limit bounds the mean over a session's outputs, not every gap",
        ),
        foreign_owners=(CELLS, TOKENS),
        not_reproduced=("the length predictor", "the paper's analytic model of step time and its guarantees"),
        starvation_free=False,
        progress="the tightest ready session decodes in every step; rejected requests end with their numbers",
        source="SCORPIO, TTFT guard and TPOT guard; M5.2 0x07",
    )

    def __init__(
        self,
        *,
        tick_ms: float = 10.0,
        tokens_per_tick: int = 2048,
        base_ms: float = 0.0,
        ms_per_session: float = 0.0,
        **seams: Any,
    ) -> None:
        super().__init__(**seams)
        self.cost = ExclusiveCost(tick_ms, tokens_per_tick)
        self.base_ms, self.ms_per_session = base_ms, ms_per_session

    # -- TTFT guard

    def rejects(self, state: SchedulerState, view: SessionView) -> str | None:
        late = why_infeasible(view, state.now_ms, self.cost, state.memory.cached_tokens(view))
        return super().rejects(state, view) if late is None else late

    def order_key(self, state: SchedulerState, view: SessionView) -> tuple:
        running = view.state is SessionState.RUNNING
        return (not running, running and view.phase is not Phase.DECODE, deadline_ms(view), view.index)

    # -- TPOT guard

    def start(self) -> Credits:
        return {}

    def planned(self, state: SchedulerState, plan: IterationPlan) -> Any:
        """Each ready decode gains its share of a step and pays one when it runs; what it still has then
        carries over, at most one step's worth. A decode that is not left is gone.
        """
        tightest, chosen = self._tightest(state), [chunk.request_id for chunk in plan.chunks]
        return {
            view.request_id: min(
                self._credit(state, view, tightest) - (view.request_id in chosen), Fraction(1)
            )
            for view in self._decodes(state)
        }

    def _decodes(self, state: SchedulerState) -> list[SessionView]:
        running = map(state.views.__getitem__, state.running)
        return [view for view in running if view.ready and view.phase is Phase.DECODE]

    def _tightest(self, state: SchedulerState) -> float | None:
        return min(
            (view.request.slo.tbt_ms for view in self._decodes(state) if view.request.slo.tbt_ms is not None),
            default=None,
        )

    def _credit(self, state: SchedulerState, view: SessionView, tightest: float | None) -> Fraction:
        return state.policy_memory.get(view.request_id, Fraction(0)) + share(view, tightest)

    def _admissible(self, state: SchedulerState, view: SessionView, entered: list[SessionView]) -> bool:
        """Whether the virtual batch with ``view`` keeps the tightest limit of all its members."""
        batch = [*map(state.views.__getitem__, state.running), *entered, view]
        limits = [v.request.slo.tbt_ms for v in batch if v.request.slo.tbt_ms is not None]
        if len(batch) == 1 or not limits:
            return True
        size = sum(share(v, min(limits)) for v in batch)
        return self.base_ms + self.ms_per_session * float(size) <= min(limits)

    def plan_iteration(self, state: SchedulerState) -> IterationPlan:
        plan = PlanBuilder(state, self)
        tightest = self._tightest(state)
        for view in sorted(
            map(state.views.__getitem__, state.running), key=lambda v: self.order_key(state, v)
        ):
            if view.phase is not Phase.DECODE or self._credit(state, view, tightest) >= 1:
                plan.add(view)
        queue = map(state.views.__getitem__, (*state.suspended, *state.waiting))
        for view in sorted(queue, key=lambda v: self.order_key(state, v)):
            if plan.closed or self._admissible(state, view, plan.entered):
                self.fill(plan, (view,))
            else:
                plan.closed = True
        return plan.build()


def share(view: SessionView, tightest: float | None) -> Fraction:
    """Part of all steps in which a session must decode: the tightest limit over its own, at most 1."""
    own = view.request.slo.tbt_ms
    if own is None or tightest is None or own <= tightest:
        return Fraction(1)
    return Fraction(tightest) / Fraction(own)
