"""A sweep: many points of one target, each kept as a file, so that an
interrupted sweep goes on where it was.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from parity.bench.bench_run import BenchRun
from parity.bench.coordinates import Coordinates
from parity.bench.fairness import outcome_columns
from parity.bench.summary import Goodput, summarise
from parity.bench.workload import Job, Workload, arrival_times
from parity.store import save_text


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One run: a workload at a fixed concurrency (closed loop) or at a rate (open loop)."""

    workload: Workload
    concurrency: int | None = None
    request_rate: float | None = None
    burstiness: float = 1.0
    max_concurrency: int | None = None

    @property
    def label(self) -> str:
        load = f"N{self.concurrency}" if self.request_rate is None else f"rate{self.request_rate:g}"
        return f"{self.workload.name.replace('/', '-')} {self.workload.shape.value} {load}"


class Driver(Protocol):
    """Runs jobs against a target: in this process or over HTTP."""

    def run_closed(self, jobs: list[Job], *, concurrency: int) -> BenchRun: ...

    def run_open(
        self, jobs: list[Job], *, times_s: list[float], max_concurrency: int | None = None
    ) -> BenchRun: ...


def run_point(point: Point, driver: Driver) -> BenchRun:
    """Run one point on a driver."""
    jobs = point.workload.jobs()
    if point.request_rate is None:
        return driver.run_closed(jobs, concurrency=point.concurrency)
    times_s = arrival_times(
        len(jobs), request_rate=point.request_rate, burstiness=point.burstiness, seed=point.workload.seed
    )
    return driver.run_open(jobs, times_s=times_s, max_concurrency=point.max_concurrency)


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepOptions:
    """What is computed and kept. ``target`` identifies what was measured: results of another target are not
    reused. ``held_for`` are coordinates of every row: model, hardware, evidence.
    """

    target: dict[str, Any]
    goodput: Goodput
    metrics: tuple[str, ...]
    percentiles: tuple[float, ...]
    result_dir: Path | None = None
    save_detailed: bool = False
    held_for: dict[str, Any] = field(default_factory=dict)


def run_sweep(
    points: Iterable[Point],
    options: SweepOptions,
    make_driver: Callable[[], Driver],
    report: Callable[[Point, bool], None] = lambda point, reused: None,
) -> list[dict[str, Any]]:
    """Rows of all points, one dictionary each; points whose file is there are not run again."""
    rows = []
    for point in points:
        path = (
            None
            if options.result_dir is None
            else options.result_dir / f"{point_digest(point, options)}.json"
        )
        row = None if path is None else stored_row(path)
        report(point, row is not None)
        if row is None:
            run = run_point(point, make_driver())
            row = {
                **describe(point),
                "coordinates": coordinates_of(point, options),
                **summarise(
                    run, goodput=options.goodput, metrics=options.metrics, percentiles=options.percentiles
                ),
                **outcome_columns(run),
                "first_error": next((record.error for record in run.requests if record.error), ""),
            }
            if path is not None:
                details = [asdict(record) for record in run.requests] if options.save_detailed else []
                data = {"target": options.target, "point": asdict(point), "row": row, "requests": details}
                save_text(path, json.dumps(data) + "\n")
        rows.append(row)
    return rows


def coordinates_of(point: Point, options: SweepOptions) -> dict[str, Any]:
    """What a row of the point holds for, beside what was under test."""
    workload = asdict(point.workload)
    held = {"model": None, "hardware": None, "evidence": "measured", **options.held_for}
    load = {
        "concurrency": point.concurrency,
        "request_rate": point.request_rate,
        "burstiness": point.burstiness if point.request_rate is not None else None,
        "max_concurrency": point.max_concurrency,
    }
    slo = workload.pop("slo")
    metric = {
        "latencies": [f"p{p:g}_{name}_ms" for name in options.metrics for p in options.percentiles],
        "goodput": asdict(options.goodput),
        "rates": "per second of the whole run",
    }
    coordinates = Coordinates(workload=workload, baseline=None, metric=metric, slo=slo, load=load, **held)
    return json.loads(json.dumps(asdict(coordinates)))


def describe(point: Point) -> dict[str, Any]:
    """The point's coordinates as columns."""
    workload = point.workload
    return {
        "mix": workload.name,
        "prefix": workload.shape.value,
        "input_len": workload.lengths.input_len,
        "output_len": workload.lengths.output_len,
        "concurrency": point.concurrency,
        "request_rate": point.request_rate,
        "burstiness": point.burstiness if point.request_rate is not None else None,
    }


def point_digest(point: Point, options: SweepOptions) -> str:
    """File name of a point: everything that its numbers depend on."""
    text = json.dumps(
        [
            asdict(point),
            options.target,
            asdict(options.goodput),
            options.metrics,
            options.percentiles,
            options.save_detailed,
        ],
        sort_keys=True,
        default=str,
    )
    return f"{point.label.replace(' ', '_')}-{hashlib.blake2b(text.encode(), digest_size=8).hexdigest()}"


def stored_row(path: Path) -> dict[str, Any] | None:
    """The row in a point's file, or None."""
    try:
        return json.loads(path.read_text())["row"]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def csv_text(rows: list[dict[str, Any]]) -> str:
    """Rows as CSV; an insufficient sample is an empty field. What is no single value is left to the JSON."""
    nested = ("coordinates", "clients", "claims")
    columns = [key for key in dict.fromkeys(key for row in rows for key in row) if key not in nested]
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n", extrasaction="ignore")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()
