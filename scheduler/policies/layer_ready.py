"""``layer_ready``: admission that waits for layer residency (the scheduling interface of LayerKV)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from scheduler.policy.base import Policy
from scheduler.policy.contract import CELLS, HIDDEN_LENGTH, READINESS, TOKENS, Contract
from scheduler.policy.plan import NOT_READY, PlanBuilder
from scheduler.policy.state import SchedulerState
from scheduler.records import PolicyIdentity, SessionView


class Residency(Enum):
    """Where a layer's rows are: usable now, on their way, or nowhere on this device."""

    READY = "ready"
    INFLIGHT = "inflight"
    MISS = "miss"


@dataclass(frozen=True, slots=True)
class LayerFact:
    """One layer of one session, as its owner reported it; ``ready_ms`` is when
    an inflight layer will be there.
    """

    residency: Residency
    ready_ms: float = 0.0


class LayerReady(Policy):
    """A session enters when layer l, needed ``l * layer_ms`` after the step's
    start, will be resident by then.

    ``facts`` maps a request id to one fact per layer, or to pairs (residency, ready_ms); a session without
    facts has no layers elsewhere. A miss is late whatever the time. Facts are consumed, nothing is moved.
    """

    identity = PolicyIdentity("layer_ready")
    contract = Contract(
        scheduling_unit="one step; the horizon below it is the layer",
        protected_identity="none: a session waits for its layers",
        visible_state=("READY, INFLIGHT and MISS facts per layer", "predicted time per layer", "now"),
        decision="who may enter without stalling the layer pipeline",
        unknown_future=HIDDEN_LENGTH + ", and late transfers: facts may be wrong",
        objective="no step waits for a layer",
        metric="steps delayed by a late layer",
        denominator="steps",
        assumptions=("layers run in order, layer_ms each", "facts are current"),
        foreign_owners=(
            CELLS,
            TOKENS,
            READINESS,
            "copies, promotion and tiers: the store that reports the facts",
        ),
        not_reproduced=("LayerKV's allocation, offload and prefetch", "its predictor of decode slack"),
        starvation_free=False,
        progress="a session starves while a layer of it is missing; nobody else waits for it",
        source="LayerKV; M5.2 0x09B",
    )

    def __init__(
        self, *, facts: Mapping[str, Sequence] | None = None, layer_ms: float = 1.0, **seams: Any
    ) -> None:
        super().__init__(**seams)
        self.layer_ms = layer_ms
        self.facts = {
            request_id: tuple(map(layer_fact, layers)) for request_id, layers in (facts or {}).items()
        }

    def are_layers_ready(self, state: SchedulerState, view: SessionView) -> bool:
        """Whether every layer will be resident when it is needed, if the session ran in this step."""
        return all(
            fact.residency is Residency.READY
            or fact.residency is Residency.INFLIGHT
            and fact.ready_ms <= state.now_ms + layer * self.layer_ms
            for layer, fact in enumerate(self.facts.get(view.request_id, ()))
        )

    def can_run(self, state: SchedulerState, view: SessionView) -> bool:
        return view.ready and self.are_layers_ready(state, view)

    def fill(self, plan: PlanBuilder, views: Iterable[SessionView]) -> None:
        for view in views:
            if self.are_layers_ready(plan.state, view):
                super().fill(plan, (view,))
            else:
                plan.defer(view, f"{NOT_READY}a layer would be late")


def layer_fact(value: LayerFact | Sequence) -> LayerFact:
    """A fact from a fact or from a pair (residency, ready_ms)."""
    if isinstance(value, LayerFact):
        return value
    residency, ready_ms = value
    return LayerFact(Residency(residency), ready_ms)
