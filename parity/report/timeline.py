"""A picture's data as one self-contained HTML page: inline SVG, no script, no request."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

import jinja2

from parity.gate.result import NoiseHistogram
from parity.report.history import Gauge, Parity, TraceView
from parity.suites.truth import Distance
from scheduler.records import Phase

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


# -- Pictures of a gate run as inline SVG: noise histograms, divergence timelines,
# cell maps. Pure text from records.

PALETTE = (
    "#3b6fb6",
    "#e08a1e",
    "#2f9e77",
    "#b8508f",
    "#7a6fd0",
    "#8c6d31",
    "#2aa1b8",
    "#c2543d",
    "#6b8e23",
    "#5b5f97",
    "#d16ba5",
    "#4d7c8a",
    "#a0522d",
    "#708090",
    "#9a4ef0",
    "#3f7f3f",
)
SAID = {
    Parity.IDENTICAL: "logits bit-identical to the session alone",
    Parity.BITS: "same token, other logits than the session alone",
    Parity.TOKEN: "another token than the session alone",
}
LABELS = 62  # px


def colour(session: int) -> str:
    """A session's colour in the cell map."""
    return PALETTE[session % len(PALETTE)]


def _svg(width: float, height: float, title: str, parts: Iterable[str]) -> str:
    return (
        f'<svg viewBox="0 0 {width:g} {height:g}" width="{width:g}" height="{height:g}" role="img" '
        f'aria-label="{escape(title)}"><title>{escape(title)}</title>{"".join(parts)}</svg>'
    )


def _rect(x: float, y: float, width: float, height: float, css: str, tip: str = "", style: str = "") -> str:
    inner = f"><title>{escape(tip)}</title></rect>" if tip else "/>"
    styled = f' style="{style}"' if style else ""
    place = f'x="{x:.5g}" y="{y:.5g}" width="{width:.5g}" height="{height:.5g}"'
    return f'<rect {place} class="{css}"{styled}{inner}'


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:.5g}" y="{y:.5g}" text-anchor="{anchor}">{escape(text)}</text>'


def noise_picture(noise: NoiseHistogram, *, title: str) -> str:
    """How far logits moved, by power of ten; the bar at the left are those that did not move at all."""
    counts, bar, height = (noise.unmoved, *noise.counts), 30.0, 120.0
    most = max(*counts, 1)
    parts = [f'<line x1="0" x2="{bar * len(counts):g}" y1="{height:g}" y2="{height:g}" class="axis"/>']
    for index, count in enumerate(counts):
        tall = (height - 22) * count / most
        label = "0" if index == 0 else f"1e{round(math.log10(noise.edges[index - 1]))}"
        tip = (
            f"{count} of {noise.samples} did not move"
            if index == 0
            else f"{count} moved by {label} to ten times that"
        )
        parts.append(
            _rect(index * bar + 3, height - tall, bar - 6, tall, "unmoved" if index == 0 else "moved", tip)
        )
        if count:
            parts.append(_text(index * bar + bar / 2, height - tall - 4, f"{count}", "middle"))
        parts.append(_text(index * bar + bar / 2, height + 14, label, "middle"))
    return _svg(bar * len(counts), height + 20, title, parts)


def distance_picture(distances: Sequence[Distance]) -> str:
    """How far each way of running is from the truth, on a logarithmic scale from 1e-7 to 1; a stroke marks
    the worst position.
    """
    row, width, decades, label = 20.0, 350.0, 7, 150.0
    parts = []
    for power in range(decades + 1):
        x = label + width * power / decades
        parts.append(f'<line x1="{x:g}" x2="{x:g}" y1="0" y2="{row * len(distances):g}" class="axis"/>')
        parts.append(_text(x, row * len(distances) + 14, f"1e{power - decades}", "middle"))

    def place(value: float) -> float:
        return width * min(max(math.log10(max(value, 1e-300)) / decades + 1, 0.0), 1.0)

    for index, found in enumerate(distances):
        y = index * row
        css = "unmoved" if found.worst_of_bound is None else "token" if found.beyond else "moved"
        parts.append(_text(label - 6, y + 14, f"{found.model} {found.way}", "end"))
        parts.append(_rect(label, y + 4, place(found.rms), row - 8, css, found.text))
        parts.append(
            _rect(label + place(found.worst_row_rms), y + 2, 2, row - 4, "axis worst", "worst position")
        )
    return _svg(label + width + 30, row * len(distances) + 20, "distance from the truth", parts)


def timeline_picture(view: TraceView, *, title: str) -> str:
    """Sessions downwards, scheduler steps to the right; a generated token is
    coloured by what became of it.
    """
    row = 15.0
    width = _step_width(view.steps)
    parts = [
        _text(LABELS - 8, row * lane.session + 11, f"session {lane.session}", "end") for lane in view.lanes
    ]
    for bar in view.bars:
        is_prefill = bar.phase == Phase.PREFILL.value
        tip = f"step {bar.step}: session {bar.session} {bar.phase} [{bar.start},{bar.stop})"
        if bar.parity:
            tip += f", {SAID[Parity(bar.parity)]}"
        tall = row - 4 if is_prefill else row - 8
        parts.append(
            _rect(
                LABELS + bar.step * width,
                row * bar.session + (row - tall) / 2,
                max(width - 0.6, 0.8),
                tall,
                bar.parity or "prefill",
                tip,
            )
        )
    parts += [
        _text(LABELS + (lane.end + 1) * width + 4, row * lane.session + 11, lane.reason)
        for lane in view.lanes
        if lane.end is not None
    ]
    height = row * len(view.lanes)
    parts += _step_axis(view.steps, width, height)
    return _svg(LABELS + width * view.steps + 90, height + 20, f"timeline: {title}", parts)


def _step_width(steps: int) -> float:
    return max(2.0, min(12.0, 880.0 / max(steps, 1)))


def _step_axis(steps: int, width: float, top: float) -> list[str]:
    stride = next(n for n in (5, 10, 20, 50, 100, 200, 500, 1000, 10**9) if n * width >= 40)
    parts = [f'<line x1="{LABELS}" x2="{LABELS + steps * width:g}" y1="{top:g}" y2="{top:g}" class="axis"/>']
    parts += [_text(LABELS + step * width, top + 14, str(step), "middle") for step in range(0, steps, stride)]
    return [*parts, _text(LABELS - 8, top + 14, "step", "end")]


def cell_picture(view: TraceView, *, title: str) -> str:
    """Cells of the pool upwards, scheduler steps to the right: strong where a row is
    placed, pale while it is kept.
    """
    pool = max((cell + 1 for bar in view.bars for cell in bar.cells), default=0)
    if not pool:
        return ""
    width = _step_width(view.steps)
    tall = max(1.0, min(3.0, 420.0 / pool))
    parts = []
    for step, session, first, count, until in placements(view):
        y = tall * (pool - first - count)
        tip = f"session {session} in cells {first} to {first + count - 1}, steps {step} to {until}"
        fill = f"fill:{colour(session)}"
        parts.append(
            _rect(LABELS + step * width, y, width * (until - step + 1), tall * count, "kept", tip, fill)
        )
        parts.append(_rect(LABELS + step * width, y, max(width - 0.4, 0.8), tall * count, "placed", "", fill))
    stride = next(n for n in (10, 20, 50, 100, 200, 500, 1000, 10**9) if n * tall >= 24)
    parts += [
        _text(LABELS - 8, tall * (pool - cell) + 3, f"cell {cell}", "end") for cell in range(0, pool, stride)
    ]
    parts += _step_axis(view.steps, width, tall * pool)
    return _svg(LABELS + width * view.steps + 90, tall * pool + 20, f"cell map: {title}", parts)


def placements(view: TraceView) -> list[tuple[int, int, int, int, int]]:
    """Runs of neighbouring cells that one session took in one step: (step, session,
    first cell, count, kept until).

    A session that is rebuilt begins again at an earlier position: what it held before is kept no longer.
    """
    until: dict[tuple[int, int], int] = {}  # (session, step) -> last step of the residency it is part of
    for lane in view.lanes:
        residency: list[int] = []
        reached = 0
        for bar in (bar for bar in view.bars if bar.session == lane.session):
            if bar.start < reached:
                until.update({(lane.session, step): residency[-1] for step in residency})
                residency = []
            residency.append(bar.step)
            reached = bar.stop
        until.update({(lane.session, step): residency[-1] for step in residency})
    runs = []
    for bar in view.bars:
        cells = sorted(bar.cells)
        begins = [i for i, cell in enumerate(cells) if i == 0 or cell != cells[i - 1] + 1]
        for begin, end in zip(begins, [*begins[1:], len(cells)], strict=True):
            runs.append((bar.step, bar.session, cells[begin], end - begin, until[bar.session, bar.step]))
    return runs
