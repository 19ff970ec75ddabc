"""``sarathi``: one prefill chunk as anchor, decodes piggyback (SARATHI, 2023)."""

from __future__ import annotations

from typing import Any

from scheduler.policy.base import PlanBuilder, Policy
from scheduler.policy.contract import CELLS, FORECAST, HIDDEN_LENGTH, TOKENS, Contract
from scheduler.policy.state import SchedulerState
from scheduler.records import IterationPlan, Phase, PolicyIdentity, SessionState, SessionView


class Sarathi(Policy):
    """Decode-maximal batching. With C = ``chunk_tokens``, S prompt rows left, D ready decodes:

    ``min(D, max(B_tok - min(C, S), 0), max(B_seq - 1, 0))`` decodes ride with the one chunk of a step.
    """

    identity = PolicyIdentity("sarathi")
    contract = Contract(
        scheduling_unit="one prefill chunk and the decodes that ride with it",
        protected_identity="none: the shape of the batch is the object",
        visible_state=("counts of each session", "chunk size", "token and sequence budgets"),
        decision="the anchor chunk, then which decodes fill the rest",
        unknown_future=f"{HIDDEN_LENGTH}: {FORECAST}",
        objective="every chunk carries decodes, every decode rides with a chunk while prompts last",
        metric="piggybacked decodes",
        denominator="ready decodes of the steps that had a chunk",
        assumptions=("the chunk size was profiled by whoever configures it",),
        foreign_owners=(CELLS, TOKENS),
        not_reproduced=(
            "tile-aligned chunk sizes",
            "the paper's B = (M_G - M_S) / (L_max m_kv)",
            "offline batches",
        ),
        starvation_free=False,
        progress="a chunk that fills the budget starves decodes while prompts keep coming",
        source="SARATHI; M5.2 0x09",
    )

    def __init__(self, *, chunk_tokens: int = 256, **seams: Any) -> None:
        super().__init__(**seams)
        if chunk_tokens < 1:
            raise ValueError(f"chunk of {chunk_tokens} tokens: must be at least 1")
        self.chunk = chunk_tokens

    def order_key(self, state: SchedulerState, view: SessionView) -> tuple:
        if view.state is SessionState.RUNNING and view.phase is Phase.DECODE:
            return (1, view.index)
        return (0, view.index)

    def chunk_tokens(self, state: SchedulerState, view: SessionView, available: int) -> int:
        return min(available, self.chunk)

    def plan_iteration(self, state: SchedulerState) -> IterationPlan:
        plan = PlanBuilder(state, self)
        running = sorted((state.views[r] for r in state.running), key=lambda view: view.index)
        partial = [view for view in running if view.phase is not Phase.DECODE and view.ready]
        if not any(plan.add(view) for view in partial[:1]):
            self._admit_anchor(plan, state)
        self.fill(plan, (view for view in running if view.phase is Phase.DECODE))
        return plan.build()

    def _admit_anchor(self, plan: PlanBuilder, state: SchedulerState) -> None:
        suspended = sorted((state.views[r] for r in state.suspended), key=lambda view: view.index)
        for queue in (suspended, self.waiting_order(state)):
            for view in queue:
                self.fill(plan, (view,))
                if plan.entered or plan.closed:
                    return
