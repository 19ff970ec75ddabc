"""The cost model behind slack and feasibility: a declared lower bound, not a calibrated latency predictor."""

from __future__ import annotations

from dataclasses import dataclass

from scheduler.records import SessionView


@dataclass(frozen=True, slots=True)
class ExclusiveCost:
    """``exclusive_endpoint_lower_bound``: the session has the engine to itself
    and each step takes ``tick_ms``.

    A first token needs one step per started ``tokens_per_tick`` uncomputed prompt rows, a next token one
    step. Negative slack under it means that the deadline cannot be met; positive slack promises nothing.
    """

    tick_ms: float = 10.0
    tokens_per_tick: int = 2048

    def __post_init__(self) -> None:
        if not self.tick_ms > 0 or self.tokens_per_tick < 1:
            raise ValueError(f"cost model out of range: {self}")

    def emission_ms(self, view: SessionView, now_ms: float, cached: int = 0) -> float:
        """Predicted time of the session's next emission when it starts now with
        ``cached`` rows already there.
        """
        rows = max(view.committed, view.num_prompt_tokens, 1) - max(view.computed, cached)
        if view.emitted:  # rows to rebuild come on top of the one that emits
            rows = view.committed - max(view.computed, cached)
            return now_ms + self.tick_ms * (-(-rows // self.tokens_per_tick) + 1)
        return now_ms + self.tick_ms * -(-rows // self.tokens_per_tick)


def deadline_ms(view: SessionView) -> float:
    """First token: arrival + TTFT. Next token: previous emission + TBT. Infinite without an objective.

    Nothing restarts either clock: not admission, not a retry, not a resume.
    """
    request = view.request
    if view.emitted == 0:
        limit = request.slo.ttft_ms
        return float("inf") if limit is None else request.arrival_ms + limit
    limit = request.slo.tbt_ms
    if limit is None or view.last_emitted_ms is None:
        return float("inf")
    return view.last_emitted_ms + limit


def headroom_ms(view: SessionView, now_ms: float) -> float:
    """Time that is left until the deadline: a fact, whatever the work will take (M5.2, F32)."""
    return deadline_ms(view) - now_ms


def slack_ms(view: SessionView, now_ms: float, cost: ExclusiveCost, cached: int = 0) -> float:
    """Predicted slack: deadline minus predicted emission, which is headroom less predicted time (F34)."""
    return deadline_ms(view) - cost.emission_ms(view, now_ms, cached)


def why_infeasible(view: SessionView, now_ms: float, cost: ExclusiveCost, cached: int = 0) -> str | None:
    """Why the first token cannot come in time even if the session ran alone from now on, or None."""
    finish = cost.emission_ms(view, now_ms, cached)
    if view.emitted or finish <= deadline_ms(view):
        return None
    due, left = deadline_ms(view), headroom_ms(view, now_ms)
    return f"first token at {finish:g} ms at the earliest, due at {due:g} ms, {left:g} ms from now"
