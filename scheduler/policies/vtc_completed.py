"""``vtc_completed``: least weighted service with charges settled from completed
results; not Algorithm 2, no theorem.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from scheduler.policies.vtc import Counters, Vtc
from scheduler.policy.contract import CELLS, HIDDEN_LENGTH, TOKENS, Contract
from scheduler.policy.state import SchedulerState
from scheduler.records import PolicyIdentity, SessionView


class VtcCompleted(Vtc):
    """``counters`` select and hold provisional charges; ``done`` holds completed service alone.

    Entering charges the prompt rows to be computed; completed rows settle the charge; a preemption, a failure
    or an end takes back what was not completed.
    """

    identity = PolicyIdentity("vtc_completed")
    contract = Contract(
        scheduling_unit="one step; the choice is which client's request enters",
        protected_identity="client",
        visible_state=(
            "provisional and completed counters",
            "clients with waiting requests",
            "uncached prompt rows",
        ),
        decision="whose request enters next",
        unknown_future=HIDDEN_LENGTH + ", and whether planned work completes",
        objective="equal completed weighted service; failed work is nobody's service",
        metric="w_p * completed input rows + w_q * output tokens by client",
        denominator="the interval in which both clients are continuously backlogged",
        assumptions=("results are settled before the next decision",),
        foreign_owners=(CELLS, TOKENS),
        not_reproduced=(
            "VTC: charging event and running-batch semantics differ, so its theorem does not transfer",
        ),
        starvation_free=True,
        progress="every client with waiting requests, as long as its work completes",
        source="M5.2 0x09A, completion_reconciled_vtc_teaching_v1",
    )

    def observe(self, memory: Counters, event: str, view: SessionView, now_ms: float, amount: int = 0) -> Any:
        client, request_id = view.request.client_id, view.request_id
        if event in ("admitted", "resumed"):
            memory = memory.left(client) if event == "admitted" else memory
            rows = (
                max(view.num_prompt_tokens - max(view.committed, view.cached), 0) if view.emitted == 0 else 0
            )
            predicted = self.input_weight * rows
            return replace(
                memory.charge(client, predicted), charged={**memory.charged, request_id: predicted}
            )
        if event == "prefilled":
            actual = self.input_weight * amount
            left = memory.charged.get(request_id, 0) - actual
            return replace(
                self._complete(memory, client, actual), charged={**memory.charged, request_id: left}
            )
        if event == "emitted":
            return self._complete(memory.charge(client, self.output_weight), client, self.output_weight)
        if event in ("preempted", "finished", "cancelled", "failed") and request_id in memory.charged:
            rest = {key: value for key, value in memory.charged.items() if key != request_id}
            memory = replace(memory.charge(client, -memory.charged[request_id]), charged=rest)
        return super().observe(memory, event, view, now_ms, amount)

    def _complete(self, memory: Counters, client: str, amount: int) -> Counters:
        return replace(memory, done={**memory.done, client: memory.done.get(client, 0) + amount})

    def published_service(self, memory: Counters) -> dict[str, int]:
        return dict(memory.done)

    def entry_charge(self, state: SchedulerState, view: SessionView) -> int:
        return self.input_weight * (view.num_prompt_tokens - state.memory.cached_tokens(view))
