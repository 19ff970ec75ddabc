"""Every negative case of a plan: a valid plan with exactly one change is
rejected, by the rule that it breaks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from scheduler.legality import validate_plan
from scheduler.policies import make_policy
from scheduler.policy.plan import plan_alone
from scheduler.policy.state import SchedulerState
from scheduler.records import (
    IllegalTransition,
    IntentKind,
    IterationPlan,
    PolicyIdentity,
    QueueIntent,
    SessionState,
)
from tests.scheduler.serving import Serving, request

POLICY = make_policy("fcfs")


@pytest.fixture
def state() -> SchedulerState:
    """``d`` decodes, ``p`` is half prefilled, ``b`` rebuilds, ``w`` waits, ``u`` is
    not ready, ``s`` is suspended.
    """
    serving = Serving(
        cells=200, max_num_batched_tokens=8, max_chunk_tokens=4, max_num_seqs=6, prefix_cache=False
    )
    serving.submit(
        request("d", 2, 9), request("b", 4, 9), request("s", 2, 9), request("p", 14, 9), request("u", 2, 9)
    )
    serving.step(3)
    for name in ("b", "s"):
        serving.scheduler.preempt(name, serving.now_ms)
    serving.scheduler.set_ready("s", False)
    serving.step()
    serving.scheduler.set_ready("s", True)
    serving.scheduler.set_ready("u", False)
    serving.submit(request("w", 3, 2))
    table = serving.scheduler.table
    assert (table.views["d"].emitted > 0, table.views["p"].emitted) == (True, 0)
    assert table.views["b"].computed < table.views["b"].committed
    assert table.views["s"].state is SessionState.SUSPENDED
    return serving.scheduler.state(serving.now_ms)


@pytest.fixture
def plan(state: SchedulerState) -> IterationPlan:
    return POLICY.plan_iteration(state)


def test_valid_plan_is_accepted(state: SchedulerState, plan: IterationPlan) -> None:
    validate_plan(state, plan, POLICY)
    assert {chunk.request_id for chunk in plan.chunks} >= {"d", "p", "b"}


def test_the_plan_of_one_session_alone_enters_it_beside_others_that_still_run(state: SchedulerState) -> None:
    """Others are still there while they are in flight, and the lone session is kept from nothing."""
    plan = plan_alone(state, POLICY, state.views["s"])
    validate_plan(state, plan, POLICY)
    assert [(chunk.request_id, chunk.start) for chunk in plan.chunks] == [("s", 0)]


def chunk(name: str, **change: int | str) -> Callable[[IterationPlan], IterationPlan]:
    """Change one planned chunk and nothing else; shifts of ``start`` and ``stop`` are relative."""

    def mutate(plan: IterationPlan) -> IterationPlan:
        chunks = []
        for item in plan.chunks:
            if item.request_id == name:
                shifted = {
                    key: getattr(item, key) + value if isinstance(value, int) else value
                    for key, value in change.items()
                }
                item = replace(item, **shifted)
            chunks.append(item)
        assert tuple(chunks) != plan.chunks
        rows = sum(item.stop - item.start for item in chunks)
        return replace(plan, chunks=tuple(chunks), ledger=replace(plan.ledger, num_tokens=rows))

    return mutate


def plan_with(**change: object) -> Callable[[IterationPlan], IterationPlan]:
    return lambda plan: replace(plan, **change)


def ledger_with(**shift: int) -> Callable[[IterationPlan], IterationPlan]:
    return lambda plan: replace(
        plan,
        ledger=replace(
            plan.ledger, **{key: getattr(plan.ledger, key) + value for key, value in shift.items()}
        ),
    )


def intents(*extra: QueueIntent) -> Callable[[IterationPlan], IterationPlan]:
    return lambda plan: replace(plan, intents=plan.intents + extra)


def duplicated(plan: IterationPlan) -> IterationPlan:
    return replace(plan, chunks=plan.chunks + plan.chunks[:1], order=plan.order + plan.order[:1])


def reordered(plan: IterationPlan) -> IterationPlan:
    assert plan.order[0] != plan.order[-1]
    return replace(plan, chunks=plan.chunks[::-1], order=plan.order[::-1])


def without_intents(plan: IterationPlan) -> IterationPlan:
    assert plan.intents
    return replace(plan, intents=())


NEGATIVE = [
    ("another state version", lambda plan: replace(plan, input_version=plan.input_version - 1)),
    ("another state version", lambda plan: replace(plan, decision_id=plan.decision_id + 1)),
    ("another policy's identity", plan_with(policy=PolicyIdentity("fcfs", 2))),
    ("another policy's identity", plan_with(policy=PolicyIdentity("orca"))),
    ("does not start at the computed frontier", chunk("p", start=-1)),
    ("does not start at the computed frontier", chunk("p", start=1)),
    ("does not start at the computed frontier", chunk("d", start=-1)),
    ("passes the frontier of its phase", chunk("p", stop=40)),
    ("passes the frontier of its phase", chunk("d", stop=1)),
    ("passes the frontier of its phase", chunk("b", stop=20)),
    ("interval is empty", chunk("d", stop=-1)),
    ("interval is empty", chunk("d", stop=-2)),
    ("session planned twice", duplicated),
    ("stale generation or snapshot", chunk("d", version=-1)),
    ("stale generation or snapshot", chunk("d", generation=1)),
    ("session is not ready", chunk("d", request_id="u")),
    ("is unknown, or has ended", chunk("d", request_id="gone")),
    ("ledger drift", ledger_with(num_tokens=1)),
    ("ledger drift", ledger_with(num_seqs=-1)),
    ("ledger drift", ledger_with(max_num_batched_tokens=1)),
    ("ledger drift", ledger_with(max_num_seqs=-1)),
    ("forged order evidence", lambda plan: replace(plan, order=((-1, 0),) + plan.order[1:])),
    ("forged order evidence", lambda plan: replace(plan, order=plan.order[:-1])),
    ("out of the order of their keys", reordered),
    ("enters without its intent", without_intents),
    ("two intents", lambda plan: replace(plan, intents=plan.intents * 2)),
    ("intent for a", intents(QueueIntent(IntentKind.ADMIT, "gone", 0))),
    ("intent for a", intents(QueueIntent(IntentKind.DEFER, "w", 1))),
    ("another queue", intents(QueueIntent(IntentKind.ADMIT, "d", 0))),
    ("another queue", intents(QueueIntent(IntentKind.PREEMPT, "w", 0))),
    ("another queue", intents(QueueIntent(IntentKind.RESUME, "u", 0))),
    ("goes exactly with its first chunk", intents(QueueIntent(IntentKind.PREEMPT, "d", 0))),
    ("goes exactly with its first chunk", intents(QueueIntent(IntentKind.ADMIT, "w", 0))),
]


@pytest.mark.parametrize(
    ("rule", "mutate"), NEGATIVE, ids=[f"{i}-{rule}" for i, (rule, _) in enumerate(NEGATIVE)]
)
def test_plan_with_one_change_is_rejected(
    rule: str, mutate: Callable[[IterationPlan], IterationPlan], state: SchedulerState, plan: IterationPlan
) -> None:
    with pytest.raises(IllegalTransition, match=rule):
        validate_plan(state, mutate(plan), POLICY)


@pytest.mark.parametrize(
    ("rule", "budget"),
    [
        ("token budget exceeded", {"max_num_batched_tokens": 3}),
        ("sequence budget exceeded", {"max_num_seqs": 1}),
    ],
)
def test_plan_over_a_budget_is_rejected(
    rule: str, budget: dict[str, int], state: SchedulerState, plan: IterationPlan
) -> None:
    tight = replace(state, **budget)
    with pytest.raises(IllegalTransition, match=rule):
        validate_plan(tight, replace(plan, ledger=replace(plan.ledger, **budget)), POLICY)


def test_terminal_session_is_rejected(state: SchedulerState, plan: IterationPlan) -> None:
    views = dict(state.views)
    views["d"] = replace(views["d"], state=SessionState.FINISHED)
    with pytest.raises(IllegalTransition, match="neither running nor entering"):
        validate_plan(replace(state, views=views), plan, POLICY)


@pytest.mark.parametrize("between", [SessionState.PREEMPT_PENDING, SessionState.RESUME_PENDING])
def test_session_between_queues_is_rejected(
    between: SessionState, state: SchedulerState, plan: IterationPlan
) -> None:
    views = dict(state.views)
    views["d"] = replace(views["d"], state=between)
    with pytest.raises(IllegalTransition, match="neither running nor entering"):
        validate_plan(replace(state, views=views), plan, POLICY)


@pytest.mark.parametrize(("most", "legal"), [(6, True), (4, True), (3, False), (2, False)])
def test_a_plan_that_lets_too_many_run_is_rejected(most: int, legal: bool) -> None:
    """Three run and one enters: four, however many of them have rows in this step."""
    serving = Serving(cells=200, max_num_batched_tokens=64, prefix_cache=False)
    serving.submit(*[request(name, 2, 9) for name in "abc"])
    serving.step()
    serving.submit(request("d", 2, 9))
    for name in "ab":
        serving.scheduler.set_ready(name, False)
    state = serving.scheduler.state(serving.now_ms)
    plan = POLICY.plan_iteration(state)
    assert [item.request_id for item in plan.chunks] == ["c", "d"]
    state = replace(state, max_num_seqs=most)
    plan = replace(plan, ledger=replace(plan.ledger, max_num_seqs=most))
    if legal:
        validate_plan(state, plan, POLICY)
    else:
        with pytest.raises(IllegalTransition, match="more sessions run than max_num_seqs: 4"):
            validate_plan(state, plan, POLICY)


def test_a_chunk_above_max_chunk_tokens_is_rejected() -> None:
    serving = Serving(cells=200, max_num_batched_tokens=64, prefix_cache=False)
    serving.submit(request("a", 30, 2))
    state = serving.scheduler.state(serving.now_ms)
    plan = POLICY.plan_iteration(state)
    assert plan.chunks[0].stop == 30
    validate_plan(replace(state, max_chunk_tokens=30), plan, POLICY)
    with pytest.raises(IllegalTransition, match="chunk exceeds max_chunk_tokens"):
        validate_plan(replace(state, max_chunk_tokens=4), plan, POLICY)
