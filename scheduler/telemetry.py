"""One record per step, as a line of JSON; ``parity.telemetry`` reads and sums them."""

from __future__ import annotations

import json

from scheduler.records import Preemption, PreemptionMode, PreemptionReason

GAUGES = (
    "step",
    "now_ms",
    "running",
    "waiting",
    "suspended",
    "cells_used",
    "cells_available",
    "cells_shared",
    "cells_retired",
    "ids_retired",
    "slots_used",
)
# Suspensions by reason; their sum is ``preempted``.
PREEMPTED = tuple(f"preempted_{reason.value}" for reason in PreemptionReason)
COUNTERS = (
    "admitted",
    "preempted",
    *PREEMPTED,
    "rebuilt_lower",
    "preempted_again",
    "preemption_fallbacks",
    "released_rows",
    "reclaimed_bytes",
    "resumed",
    "resume_latency_ms",
    "late_after_resume",
    "stale_receipts",
    "escalations",
    "cancelled",
    "refused",
    "not_granted",
    "finished",
    "failed",
    "prefill_tokens",
    "decode_tokens",
    "recompute_tokens",
    "prefix_hits",
    "prefix_misses",
    "prefix_tokens_saved",
    "calls",
    "engine_failures",
    "step_ms",
    "engine_ms",
)
_ZEROS = dict.fromkeys(GAUGES + COUNTERS, 0)


class StepRecord:
    """What one step did: gauges at its launch or end, counts of events, rows (``*_tokens``) computed."""

    def __init__(self) -> None:
        self.__dict__.update(_ZEROS)  # one is made every step
        self.preemptions: list[Preemption] = []

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
        return {name: getattr(self, name) for name in GAUGES + COUNTERS}

    def to_json(self) -> str:
        """One line: the numbers, and of every preemption what tells them apart."""
        return json.dumps(self.as_dict() | {"preemptions": [_brief(item) for item in self.preemptions]})


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
