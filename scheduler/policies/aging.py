"""``aging``: ``p_base - floor((t - arrival) / q_age)``."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from scheduler.policies.static_priority import StaticPriority
from scheduler.policy.state import SchedulerState
from scheduler.records import PolicyIdentity, SessionView


class Aging(StaticPriority):
    """A priority improves by one for every ``quantum_ms`` since arrival; no clock
    restarts at admission or resume.
    """

    identity = PolicyIdentity("aging")
    contract = replace(
        StaticPriority.contract,
        protected_identity="request, by effective priority",
        visible_state=("phase", "declared priority", "arrival", "now", "readiness"),
        objective="an old session passes younger ones of better priority in the end",
        metric="effective priority",
        denominator="sessions of one plan",
        assumptions=("priorities are finite", "ties go to the earlier arrival", "the session stays eligible"),
        not_reproduced=("a bounded wait for every workload: the trace shows one crossing, no theorem",),
        starvation_free=True,
        progress="every eligible session, q_age times the spread of priorities after its arrival",
        source="M5.2 0x09A, age-adjusted priority",
    )

    def __init__(self, *, quantum_ms: float = 100.0, **seams: Any) -> None:
        super().__init__(**seams)
        if not quantum_ms > 0:
            raise ValueError(f"aging quantum of {quantum_ms} ms: must be positive")
        self.quantum_ms = quantum_ms

    def priority(self, state: SchedulerState, view: SessionView) -> int:
        waited = max(state.now_ms - view.request.arrival_ms, 0.0)
        return view.request.priority - int(waited // self.quantum_ms)
