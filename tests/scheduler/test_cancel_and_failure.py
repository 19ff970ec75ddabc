"""Cancellation in every state and in flight, late receipts, generations,
victims, and engines that break off.
"""

from __future__ import annotations

from typing import Any

import pytest

from parity.engines.exact import ExactEngine
from scheduler.engine import EngineFailure
from scheduler.loop import MAX_ENGINE_FAILURES
from scheduler.records import FinishReason, IllegalTransition, IterationResult, SessionState
from tests.scheduler.serving import OPTIMISTIC, Serving, request


def cancelled(serving: Serving, name: str, tokens: int) -> None:
    end = serving.ends.pop(name)
    assert (end.reason, len(end.tokens)) == (FinishReason.CANCELLED, tokens)
    assert end.tokens == serving.solo(name)[:tokens]


def busy(**fields: Any) -> Serving:
    """``w`` waits behind three that run: ``d`` decodes, ``p`` prefills in chunks, ``s`` is suspended."""
    serving = Serving(cells=60, max_num_seqs=3, max_chunk_tokens=3, prefix_cache=False, **fields)
    serving.submit(request("d", 2, 9), request("s", 2, 9), request("p", 12, 4), request("w", 5, 3))
    serving.step(2)
    serving.scheduler.preempt("s", serving.now_ms)
    return serving


@pytest.mark.parametrize(
    ("name", "state", "tokens"),
    [
        ("w", SessionState.WAITING, 0),
        ("p", SessionState.RUNNING, 0),
        ("d", SessionState.RUNNING, 2),
        ("s", SessionState.SUSPENDED, 2),
    ],
)
def test_cancel_in_every_queue_ends_once_and_frees_all(name: str, state: SessionState, tokens: int) -> None:
    serving = busy()
    assert serving.view(name).state is state
    assert serving.scheduler.cancel(name, serving.now_ms)
    assert not serving.scheduler.cancel(name, serving.now_ms)
    serving.run()
    cancelled(serving, name, tokens)
    serving.check_all_as_alone()
    assert serving.totals.values["cancelled"] == 1


def test_cancel_of_a_resumed_session_in_the_middle_of_its_rebuild() -> None:
    serving = busy()
    serving.step(5)
    serving.scheduler.preempt("d", serving.now_ms)
    while serving.view("d").state is not SessionState.RUNNING:
        serving.step()
    assert serving.view("d").computed < serving.view("d").committed
    serving.scheduler.cancel("d", serving.now_ms)
    serving.run()
    end = serving.ends.pop("d")
    assert end.tokens == serving.solo("d")[: len(end.tokens)]
    serving.check_all_as_alone()


@pytest.mark.parametrize("steps", [0, 1, 3, 4, 5])
def test_cancel_between_launch_and_result_gives_no_token(steps: int) -> None:
    serving = Serving(max_chunk_tokens=3, prefix_cache=False)
    serving.submit(request("s", 9, 3), request("other", 4, 6))
    serving.step(steps)
    before = len(serving.scheduler.table.outputs.get("s", ())) if "s" not in serving.ends else 3
    flight = serving.launch()
    answered = serving.scheduler.cancel("s", serving.now_ms)
    assert answered is ("s" not in serving.ends)
    assert not serving.scheduler.cancel("s", serving.now_ms)
    assert serving.scheduler.take_completions() == [], "its cells are in use until the engine returns"
    serving.commit(flight)
    if answered:
        cancelled(serving, "s", before)
    serving.run()
    serving.check_all_as_alone()


def test_preemption_in_flight_keeps_the_step_and_a_cancel_overrules_it() -> None:
    serving = Serving()
    serving.submit(request("a", 3, 5), request("b", 3, 5))
    serving.step()
    flight = serving.launch()
    for name in ("a", "b", "a"):
        assert serving.scheduler.preempt(name, serving.now_ms)
    assert serving.scheduler.cancel("b", serving.now_ms)
    assert serving.view("a").state is SessionState.RUNNING
    serving.commit(flight)
    assert serving.view("a").state is SessionState.SUSPENDED
    assert serving.view("a").emitted == 2, "no token lost, none doubled"
    serving.run()
    cancelled(serving, "b", 1)
    serving.check_all_as_alone()


def test_cancel_in_flight_stands_although_the_session_is_preempted_before_its_step_returns() -> None:
    serving = Serving()
    serving.submit(request("a", 3, 5), request("b", 3, 5))
    serving.step()
    flight = serving.launch()
    assert serving.scheduler.cancel("b", serving.now_ms)
    serving.scheduler.preempt("b", serving.now_ms)
    serving.commit(flight)
    cancelled(serving, "b", 1)
    serving.run()
    serving.check_all_as_alone()


def test_cancelled_generation_is_spent_and_its_successor_runs() -> None:
    serving = busy()
    serving.scheduler.cancel("d", serving.now_ms)
    serving.collect()
    cancelled(serving, "d", 2)
    with pytest.raises(IllegalTransition, match="generation was cancelled"):
        serving.submit(request("d", 2, 9))
    serving.submit(request("d", 2, 9, generation=1))
    with pytest.raises(IllegalTransition, match="in use"):
        serving.submit(request("d", 2, 9, generation=2))
    serving.run()
    assert serving.ends["d"].generation == 1
    serving.check_all_as_alone()


def test_hundred_cancels_on_few_ids_leave_nothing_behind() -> None:
    serving = Serving(cells=40, ids=6, prefix_block_tokens=2)
    for turn in range(100):
        serving.submit(request("s", 5, 6, generation=turn), request(f"t{turn}", 5, 2))
        serving.step(turn % 5)
        serving.scheduler.cancel("s", serving.now_ms)
        serving.collect()
        serving.ends.pop("s", None)
    serving.run()
    serving.check_all_as_alone()


def test_second_flight_and_stray_results_are_illegal() -> None:
    serving = Serving()
    with pytest.raises(IllegalTransition, match="without a step"):
        serving.scheduler.finish(None, 0.0)
    with pytest.raises(IllegalTransition, match="without a step"):
        serving.scheduler.fail(EngineFailure("late"), 0.0)
    serving.submit(request("s", 3, 2))
    flight = serving.launch()
    with pytest.raises(IllegalTransition, match="in flight"):
        serving.launch()
    result = serving.engine.execute(flight.plan, flight.batch, serving.now_ms)
    serving.scheduler.finish(result, serving.now_ms)
    with pytest.raises(IllegalTransition, match="without a step"):
        serving.scheduler.finish(result, serving.now_ms)


def test_victim_inside_the_plan_is_unwound_whole() -> None:
    serving = Serving(cells=12, options=OPTIMISTIC, prefix_cache=False)
    serving.submit(request("old", 4, 8), request("new", 4, 8))
    seen = 0
    while not serving.scheduler.is_idle:
        flight = serving.launch()
        rows = sum(chunk.stop - chunk.start for chunk in flight.plan.chunks)
        assert len(flight.batch.tokens) == rows == flight.plan.ledger.num_tokens
        suspended = list(serving.scheduler.table.suspended)
        seen += bool(suspended)
        assert not {chunk.request_id for chunk in flight.plan.chunks} & set(suspended)
        serving.commit(flight)
    assert seen
    serving.run()
    serving.check_all_as_alone()


# -- engines that break off


@pytest.mark.parametrize("fields", [{}, {"recurrent": True}, {"stages": 2}], ids=str)
@pytest.mark.parametrize("call", [0, 1, 2, 3])
def test_failure_at_any_call_loses_nothing(call: int, fields: dict) -> None:
    serving = Serving(cells=80, max_call_rows=4, prefix_block_tokens=4, **fields)
    serving.submit(*[request(f"s{i}", 5, 5) for i in range(3)])
    serving.step(2)
    flight = serving.launch()
    calls = sum(map(len, flight.batch.stages))
    serving.engine.fail_next(call)
    failed = 0
    try:
        serving.commit(flight)
    except EngineFailure as failure:
        failed = 1
        serving._note(serving.scheduler.fail(failure, serving.now_ms))
    assert failed == (call < calls)
    serving.run()
    assert serving.totals.values["engine_failures"] == failed
    assert {name: end.tokens for name, end in serving.ends.items()} == {
        f"s{i}": serving.solo(f"s{i}") for i in range(3)
    }


class Dead(ExactEngine):
    def execute(self, plan: Any, batch: Any, now_ms: Any) -> IterationResult:
        raise EngineFailure("no slot")


def test_engine_that_stays_broken_ends_every_session_with_its_reason() -> None:
    serving = Serving()
    serving.scheduler.engine = Dead(serving.limits, serving.model)
    serving.submit(*[request(f"s{i}", 5, 5) for i in range(3)])
    serving.run(most=4 * MAX_ENGINE_FAILURES)
    assert {end.reason for end in serving.ends.values()} == {FinishReason.FAILED}
    assert {end.error for end in serving.ends.values()} == {"no slot"}
    assert serving.totals.values["failed"] == 3


def test_cancel_in_a_step_that_fails_still_ends_once() -> None:
    serving = Serving()
    serving.submit(request("a", 3, 5), request("b", 3, 5))
    serving.step()
    serving.launch()
    serving.scheduler.cancel("a", serving.now_ms)
    serving.scheduler.fail(EngineFailure("broken"), serving.now_ms)
    serving.run()
    cancelled(serving, "a", 1)
    assert serving.ends["b"].tokens == serving.solo("b")
