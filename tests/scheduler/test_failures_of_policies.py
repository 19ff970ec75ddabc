"""What a policy or an engine does wrong is a typed error: the books stay whole, the scheduler serves on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from parity.checkers.conservation import check_conservation
from scheduler.engine import EngineFailure
from scheduler.policy.plan import plan_alone
from scheduler.records import FinishReason, IllegalTransition, IntentKind, PolicyFailure, SchedulerFailure
from tests.scheduler.serving import OPTIMISTIC, Serving, request


def broken(*arguments: Any, **named: Any) -> None:
    raise ZeroDivisionError("by hand")


def serving_of_three() -> Serving:
    serving = Serving(cells=10, options=OPTIMISTIC, max_num_batched_tokens=9, prefix_cache=False)
    serving.submit(*[request(name, 3, 6) for name in "abc"])
    return serving


@pytest.mark.parametrize(
    "seam",
    [
        "plan_iteration",
        "planned",
        "order_key",
        "reserved_rows",
        "future_rows",
        "chunk_tokens",
        "choose_victim",
        "victim_key",
        "unwind",
        "observe",
    ],
)
def test_what_a_policy_raises_is_typed_and_the_scheduler_serves_on(seam: str) -> None:
    serving = serving_of_three()
    serving.step()
    serving.scheduler.preempt("c", 0.0)  # so that somebody wants to enter
    policy = serving.scheduler.policy
    policy.__dict__[seam] = broken
    with pytest.raises(PolicyFailure, match="policy fcfs raised ZeroDivisionError: by hand") as raised:
        serving.step(9)
    assert isinstance(raised.value.__cause__, ZeroDivisionError)
    del policy.__dict__[seam]
    check_conservation(serving.scheduler.memory)
    serving.run()
    serving.check_all_as_alone()


def test_abandon_ends_everybody_with_an_error_and_the_next_request_is_served() -> None:
    serving = serving_of_three()
    serving.step(2)
    serving.launch()
    serving.scheduler.abandon("policy fcfs raised", 0.0)
    serving.collect()
    assert {end.reason for end in serving.ends.values()} == {FinishReason.FAILED}
    assert {end.error for end in serving.ends.values()} == {"policy fcfs raised"}
    assert sorted(serving.ends) == ["a", "b", "c"] and serving.scheduler.is_idle
    assert serving.engine.pools[0].num_used() == 0
    serving.submit(request("d", 3, 4))
    serving.run()
    assert serving.ends["d"].tokens == serving.solo("d")


@pytest.mark.parametrize(
    "forge",
    [
        lambda result: None,
        lambda result: replace(result, chunks=result.chunks[:-1]),
        lambda result: replace(result, chunks=(result.chunks[0]._replace(epoch=7), *result.chunks[1:])),
    ],
    ids=["no result", "a chunk less", "forged epoch"],
)
def test_a_result_that_is_refused_leaves_the_step_in_flight_to_be_failed(forge: Callable[..., Any]) -> None:
    serving = serving_of_three()
    serving.step()
    flight = serving.launch()
    result = serving.engine.execute(flight.plan, flight.batch, serving.now_ms)
    with pytest.raises(IllegalTransition) as refused:
        serving.scheduler.finish(forge(result), serving.now_ms)
    assert isinstance(refused.value, SchedulerFailure)
    serving.scheduler.fail(EngineFailure(str(refused.value)), serving.now_ms)
    serving.run()
    assert {name: end.tokens for name, end in serving.ends.items()} == {n: serving.solo(n) for n in "abc"}


class Answering:
    """A seam that answers ``times`` questions, raises once, and answers again."""

    def __init__(self, original: Callable[..., Any], times: int) -> None:
        self.original, self.left = original, times

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        self.left -= 1
        if self.left == -1:
            raise ZeroDivisionError("by hand")
        return self.original(*arguments, **named)


@pytest.mark.parametrize(
    "seam", ["future_rows", "order_key", "chunk_tokens", "observe", "can_run", "waiting_order"]
)
def test_wherever_in_a_step_a_policy_raises_the_books_stay_whole(seam: str) -> None:
    """With shared prefixes in a tight pool: the n-th question of all that a run asks is not answered."""
    count = 0
    while True:
        serving = Serving(cells=14, max_num_batched_tokens=5, prefix_block_tokens=1, max_idle_steps=4)
        for index in range(5):
            serving.submit(request(f"s{index}", [1, 2, 3, 4][: 2 + index % 3] + [10 + index], 1 + index))
        setattr(serving.scheduler.policy, seam, Answering(getattr(serving.scheduler.policy, seam), count))
        try:
            serving.run()
        except PolicyFailure:
            check_conservation(serving.scheduler.memory)
            assert serving.scheduler.memory.residences.keys() == serving.scheduler.table.running.keys()
        else:
            break
        serving.run()
        serving.check_all_as_alone()
        count += 1
    assert count > 0 or seam == "can_run", "never asked"


def test_a_plan_for_one_session_alone_can_be_made_while_another_one_is_in_flight() -> None:
    """On the last rung of the escalation somebody may still be running: what is in flight leaves later."""
    serving = Serving(cells=30, prefix_cache=False)
    serving.submit(*[request(name, 3, 6) for name in "abc"])
    serving.step()
    serving.scheduler.preempt("c", 0.0)
    state = serving.scheduler.state(0.0)
    plan = plan_alone(state, serving.scheduler.policy, serving.view("c"))
    assert [(intent.kind, intent.request_id) for intent in plan.intents] == [(IntentKind.RESUME, "c")]
