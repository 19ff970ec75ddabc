"""One record per step, as a line of JSON, and the totals of all."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields

from scheduler.memory import MemoryCounts


@dataclass(slots=True)
class StepRecord:
    """What one step did: counts unless the name says otherwise; ``*_tokens`` are rows computed in this step.
    """

    step: int = 0
    now_ms: float = 0.0
    running: int = 0
    waiting: int = 0
    suspended: int = 0
    admitted: int = 0
    preempted: int = 0
    resumed: int = 0
    cancelled: int = 0
    refused: int = 0
    finished: int = 0
    failed: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    recompute_tokens: int = 0
    cells_used: int = 0
    cells_available: int = 0
    cells_shared: int = 0
    ids_retired: int = 0
    slots_used: int = 0
    prefix_hits: int = 0
    prefix_misses: int = 0
    prefix_tokens_saved: int = 0
    calls: int = 0
    engine_failures: int = 0
    step_ms: float = 0.0
    engine_ms: float = 0.0

    def measure(self, counts: MemoryCounts) -> None:
        """Take over what memory holds now."""
        self.cells_used, self.cells_available = counts.cells_used, counts.cells_available
        self.cells_shared, self.ids_retired = counts.cells_shared, counts.ids_retired
        self.slots_used = counts.sequences_used

    def to_json(self) -> str:
        """One line of JSON, keys in declaration order."""
        return json.dumps(asdict(self))


GAUGES = ("step", "now_ms", "running", "waiting", "suspended", "cells_used", "cells_available",
          "cells_shared",
          "ids_retired", "slots_used")


class Totals:
    """Sums of the counters and maxima of the gauges over all steps."""

    def __init__(self) -> None:
        self.steps = 0
        self.values: dict[str, float] = {field.name: 0 for field in fields(StepRecord)}

    def add(self, record: StepRecord) -> None:
        self.steps += 1
        for name, old in self.values.items():
            value = getattr(record, name)
            self.values[name] = max(old, value) if name in GAUGES else old + value

    def to_json(self) -> str:
        return json.dumps({"steps": self.steps, **self.values})
