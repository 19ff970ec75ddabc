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
    "reclaimed_rows",
    "resumed",
    "resume_latency_ms",
    "stale_receipts",
    "escalations",
    "cancelled",
    "refused",
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


class StepRecord:
    """What one step did: gauges at its launch or end, counts of events, rows (``*_tokens``) computed."""

    __slots__ = GAUGES + COUNTERS

    def __init__(self) -> None:
        for name in self.__slots__:
            setattr(self, name, 0)

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
        return {name: getattr(self, name) for name in self.__slots__}

    def to_json(self) -> str:
        return json.dumps(self.as_dict())
