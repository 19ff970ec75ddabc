"""Forecasts of a session's total output: how many rows admission keeps free.

Estimates are data, never hidden truth.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from scheduler.records import (
    Allocation,
    AllocationRequest,
    AllocationResult,
    ReservationEstimate,
    SessionView,
)

KINDS = ("maximum", "point", "quantile", "watermark")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reservation:
    """What to reserve. ``forecasts[request id]`` maps ``point``, ``p50``, ``p90`` ... to total outputs.

    ``maximum`` reserves the declared limit (so does every kind for a request without a forecast),
    ``point`` and ``quantile`` their forecast, ``watermark`` the quantile forecast under a ceiling
    lowered by ``watermark_rows``: soft = hard - watermark. The watermark yields when nothing runs, so
    that a large session can run alone.
    """

    kind: str = "maximum"
    quantile: str = "p90"
    watermark_rows: int = 0
    forecasts: Mapping[str, Mapping[str, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"unknown reservation {self.kind!r}; known: {', '.join(KINDS)}")
        if self.watermark_rows < 0 or (self.watermark_rows and self.kind != "watermark"):
            raise ValueError(f"watermark of {self.watermark_rows} rows with reservation {self.kind!r}")
        for request_id, forecast in self.forecasts.items():
            quantiles = [
                value
                for _, value in sorted(
                    (int(key[1:]), value) for key, value in forecast.items() if key != "point"
                )
            ]
            if min(forecast.values()) < 1 or quantiles != sorted(quantiles):
                raise ValueError(
                    f"forecast of {request_id} is below 1 or its quantiles decrease: {dict(forecast)}"
                )

    def total_outputs(self, view: SessionView) -> int:
        """Forecast of all outputs, at most the declared maximum."""
        most = view.request.max_tokens
        if self.kind == "maximum":
            return most
        forecast = self.forecasts.get(view.request_id, {})
        return min(most, forecast.get("point" if self.kind == "point" else self.quantile, most))

    def future_rows(self, view: SessionView) -> int:
        """Rows still to be written: running ``max(G - e, 0)``, new ``p + max(G -
        1, 0)``; a rebuild comes on top.
        """
        outputs = max(self.total_outputs(view), view.emitted, 1)
        return view.num_prompt_tokens + outputs - 1 - view.computed


MAXIMUM = Reservation()


def answer_allocation(
    request: AllocationRequest, *, available_rows: int, total_rows: int
) -> AllocationResult:
    """The memory's answer to a wish, given its facts of the same epoch."""
    if request.rows <= available_rows:
        return AllocationResult(request, Allocation.GRANTED)
    kind = Allocation.UNAVAILABLE if request.rows <= total_rows else Allocation.FAILED
    return AllocationResult(request, kind)


class Recovery(Enum):
    """What an underestimated session asks for: nothing, more rows below the ceiling, or somebody's rows."""

    NONE, EXTEND, PREEMPT = "none", "extend", "preempt"


def estimate_reservation(
    reservation: Reservation, view: SessionView, *, reserved_rows: int, hard_rows: int
) -> ReservationEstimate:
    """What admitting a session would reserve now: a running or resumed one ``max(G - e, 0)`` rows (F24), a
    new one what is left of its prompt and ``max(G - 1, 0)`` (F25).
    """
    outputs = reservation.total_outputs(view)
    if view.emitted:
        rows = max(outputs - view.emitted, 0)
    else:
        rows = view.num_prompt_tokens - max(view.computed, view.committed) + max(outputs - 1, 0)
    return ReservationEstimate(
        request_id=view.request_id,
        generation=view.request.generation,
        rows=rows,
        reserved_rows=reserved_rows,
        hard_rows=hard_rows,
        watermark_rows=reservation.watermark_rows,
    )


def request_allocation(estimate: ReservationEstimate, *, epoch: int) -> AllocationRequest | None:
    """The wish that follows from an estimate, or None when it does not fit and the session waits."""
    if not estimate.fits:
        return None
    return AllocationRequest(
        request_id=estimate.request_id, generation=estimate.generation, epoch=epoch, rows=estimate.rows
    )


def reservation_error(estimated_rows: int, realised_rows: int) -> int:
    """Above 0: held back and unused; below 0: too little (F27). Known in hindsight only."""
    return estimated_rows - realised_rows


def recovery_for(*, reserved_rows: int, realised_rows: int, hard_rows: int) -> Recovery:
    """What is asked for when ``realised_rows`` turn out where ``reserved_rows`` were reserved."""
    if realised_rows <= reserved_rows:
        return Recovery.NONE
    return Recovery.EXTEND if realised_rows <= hard_rows else Recovery.PREEMPT
