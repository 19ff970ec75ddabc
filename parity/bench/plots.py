"""Plots of a sweep: throughput and p99 against N, goodput against rate. Written as PNG files."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from parity.store import save_bytes


def save_plots(rows: Sequence[dict[str, Any]], folder: Path) -> list[Path]:
    """Write what the rows have data for; returns the files."""
    closed = [row for row in rows if row.get("concurrency") is not None]
    opened = [row for row in rows if row.get("request_rate") is not None]
    wanted = [
        ("throughput.png", closed, "concurrency", "output_throughput", "concurrency N", "output tokens/s"),
        ("p99_e2el.png", closed, "concurrency", "p99_e2el_ms", "concurrency N", "p99 end-to-end latency, ms"),
        (
            "p99_ttft.png",
            closed,
            "concurrency",
            "p99_ttft_ms",
            "concurrency N",
            "p99 time to first token, ms",
        ),
        (
            "goodput.png",
            opened,
            "request_rate",
            "request_goodput",
            "request rate, 1/s",
            "goodput, requests/s",
        ),
        (
            "rate_p99_ttft.png",
            opened,
            "request_rate",
            "p99_ttft_ms",
            "request rate, 1/s",
            "p99 time to first token, ms",
        ),
    ]
    paths = []
    for name, data, x, y, x_label, y_label in wanted:
        series = _series(data, x, y)
        if series:
            save_bytes(folder / name, _plot(series, x_label, y_label))
            paths.append(folder / name)
    return paths


def _series(rows: Sequence[dict[str, Any]], x: str, y: str) -> dict[str, list[tuple[float, float]]]:
    """One line per target, mix and prefix shape; points without a number are left out."""
    series: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        if row.get(y) is not None:
            label = " ".join(str(row[key]) for key in ("mix", "prefix") if row.get(key))
            series.setdefault(label, []).append((row[x], row[y]))
    return {label: sorted(points) for label, points in series.items()}


def _plot(series: dict[str, list[tuple[float, float]]], x_label: str, y_label: str) -> bytes:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for label, points in series.items():
        axes.plot(*zip(*points, strict=True), marker="o", label=label)
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.set_ylim(bottom=0)
    if x_label.startswith("concurrency"):
        axes.set_xscale("log", base=2)
    axes.grid(visible=True, alpha=0.3)
    axes.legend()
    data = io.BytesIO()
    figure.savefig(data, format="png", dpi=120)
    return data.getvalue()
