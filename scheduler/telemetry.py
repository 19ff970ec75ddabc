"""One record per step, as a line of JSON; ``parity.telemetry`` reads and sums them."""

from __future__ import annotations

import json

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
COUNTERS = (
    "admitted",
    "preempted",
    "resumed",
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

    def as_dict(self) -> dict[str, float]:
        return {name: getattr(self, name) for name in self.__slots__}

    def to_json(self) -> str:
        return json.dumps(self.as_dict())
