"""What every policy owes whatever its name: logical plans, no hidden truth, original
clocks, only completed service.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from fractions import Fraction

from parity.history import Run, TraceStep
from parity.records import Finding
from scheduler.policy.cost import ExclusiveCost
from scheduler.records import (
    BudgetLedger,
    IterationPlan,
    Phase,
    PlannedChunk,
    PolicyIdentity,
    QueueIntent,
    SessionView,
)

_PLAN_TYPES = (IterationPlan, PlannedChunk, QueueIntent, BudgetLedger, PolicyIdentity)
_KEY_TYPES = (bool, int, float, str, Fraction, tuple)


def check_logical_plans(run: Run) -> list[Finding]:
    """Plans hold sessions, intervals, intents and comparable keys: no cell, no sequence id, no address."""
    findings = []
    for traced in run.trace:
        plan = traced.flight.plan
        parts = [plan, plan.ledger, plan.policy, *plan.chunks, *plan.intents]
        findings += [
            Finding("physical", f"step {traced.step} plans a {type(part).__name__}", {"step": traced.step})
            for part in parts
            if type(part) not in _PLAN_TYPES
        ]
        findings += [
            Finding(
                "physical", f"step {traced.step} orders by a {type(value).__name__}", {"step": traced.step}
            )
            for value in _flat(plan.order)
            if type(value) not in _KEY_TYPES
        ]
    return findings


def _flat(values: Iterable) -> Iterable:
    for value in values:
        yield value
        if isinstance(value, tuple):
            yield from _flat(value)


def check_hidden_truth(first: Run, second: Run) -> list[Finding]:
    """Two runs that differ in hidden lengths alone: equal plans for as long as the results were equal."""
    for one, two in zip(first.trace, second.trace, strict=False):
        if _decision(one) != _decision(two):
            text = f"step {one.step} is planned differently after equal results"
            return [Finding("hidden length", text, {"step": one.step})]
        if _outcome(one) != _outcome(two):
            break
    return []


def _decision(traced: TraceStep) -> tuple:
    plan = traced.flight.plan
    return plan.chunks, plan.intents, plan.order, plan.ledger


def _outcome(traced: TraceStep) -> list[tuple]:
    chunks = traced.result.chunks if traced.result is not None else ()
    return [(item.request_id, item.before, item.after, item.token) for item in chunks]


def check_published_service(
    run: Run, published: Mapping[str, int], *, input_weight: int, output_weight: int
) -> list[Finding]:
    """What a policy publishes as service is what was completed: nothing planned, failed or rebuilt."""
    completed: dict[str, int] = {}
    for traced in run.trace:
        for item in traced.result.chunks if traced.result is not None else ():
            view = traced.flight.views[item.request_id]
            rows = item.after - item.before if view.phase_at(item.before) is Phase.PREFILL else 0
            cost = input_weight * rows + output_weight * (item.token is not None)
            client = view.request.client_id
            completed[client] = completed.get(client, 0) + cost
    return [
        Finding(
            "service",
            f"{client} is published with {published.get(client, 0)}, "
            f"completed were {completed.get(client, 0)}",
        )
        for client in sorted({*completed, *published})
        if published.get(client, 0) != completed.get(client, 0)
    ]


def check_original_clocks(run: Run, cost: ExclusiveCost) -> list[Finding]:
    """Slack in order keys counts from arrival or from the previous emission, whatever happened in between.

    For policies whose keys begin with the predicted slack.
    """
    return _check_keys(
        run, 0, lambda view, now_ms, start: _original_deadline(view) - cost.emission_ms(view, now_ms, start)
    )


def check_original_ages(run: Run, quantum_ms: float) -> list[Finding]:
    """Priorities in order keys improve with the time since arrival, whatever happened in between.

    For policies whose keys hold the aged priority in second place.
    """
    return _check_keys(
        run,
        1,
        lambda view, now_ms, _: view.request.priority - int((now_ms - view.request.arrival_ms) // quantum_ms),
    )


def _check_keys(run: Run, part: int, expected: Callable[[SessionView, float, int], float]) -> list[Finding]:
    """Parts of order keys that are not what a session's clocks say at the time and from the chunk's start."""
    findings = []
    for traced in run.trace:
        plan, now_ms = traced.flight.plan, traced.flight.started_ms
        for chunk, key in zip(plan.chunks, plan.order, strict=True):
            right = expected(traced.flight.views[chunk.request_id], now_ms, chunk.start)
            if key[part] != right:
                text = (
                    f"step {traced.step} orders {chunk.request_id} by {key[part]:g}, its clocks say {right:g}"
                )
                findings.append(Finding("clock", text, {"step": traced.step, "session": chunk.request_id}))
    return findings


def _original_deadline(view: SessionView) -> float:
    slo = view.request.slo
    start = view.request.arrival_ms if view.emitted == 0 else view.last_emitted_ms
    limit = slo.ttft_ms if view.emitted == 0 else slo.tbt_ms
    return float("inf") if limit is None else start + limit
