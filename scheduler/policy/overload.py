"""What happens to a request that cannot be served in time: an explicit outcome for every offered request."""

from __future__ import annotations

from dataclasses import dataclass

from scheduler.policy.cost import ExclusiveCost, why_infeasible
from scheduler.policy.state import SchedulerState
from scheduler.records import Refusal, Request, SessionView

KINDS = ("queue", "bounded", "reject_infeasible")


@dataclass(frozen=True, slots=True, kw_only=True)
class Overload:
    """``queue`` lets everybody wait; ``bounded`` refuses at the door from ``max_live`` live
    sessions on; ``reject_infeasible`` gives up a waiting session whose first token cannot
    come in time even if it ran alone.
    """

    kind: str = "queue"
    max_live: int = 0
    tick_ms: float = 10.0
    tokens_per_tick: int = 2048

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"unknown overload policy {self.kind!r}; known: {', '.join(KINDS)}")
        if (self.max_live < 1) is (self.kind == "bounded"):
            raise ValueError(f"overload {self.kind!r} with max_live {self.max_live}")

    def refuse(self, state: SchedulerState, request: Request) -> Refusal | None:
        """The answer to a request that is turned away at the door, or None."""
        live = len(state.waiting) + len(state.running) + len(state.suspended)
        if self.kind == "bounded" and live >= self.max_live:
            why = f"{live} sessions are live, {self.max_live} allowed"
            return Refusal(request.request_id, why, True, live + 1, self.max_live)
        return None

    def rejects(self, state: SchedulerState, view: SessionView) -> str | None:
        """Why a waiting session is given up, or None."""
        if self.kind != "reject_infeasible":
            return None
        cost = ExclusiveCost(self.tick_ms, self.tokens_per_tick)
        return why_infeasible(view, state.now_ms, cost, state.memory.cached_tokens(view))


QUEUE = Overload()
