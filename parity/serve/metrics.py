"""Prometheus metrics of a server: the scheduler's telemetry, memory, and latencies as clients see them."""

from __future__ import annotations

from collections.abc import Iterator

import prometheus_client
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from parity.serve.front import Front
from scheduler.records import PreemptionReason
from scheduler.telemetry import StepRecord

BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
GAUGES = {
    "running": "Sessions that run.",
    "waiting": "Sessions that wait.",
    "suspended": "Preempted sessions.",
    "cells_used": "KV cells in use.",
    "cells_available": "KV cells that can be had.",
    "cells_shared": "KV cells saved by sharing.",
    "cells_retired": "KV cells that only keep what ended in order.",
    "ids_retired": "Sequence ids that only keep cells occupied.",
    "slots_used": "Sequence ids of sessions and resident prefixes.",
    "steps_in_flight": "Steps under way when the latest one was launched, itself included.",
}
COUNTERS = {
    "admitted": "Sessions admitted.",
    "preempted": "Preemptions.",
    "preempted_again": "Preemptions of sessions that had been preempted before.",
    "preemption_fallbacks": "Sessions recomputed whole of which a part was to stay.",
    "rebuilt_lower": "Sessions of which a part was rebuilt in lower cells.",
    "released_rows": "Rows of preempted sessions that must be computed again.",
    "reclaimed_bytes": "Bytes of KV cells that preemptions made available.",
    "resumed": "Resumes.",
    "late_after_resume": "Tokens later than their objective, of sessions that had been preempted.",
    "stale_receipts": "Results that came after their session was cancelled.",
    "escalations": "Steps up the ladder of measures against standstill.",
    "not_granted": "Planned entries for which the memory had no room in the end.",
    "cancelled": "Sessions cancelled.",
    "finished": "Sessions finished.",
    "failed": "Sessions failed.",
    "prefill_tokens": "Prompt tokens computed.",
    "decode_tokens": "Output tokens computed.",
    "recompute_tokens": "Tokens computed again after a preemption.",
    "prefix_hits": "Admissions with a hit.",
    "prefix_misses": "Admissions without a hit.",
    "prefix_tokens_saved": "Prompt tokens not computed.",
    "calls": "Native decode calls.",
    "pipeline_places": "Places for steps in flight, at every launch.",
    "pipeline_bubbles": "Those of them that held no rows.",
    "engine_failures": "Steps that the engine broke off.",
}
TIMES = {
    "step_ms": "Time spent in steps.",
    "engine_ms": "Time spent in engines.",
    "resume_latency_ms": "Time from preemptions to resumes.",
}


class SchedulerCollector(Collector):
    """Reads the engine thread's totals and latest step; both are only ever replaced or added to."""

    def __init__(self, front: Front) -> None:
        self._front = front
        self.latest = StepRecord()

    def watch(self, record: StepRecord, totals: object) -> None:
        """Called by the engine's thread after every step."""
        self.latest = record

    def collect(self) -> Iterator[Metric]:
        totals, latest, front = self._front.engine.totals, self.latest, self._front
        idle = not front.live
        for name, text in GAUGES.items():
            value = 0 if idle and name in ("running", "waiting", "suspended") else getattr(latest, name)
            yield GaugeMetricFamily(f"samebytes_{name}", text, value=value)
        for name, text in COUNTERS.items():
            yield CounterMetricFamily(f"samebytes_{name}", text, value=totals.values[name])
        yield CounterMetricFamily("samebytes_steps", "Scheduler steps.", value=totals.steps)
        reasons = CounterMetricFamily("samebytes_preempted_by_reason", "Preemptions.", labels=["reason"])
        for reason in PreemptionReason:
            reasons.add_metric([reason.value], totals.values[f"preempted_{reason.value}"])
        yield reasons
        for name, text in TIMES.items():
            seconds = totals.values[name] / 1e3
            yield CounterMetricFamily(f"samebytes_{name.removesuffix('_ms')}_seconds", text, value=seconds)
        yield GaugeMetricFamily(
            "samebytes_live_requests", "Requests accepted and not answered.", value=len(front.live)
        )
        for name, value in front.counts.items():
            yield CounterMetricFamily(f"samebytes_requests_{name}", f"Requests {name}.", value=value)


class Metrics:
    """A registry of its own, so that servers in one process do not share numbers."""

    def __init__(self, front: Front) -> None:
        self.registry = prometheus_client.CollectorRegistry()
        self.scheduler = SchedulerCollector(front)
        self.registry.register(self.scheduler)
        front.engine.watch = self.scheduler.watch
        self.time_to_first_token = self._histogram("time_to_first_token", "From request to first token.")
        self.e2e_request_latency = self._histogram("e2e_request_latency", "From request to end.")

    def _histogram(self, name: str, text: str) -> prometheus_client.Histogram:
        return prometheus_client.Histogram(
            f"samebytes_{name}_seconds", text, registry=self.registry, buckets=BUCKETS_S
        )

    def text(self) -> bytes:
        """Prometheus text format."""
        return prometheus_client.generate_latest(self.registry)
