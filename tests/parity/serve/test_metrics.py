"""Everything that the scheduler's telemetry counts is shown, with its value."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from parity.serve.front import Front
from parity.serve.metrics import SchedulerCollector
from scheduler.telemetry import COUNTERS, GAUGES
from tests.scheduler.serving import OPTIMISTIC, Serving, request

OF_THE_FRONT = ("refused",)  # requests, not sessions: counted where they are answered


def shown(serving: Serving) -> dict[str, float]:
    """Every sample of the collector by name and labels."""
    front: Any = SimpleNamespace(engine=SimpleNamespace(totals=serving.totals), live=(), counts={})
    metrics = SchedulerCollector(cast(Front, front)).collect()
    return {
        "/".join([sample.name, *sample.labels.values()]): sample.value
        for metric in metrics
        for sample in metric.samples
    }


def test_every_counter_is_shown_with_its_value() -> None:
    serving = Serving(
        cells=10, options=OPTIMISTIC, prefix_cache=False, max_num_batched_tokens=9, cell_bytes=64
    )
    serving.submit(*[request(name, 3, 6) for name in "abc"])
    serving.run()
    totals, samples = serving.totals.values, shown(serving)
    assert {f"samebytes_{name}" for name in GAUGES} - set(samples) == {"samebytes_step", "samebytes_now_ms"}
    assert totals["preempted"] > 0 and totals["reclaimed_bytes"] > 0
    for name in COUNTERS:
        if name in OF_THE_FRONT:
            continue
        if name.startswith("preempted_") and name != "preempted_again":
            sample = f"samebytes_preempted_by_reason_total/{name.removeprefix('preempted_')}"
        elif name.endswith("_ms"):
            assert samples[f"samebytes_{name.removesuffix('_ms')}_seconds_total"] == totals[name] / 1e3
            continue
        else:
            sample = f"samebytes_{name}_total"
        assert samples[sample] == totals[name], name
