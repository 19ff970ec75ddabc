"""The only definition of a legal plan and a legal result (``resume`` has that
of a legal resume); always on.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from scheduler import records
from scheduler.policy.state import SchedulerState
from scheduler.records import BudgetLedger, IntentKind, Phase, QueueIntent, SessionState, SessionView

if TYPE_CHECKING:
    from scheduler.policy.base import Policy

_QUEUED = (SessionState.WAITING, SessionState.SUSPENDED)
_ENTRIES = (IntentKind.ADMIT, IntentKind.RESUME)
_INTENT_STATES = {
    IntentKind.ADMIT: _QUEUED[:1],
    IntentKind.RESUME: _QUEUED[1:],
    IntentKind.REJECT: _QUEUED,
    IntentKind.DEFER: _QUEUED,
    IntentKind.PREEMPT: (SessionState.RUNNING,),
}


def require(condition: bool, rule: str, subject: object) -> None:
    """Raise ``IllegalTransition`` naming the rule and what breaks it, unless ``condition`` holds."""
    if not condition:
        raise records.IllegalTransition(f"{rule}: {subject}")


def validate_plan(state: SchedulerState, plan: records.IterationPlan, policy: Policy) -> None:
    """Raise ``IllegalTransition`` unless ``plan`` is one that ``policy`` may make of ``state``."""
    require(
        (plan.decision_id, plan.input_version) == (state.decision_id, state.version),
        "plan made from another state version",
        (plan.decision_id, plan.input_version),
    )
    require(plan.policy == policy.identity, "plan carries another policy's identity", plan.policy)
    intents: dict[str, QueueIntent] = {}
    for intent in plan.intents:
        view = state.views.get(intent.request_id)
        if view is None or view.request.generation != intent.generation:
            raise records.IllegalTransition(f"intent for a stale session: {intent}")
        require(intent.request_id not in intents, "two intents for one session", intent)
        require(view.state in _INTENT_STATES[intent.kind], "intent of a session in another queue", intent)
        require(intent.shard in range(len(state.memory.shards)), "intent names no shard", intent)
        intents[intent.request_id] = intent
    planned: dict[str, int] = {}
    for chunk in plan.chunks:
        require(chunk.request_id not in planned, "session planned twice", chunk)
        _check_chunk(state, chunk, intents.get(chunk.request_id))
        planned[chunk.request_id] = chunk.stop - chunk.start
    for name, intent in intents.items():
        require(
            (name in planned) is (intent.kind in _ENTRIES), "entry goes exactly with its first chunk", name
        )
    tokens = sum(planned.values())
    ledger = BudgetLedger(state.max_num_batched_tokens, state.step_seqs, tokens, len(planned))
    require(plan.ledger == ledger, "ledger drift", plan.ledger)
    require(tokens <= state.max_num_batched_tokens, "token budget exceeded", tokens)
    require(len(planned) <= state.step_seqs, "sequence budget exceeded", len(planned))
    kinds = [intent.kind for intent in plan.intents]
    running = len(state.running) + sum(map(kinds.count, _ENTRIES)) - kinds.count(IntentKind.PREEMPT)
    require(running <= state.max_num_seqs, "more sessions run than max_num_seqs", running)
    keys = tuple([policy.order_key(state, state.views[name]) for name in planned])
    require(keys == plan.order, "forged order evidence", plan.order)
    require(list(keys) == sorted(keys), "chunks out of the order of their keys", keys)


def _check_chunk(state: SchedulerState, chunk: records.PlannedChunk, intent: QueueIntent | None) -> None:
    view = state.views.get(chunk.request_id)
    if view is None:
        raise records.IllegalTransition(f"session is unknown, or has ended: {chunk}")
    require(
        (chunk.generation, chunk.version) == (view.request.generation, view.version),
        "chunk planned from a stale generation or snapshot",
        chunk,
    )
    require(view.ready, "session is not ready", chunk)
    start = view.computed
    if view.state in _QUEUED:
        if intent is None or intent.kind not in _ENTRIES:
            raise records.IllegalTransition(f"session enters without its intent: {chunk}")
        queue = state.waiting if view.state is SessionState.WAITING else state.suspended
        start = state.memory.shards[intent.shard].cached_tokens(view)
    else:
        require(view.state is SessionState.RUNNING, "session is neither running nor entering", chunk)
        queue = state.running
    require(chunk.request_id in queue, "session is in no queue", chunk)
    require(chunk.start == start, "interval does not start at the computed frontier", chunk)
    require(chunk.stop > start, "interval is empty", chunk)
    require(chunk.stop <= view.limit_at(start), "interval passes the frontier of its phase", chunk)
    require(chunk.stop - start <= state.max_chunk_tokens, "chunk exceeds max_chunk_tokens", chunk)


def validate_result(
    plan: records.IterationPlan,
    result: records.IterationResult,
    views: Mapping[str, SessionView],
    *,
    now_ms: float,
) -> None:
    """Raise ``IllegalTransition`` unless ``result`` is the outcome of ``plan``, launched at ``now_ms`` when
    the planned sessions were ``views``. Every chunk completes whole: its rows are in the engine.
    """
    require(result.decision_id == plan.decision_id, "result of another decision", result.decision_id)
    require(
        result.input_version == plan.input_version,
        "result of a plan from another state version",
        result.input_version,
    )
    require(
        now_ms <= result.started_ms <= result.finished_ms,
        "result moves a clock wrongly",
        (now_ms, result.started_ms, result.finished_ms),
    )
    planned = {chunk.request_id: chunk for chunk in plan.chunks}
    debits: dict[str, int] = {}
    for item in result.chunks:
        chunk = planned.pop(item.request_id, None)
        if chunk is None or chunk.generation != item.generation:
            raise records.IllegalTransition(f"result completes unplanned work: {item}")
        inside = item.before == chunk.start <= item.after <= chunk.stop
        require(inside, "progress outside the planned interval", item)
        require(item.after == chunk.stop, "chunk completed in part", item)
        view, rows = views[item.request_id], item.after - item.before
        require(item.epoch == view.epoch, "result of another epoch", item)
        phase = view.phase_at(item.before)
        emits = phase is Phase.DECODE or (phase is Phase.PREFILL and item.after == view.num_prompt_tokens)
        require(
            (item.token is not None) is (emits and rows > 0),
            "a token is emitted exactly by a decode or by the end of a prefill",
            item,
        )
        if phase is not Phase.REBUILD and rows:
            client = view.request.client_id
            debits[client] = debits.get(client, 0) + rows
    require(not planned, "planned work has no result", list(planned))
    order = [item.request_id for item in result.chunks]
    require(
        order == [chunk.request_id for chunk in plan.chunks],
        "results in another order than their chunks were planned",
        order,
    )
    require(result.debits == debits, "debits are not the completed prefill and decode rows", result.debits)
