"""One record per step, as a line of JSON; ``parity.telemetry`` reads and sums them."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, fields

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
    steps_in_flight: int = 0  # those with rows, when this one was launched, itself included


@dataclass(slots=True)
class StepRecord(StepGauges):
    """What one step did: gauges, counts of events, rows (``*_tokens``) computed, and its suspensions."""

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
    released_rows: int = 0
    reclaimed_bytes: int = 0
    resumed: int = 0
    resume_latency_ms: float = 0
    late_after_resume: int = 0
    stale_receipts: int = 0
    escalations: int = 0
    cancelled: int = 0
    refused: int = 0
    not_granted: int = 0
    finished: int = 0
    failed: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    recompute_tokens: int = 0
    prefix_hits: int = 0
    prefix_misses: int = 0
    prefix_tokens_saved: int = 0
    calls: int = 0
    pipeline_places: int = 0  # for steps in flight, when this one was launched
    pipeline_bubbles: int = 0  # those of them that held no rows
    engine_failures: int = 0
    step_ms: float = 0
    engine_ms: float = 0
    preemptions: list[Preemption] = field(default_factory=list)

    def note_preemption(self, preemption: Preemption, *, freed_bytes: int) -> None:
        """Count one suspension: by reason, by mode, its rows and bytes, and whether it was not the session's
        first.
        """
        self.preemptions.append(preemption)
        name = f"preempted_{preemption.reason.value}"
        setattr(self, name, getattr(self, name) + 1)
        self.preempted += 1
        self.rebuilt_lower += preemption.mode is PreemptionMode.REBUILD_TAIL
        self.preempted_again += preemption.suspensions > 0
        self.preemption_fallbacks += preemption.is_fallback
        self.released_rows += preemption.released_rows
        self.reclaimed_bytes += freed_bytes

    def as_dict(self) -> dict[str, float]:
        """The numbers by name."""
        return {name: getattr(self, name) for name in GAUGES + COUNTERS}

    def to_json(self) -> str:
        """One line: the numbers, and of every preemption what tells them apart."""
        return json.dumps(self.as_dict() | {"preemptions": [_brief(item) for item in self.preemptions]})


GAUGES = tuple(gauge.name for gauge in fields(StepGauges))
COUNTERS = tuple(item.name for item in fields(StepRecord) if item.name not in (*GAUGES, "preemptions"))


def _brief(item: Preemption) -> dict[str, str | int | None]:
    return {
        "victim": item.victim,
        "client": item.client_id,
        "epoch": item.epoch,
        "reason": item.reason.value,
        "mode": item.mode.value,
        "policy": item.policy.policy_id,
        "requester": item.requester,
        "released_rows": item.released_rows,
    }
