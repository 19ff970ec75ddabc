"""The only definition of a legal plan, a legal result and a legal resume; always on, also in production."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from scheduler.records import (
    TERMINAL, IllegalTransition, IntentKind, IterationPlan, IterationResult, Phase, PlannedChunk, SchedulerState,
    SessionState, SessionView,
)

if TYPE_CHECKING:
    from scheduler.policies.base import Policy

_ENTRY_INTENT = {SessionState.WAITING: IntentKind.ADMIT, SessionState.SUSPENDED: IntentKind.RESUME}


def _reject(rule: str, subject: object) -> None:
    raise IllegalTransition(f"{rule}: {subject}")


def validate_plan(state: SchedulerState, plan: IterationPlan, policy: Policy) -> None:
    """Raise ``IllegalTransition`` unless ``plan`` is one that ``policy`` may make of ``state``."""
    if plan.decision_id != state.decision_id or plan.input_version != state.version:
        _reject("plan made from another state version", (plan.decision_id, plan.input_version))
    if plan.policy != policy.identity:
        _reject("plan carries another policy's identity", plan.policy)
    entering: dict[str, IntentKind] = {}
    for intent in plan.intents:
        view = state.views.get(intent.request_id)
        if view is None or view.request.generation != intent.generation:
            _reject("intent for an unknown or stale session", intent)
        if intent.request_id in entering:
            _reject("two intents for one session", intent)
        entering[intent.request_id] = intent.kind
    planned: dict[str, PlannedChunk] = {}
    tokens = 0
    for chunk in plan.chunks:
        if chunk.request_id in planned:
            _reject("session planned twice", chunk)
        planned[chunk.request_id] = chunk
        _check_chunk(state, chunk, entering.get(chunk.request_id))
        tokens += chunk.stop - chunk.start
    ledger = plan.ledger
    if (ledger.max_num_batched_tokens, ledger.max_num_seqs) != (state.max_num_batched_tokens, state.max_num_seqs):
        _reject("ledger states other budgets", ledger)
    if (ledger.num_tokens, ledger.num_seqs) != (tokens, len(planned)):
        _reject("ledger drift", ledger)
    if tokens > state.max_num_batched_tokens:
        _reject("token budget exceeded", tokens)
    if len(planned) > state.max_num_seqs:
        _reject("sequence budget exceeded", len(planned))
    _check_order(state, plan, policy)


def _check_chunk(state: SchedulerState, chunk: PlannedChunk, intent: IntentKind | None) -> None:
    view = state.views.get(chunk.request_id)
    if view is None or view.state in TERMINAL:
        _reject("session is unknown or terminal", chunk)
    if chunk.generation != view.request.generation or chunk.version != view.version:
        _reject("chunk planned from a stale generation or snapshot", chunk)
    if not view.ready:
        _reject("session is not ready", chunk)
    start = view.computed
    if view.state in _ENTRY_INTENT:
        if intent is not _ENTRY_INTENT[view.state]:
            _reject("session enters without its intent", chunk)
        start = state.memory.cached_tokens(view)
    elif view.state is not SessionState.RUNNING:
        _reject("session is neither running nor entering", chunk)
    if chunk.start != start:
        _reject("interval does not start at the computed frontier", (chunk, start))
    if chunk.stop <= chunk.start:
        _reject("interval is empty", chunk)
    if chunk.stop > interval_limit(view, start):
        _reject("interval passes the frontier of its phase", (chunk, interval_limit(view, start)))


def interval_limit(view: SessionView, start: int) -> int:
    """Where an interval from ``start`` must stop: the committed frontier, the prompt's end, or one decode row."""
    if start < view.committed:
        return view.committed
    if view.emitted == 0:
        return view.num_prompt_tokens
    return start + 1


def phase_at(view: SessionView, start: int) -> Phase:
    """Phase of an interval that starts at ``start``."""
    if start < view.committed:
        return Phase.REBUILD
    return Phase.PREFILL if view.emitted == 0 else Phase.DECODE


def _check_order(state: SchedulerState, plan: IterationPlan, policy: Policy) -> None:
    keys = tuple(policy.order_key(state, state.views[chunk.request_id]) for chunk in plan.chunks)
    if keys != plan.order:
        _reject("forged order evidence", (plan.order, keys))
    if any(later < earlier for earlier, later in zip(keys, keys[1:], strict=False)):
        _reject("chunks are not in the order of their keys", keys)


def validate_result(plan: IterationPlan, result: IterationResult, views: Mapping[str, SessionView],
                    *, now_ms: float) -> None:
    """Raise ``IllegalTransition`` unless ``result`` is a possible outcome of ``plan``.

    ``views`` are the sessions as they were when the plan was executed (waiting ones already admitted).
    """
    if result.decision_id != plan.decision_id:
        _reject("result of another decision", result.decision_id)
    if not now_ms <= result.started_ms <= result.finished_ms:
        _reject("result moves the clock wrongly", (now_ms, result.started_ms, result.finished_ms))
    planned = {chunk.request_id: chunk for chunk in plan.chunks}
    done: dict[str, int] = {}
    debits: dict[str, int] = {}
    for item in result.chunks:
        chunk = planned.get(item.request_id)
        if chunk is None or chunk.generation != item.generation or item.request_id in done:
            _reject("result completes unplanned work", item)
        done[item.request_id] = item.after
        if item.before != chunk.start or not chunk.start <= item.after <= chunk.stop:
            _reject("progress outside the planned interval", item)
        view = views[item.request_id]
        phase = phase_at(view, chunk.start)
        reaches = phase is Phase.DECODE or (phase is Phase.PREFILL and item.after == view.num_prompt_tokens)
        if (item.token is not None) != (reaches and item.after > item.before):
            _reject("a token is emitted exactly by a decode or by the end of a prefill", item)
        if phase is not Phase.REBUILD and item.after > item.before:
            client = view.request.client_id
            debits[client] = debits.get(client, 0) + item.after - item.before
    if dict(result.debits) != debits:
        _reject("debits are not the completed prefill and decode rows", (dict(result.debits), debits))
