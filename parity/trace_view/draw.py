"""A picture's data as one self-contained HTML page: inline SVG, no script, no request."""

from __future__ import annotations

from dataclasses import dataclass

import jinja2

from parity.trace_view.records import Gauge, TraceView

COLOURS = {
    "prefill": "#2f6fb3",
    "decode": "#3c9a5f",
    "rebuild": "#e08a1e",
    "suspended": "#c0392b",
    "share": "#7d3fb0",
    "waiting": "#9aa3ad",
    "running": "#4f5b66",
    "cells": "#5b7f95",
}
LEFT, LANE, STRIP, GAP = 150, 20, 70, 34
ENDS = {
    "length": "■",
    "stop": "■",
    "cancelled": "✕",
    "failed": "✕",
    "refused": "⊘",
    "rejected": "⊘",
    "open": "…",
}


@dataclass(frozen=True, slots=True)
class Strip:
    """One stacked chart under the lanes: title, top value, and per step the stacked (colour, value) parts.

    ``limit`` is drawn as a line.
    """

    title: str
    y: int
    top: int
    parts: tuple[tuple[int, tuple[tuple[str, int, int], ...]], ...]
    limit: int | None

    def height(self, value: int) -> float:
        return round(STRIP * value / self.top, 2) if self.top else 0.0


@dataclass(frozen=True, slots=True)
class Geometry:
    """Where things are: ``x(step)`` is the left edge of a step,
    ``lane_y(i)`` the top of a lane, in pixels.
    """

    steps: int
    lanes: int

    @property
    def step_width(self) -> float:
        return round(min(34.0, max(5.0, 1150 / self.steps)), 2)

    @property
    def width(self) -> float:
        return LEFT + self.steps * self.step_width + 60

    def x(self, step: float) -> float:
        return round(LEFT + step * self.step_width, 2)

    def lane_y(self, index: int) -> int:
        return 30 + index * LANE

    @property
    def lanes_bottom(self) -> int:
        return self.lane_y(self.lanes)

    @property
    def ticks(self) -> list[int]:
        """Steps to label: about one per 50 pixels, at round numbers."""
        every = next(
            n for n in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 10**9) if n * self.step_width >= 40
        )
        return list(range(0, self.steps, every))


def draw_trace(view: TraceView) -> str:
    """The page's text."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("parity", "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    geometry = Geometry(view.steps, len(view.lanes))
    strips = strips_of(view, geometry.lanes_bottom + GAP)
    return environment.get_template("trace.html").render(
        view=view,
        g=geometry,
        strips=strips,
        colours=COLOURS,
        ends=ENDS,
        left=LEFT,
        lane_height=LANE,
        strip=STRIP,
        height=strips[-1].y + STRIP + 30,
        totals=totals_of(view),
    )


def strips_of(view: TraceView, y: int) -> tuple[Strip, ...]:
    """Rows of each step against the budget, cells of the pool, sessions in the queues."""
    capacity = max((gauge.cells_used + gauge.cells_available for gauge in view.gauges), default=0)
    queued = max((gauge.running + gauge.waiting + gauge.suspended for gauge in view.gauges), default=0)
    rows = max([1, *(gauge.prefill + gauge.decode + gauge.rebuild for gauge in view.gauges)])
    budget = view.budget if view.budget <= 4 * rows else None
    plan = (
        (
            f"rows per step (budget {view.budget})",
            max(rows, budget or 0),
            budget,
            lambda g: (("decode", g.decode), ("rebuild", g.rebuild), ("prefill", g.prefill)),
        ),
        (
            f"cells used of {capacity}; shared ones purple",
            capacity,
            capacity,
            lambda g: (
                ("share", min(g.cells_shared, g.cells_used)),
                ("cells", max(g.cells_used - g.cells_shared, 0)),
            ),
        ),
        (
            "sessions: running, suspended, waiting",
            queued,
            None,
            lambda g: (("running", g.running), ("suspended", g.suspended), ("waiting", g.waiting)),
        ),
    )
    return tuple(
        Strip(
            title,
            y + number * (STRIP + GAP),
            top,
            tuple((g.step, stacked(parts(g))) for g in view.gauges),
            limit,
        )
        for number, (title, top, limit, parts) in enumerate(plan)
    )


def stacked(parts: tuple[tuple[str, int], ...]) -> tuple[tuple[str, int, int], ...]:
    """(name, bottom, value) of the parts that are not empty, from the bottom up."""
    made, bottom = [], 0
    for name, value in parts:
        if value:
            made.append((name, bottom, value))
            bottom += value
    return tuple(made)


def totals_of(view: TraceView) -> dict[str, int]:
    """Sums for the page's first line."""

    def total(name: str) -> int:
        return sum(getattr(gauge, name) for gauge in view.gauges)

    steps: list[Gauge] = list(view.gauges)
    return {
        "steps": len(steps),
        "prefill rows": total("prefill"),
        "decode rows": total("decode"),
        "rebuilt rows": total("rebuild"),
        "preemptions": total("preempted"),
        "shares": sum(mark.kind == "share" for mark in view.marks),
        "failed steps": sum(gauge.failed for gauge in steps),
    }
