"""The only definition of a legal plan and a legal result (``resume`` has that of a legal resume); always on.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from scheduler.records import (
    TERMINAL, IllegalTransition, IntentKind, IterationPlan, IterationResult, Phase, PlannedChunk,
    SchedulerState,
    SessionState, SessionView,
)

if TYPE_CHECKING:
    from scheduler.policies.base import Policy

_ENTRY_INTENT = {SessionState.WAITING: IntentKind.ADMIT, SessionState.SUSPENDED: IntentKind.RESUME}
_INTENT_STATES = {
    IntentKind.ADMIT: (SessionState.WAITING,), IntentKind.RESUME: (SessionState.SUSPENDED,),
    IntentKind.REJECT: (SessionState.WAITING, SessionState.SUSPENDED),
    IntentKind.PREEMPT: (SessionState.RUNNING,),
    IntentKind.DEFER: (SessionState.WAITING, SessionState.SUSPENDED),
}


def _require(condition: bool, rule: str, subject: object) -> None:
    if not condition:
        raise IllegalTransition(f"{rule}: {subject}")


def interval_limit(view: SessionView, start: int) -> int:
    """Where an interval from ``start`` must stop."""
    return view.limit_at(start)


def phase_at(view: SessionView, start: int) -> Phase:
    """Phase of an interval that starts at ``start``."""
    return view.phase_at(start)


def validate_plan(state: SchedulerState, plan: IterationPlan, policy: Policy) -> None:
    """Raise ``IllegalTransition`` unless ``plan`` is one that ``policy`` may make of ``state``."""
    _require((plan.decision_id, plan.input_version) == (state.decision_id, state.version),
             "plan made from another state version", (plan.decision_id, plan.input_version))
    _require(plan.policy == policy.identity, "plan carries another policy's identity", plan.policy)
    intents: dict[str, IntentKind] = {}
    for intent in plan.intents:
        view = state.views.get(intent.request_id)
        _require(view is not None and view.request.generation == intent.generation,
                 "intent for an unknown or stale session", intent)
        _require(intent.request_id not in intents, "two intents for one session", intent)
        _require(view.state in _INTENT_STATES[intent.kind], "intent of a session in another queue", intent)
        intents[intent.request_id] = intent.kind
    planned: dict[str, None] = {}
    tokens = 0
    for chunk in plan.chunks:
        _require(chunk.request_id not in planned, "session planned twice", chunk)
        planned[chunk.request_id] = None
        _check_chunk(state, chunk, intents.get(chunk.request_id))
        tokens += chunk.stop - chunk.start
    for request_id, kind in intents.items():
        _require((request_id in planned) is (kind in _ENTRY_INTENT.values()),
                 "a session enters exactly with its first chunk", request_id)
    ledger = plan.ledger
    _require((ledger.max_num_batched_tokens, ledger.max_num_seqs)
             == (state.max_num_batched_tokens, state.max_num_seqs), "ledger states other budgets", ledger)
    _require((ledger.num_tokens, ledger.num_seqs) == (tokens, len(planned)), "ledger drift", ledger)
    _require(tokens <= state.max_num_batched_tokens, "token budget exceeded", tokens)
    _require(len(planned) <= state.max_num_seqs, "sequence budget exceeded", len(planned))
    keys = tuple(policy.order_key(state, state.views[request_id]) for request_id in planned)
    _require(keys == plan.order, "forged order evidence", plan.order)
    _require(all(a <= b for a, b in zip(keys, keys[1:], strict=False)),
             "chunks out of the order of their keys", keys)


def _check_chunk(state: SchedulerState, chunk: PlannedChunk, intent: IntentKind | None) -> None:
    view = state.views.get(chunk.request_id)
    _require(view is not None and view.state not in TERMINAL, "session is unknown or terminal", chunk)
    _require((chunk.generation, chunk.version) == (view.request.generation, view.version),
             "chunk planned from a stale generation or snapshot", chunk)
    _require(view.ready, "session is not ready", chunk)
    start = view.computed
    if view.state in _ENTRY_INTENT:
        _require(intent is _ENTRY_INTENT[view.state], "session enters without its intent", chunk)
        start = state.memory.cached_tokens(view)
    else:
        _require(view.state is SessionState.RUNNING, "session is neither running nor entering", chunk)
    _require(chunk.start == start, "interval does not start at the computed frontier", chunk)
    _require(chunk.stop > start, "interval is empty", chunk)
    _require(chunk.stop <= view.limit_at(start), "interval passes the frontier of its phase", chunk)


def validate_result(plan: IterationPlan, result: IterationResult, views: Mapping[str, SessionView],
                    *, now_ms: float) -> None:
    """Raise ``IllegalTransition`` unless ``result`` is a possible outcome of ``plan``, launched at
    ``now_ms``.

    ``views`` are the sessions as they were when the plan was executed (waiting ones already admitted).
    """
    _require(result.decision_id == plan.decision_id, "result of another decision", result.decision_id)
    _require(now_ms <= result.started_ms <= result.finished_ms, "result moves a clock wrongly",
             (now_ms, result.started_ms, result.finished_ms))
    planned = {chunk.request_id: chunk for chunk in plan.chunks}
    debits: dict[str, int] = {}
    for item in result.chunks:
        chunk = planned.pop(item.request_id, None)
        _require(chunk is not None and chunk.generation == item.generation, "result completes unplanned work",
                 item)
        _require(item.before == chunk.start <= item.after <= chunk.stop,
                 "progress outside the planned interval", item)
        view, rows = views[item.request_id], item.after - item.before
        phase = view.phase_at(item.before)
        emits = phase is Phase.DECODE or (phase is Phase.PREFILL and item.after == view.num_prompt_tokens)
        _require((item.token is not None) is (emits and rows > 0),
                 "a token is emitted exactly by a decode or by the end of a prefill", item)
        if phase is not Phase.REBUILD and rows:
            client = view.request.client_id
            debits[client] = debits.get(client, 0) + rows
    _require(dict(result.debits) == debits, "debits are not the completed prefill and decode rows",
             result.debits)
