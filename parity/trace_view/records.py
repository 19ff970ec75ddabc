"""What a picture of a run shows, flat enough to come out of a worker process as JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """Rows ``[start, stop)`` of one session in one step; ``phase`` is prefill, decode or rebuild."""

    step: int
    session: int
    start: int
    stop: int
    phase: str
    emitted: bool
    completed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """One session: when it came, when it first ran and ended (step or None), how, and what it was.

    ``suspensions`` are half-open step ranges in which it had lost its rows.
    """

    session: int
    client_id: str
    priority: int
    prompt_tokens: int
    max_tokens: int
    arrival: int
    first: int | None
    end: int | None
    reason: str
    outputs: int
    suspensions: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """Something that happened to a session before a step: share, admit, resume, preempt, defer, reject."""

    step: int
    session: int
    kind: str
    amount: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Gauge:
    """Counts of one step."""

    step: int
    running: int
    waiting: int
    suspended: int
    prefill: int
    decode: int
    rebuild: int
    cells_used: int
    cells_available: int
    cells_shared: int
    preempted: int
    failed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceView:
    """The whole picture's data. ``notes`` are the run's problems and failures, one line each."""

    title: str
    engine: str
    policy: str
    budget: int
    lanes: tuple[Lane, ...]
    bars: tuple[Bar, ...]
    marks: tuple[Mark, ...]
    gauges: tuple[Gauge, ...]
    notes: tuple[str, ...]

    @property
    def steps(self) -> int:
        """Number of steps, at least 1."""
        return max([1, *(gauge.step + 1 for gauge in self.gauges)])

    def to_data(self) -> dict[str, Any]:
        """JSON-able form."""
        return asdict(self)

    @staticmethod
    def from_data(data: dict[str, Any]) -> TraceView:
        """What ``to_data`` made, after JSON."""
        lanes = tuple(
            Lane(**{**lane, "suspensions": tuple(map(tuple, lane["suspensions"]))}) for lane in data["lanes"]
        )
        return TraceView(
            **{
                **data,
                "lanes": lanes,
                "bars": tuple(Bar(**bar) for bar in data["bars"]),
                "marks": tuple(Mark(**mark) for mark in data["marks"]),
                "gauges": tuple(Gauge(**gauge) for gauge in data["gauges"]),
                "notes": tuple(data["notes"]),
            }
        )
