"""Forecasts of a session's total output: how many rows admission keeps free.

Estimates are data, never hidden truth.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from scheduler.records import SessionView

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
