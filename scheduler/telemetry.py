"""One record per step, as a line of JSON, and the totals of all."""

from __future__ import annotations

import json

GAUGES = ("step", "now_ms", "running", "waiting", "suspended", "cells_used", "cells_available",
          "cells_shared", "ids_retired", "slots_used")
COUNTERS = ("admitted", "preempted", "resumed", "cancelled", "refused", "finished", "failed",
            "prefill_tokens", "decode_tokens", "recompute_tokens", "prefix_hits", "prefix_misses",
            "prefix_tokens_saved", "calls", "engine_failures", "step_ms", "engine_ms")


class StepRecord:
    """What one step did: gauges at its launch or end, counts of events, rows (``*_tokens``) computed."""
    __slots__ = GAUGES + COUNTERS

    def __init__(self) -> None:
        for name in self.__slots__:
            setattr(self, name, 0)

    def to_json(self) -> str:
        return json.dumps({name: getattr(self, name) for name in self.__slots__})


class Totals:
    """Sums of the counters and maxima of the gauges over all steps."""

    def __init__(self) -> None:
        self.steps, self.values = 0, dict.fromkeys(StepRecord.__slots__, 0)

    def add(self, record: StepRecord) -> None:
        self.steps += 1
        for name, old in self.values.items():
            value = getattr(record, name)
            self.values[name] = max(old, value) if name in GAUGES else old + value

    def to_json(self) -> str:
        return json.dumps({"steps": self.steps, **self.values})
