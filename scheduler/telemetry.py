"""One record per step, as a line of JSON; ``parity.telemetry`` reads and sums them."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields

from scheduler.records import Preemption, PreemptionMode


@dataclass(slots=True)
class StepGauges:
    """How things stood at a step's launch or end."""

    step: int = 0
    now_ms: float = 0
    running: int = 0
    waiting: int = 0
    suspended: int = 0
    cells_used: int = 0
    cells_available: int = 0
    cells_shared: int = 0
    cells_retired: int = 0
    ids_retired: int = 0
    slots_used: int = 0


@dataclass(slots=True)
class StepRecord(StepGauges):
    """What one step did: gauges, counts of events, rows (``*_tokens``) computed."""

    admitted: int = 0
    preempted: int = 0  # suspensions: the sum of the next six, by reason
    preempted_no_cells: int = 0
    preempted_own_cells_too_high: int = 0
    preempted_policy_intent: int = 0
    preempted_asked: int = 0
    preempted_engine_failure: int = 0
    preempted_escalation: int = 0
    rebuilt_lower: int = 0
    preempted_again: int = 0
    preemption_fallbacks: int = 0
    reclaimed_rows: int = 0
    resumed: int = 0
    resume_latency_ms: float = 0
    stale_receipts: int = 0
    escalations: int = 0
    cancelled: int = 0
    refused: int = 0
    finished: int = 0
    failed: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    recompute_tokens: int = 0
    prefix_hits: int = 0
    prefix_misses: int = 0
    prefix_tokens_saved: int = 0
    calls: int = 0
    engine_failures: int = 0
    step_ms: float = 0
    engine_ms: float = 0

    def note_preemption(self, preemption: Preemption) -> None:
        """Count one suspension: by reason, by mode, its rows, and whether it was not the session's first."""
        name = f"preempted_{preemption.reason.value}"
        setattr(self, name, getattr(self, name) + 1)
        self.preempted += 1
        self.rebuilt_lower += preemption.mode is PreemptionMode.REBUILD_TAIL
        self.preempted_again += preemption.suspensions > 0
        self.preemption_fallbacks += preemption.is_fallback
        self.reclaimed_rows += preemption.released_rows

    def as_dict(self) -> dict[str, float]:
        return asdict(self)

    def to_json(self) -> str:
        return json.dumps(self.as_dict())


GAUGES = tuple(gauge.name for gauge in fields(StepGauges))
