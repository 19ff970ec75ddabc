"""The engine's thread without HTTP: whatever happens to the engine, every request that is sent has an end."""

from __future__ import annotations

import queue
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from parity.serve.engine_thread import Cancel, EngineThread, Event, Stop, Submit
from scheduler.loop import Scheduler
from scheduler.policy.base import Policy
from scheduler.records import FinishReason
from tests.scheduler.serving import OPTIMISTIC, Serving, request

WAIT_S = 60


class Threaded:
    """An engine's thread over the exact engine, whose first step runs ``during`` and then breaks."""

    def __init__(self, during: Any) -> None:
        serving = Serving()
        self.events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        served = SimpleNamespace(
            engine=serving.engine,
            make_scheduler=lambda observer: serving.scheduler,
            note_step=lambda record: None,
        )
        self.thread = EngineThread(served, lambda events: [self.events.put(event) for event in events])

        def execute(*_: object) -> None:
            during(self.thread)
            raise RuntimeError("planted")

        serving.engine.execute = execute

    def ends(self, count: int) -> dict[str, Event]:
        """The next ``count`` events by request."""
        return {event.request_id: event for event in (self.events.get(timeout=WAIT_S) for _ in range(count))}


def test_request_sent_while_the_engine_dies_is_answered() -> None:
    def send_more(thread: EngineThread) -> None:
        thread.send(Submit(request("second", 4)))
        thread.send(Cancel("first"))
        thread.send(Submit(request("third", 4)))

    threaded = Threaded(send_more)
    threaded.thread.send(Submit(request("first", 4)))
    threaded.thread.start()
    ends = threaded.ends(3)
    assert set(ends) == {"first", "second", "third"}
    assert all(end.reason is FinishReason.FAILED and "planted" in end.error for end in ends.values())
    threaded.thread.send(Submit(request("late", 4)))  # its caller looked at the failure a moment too early
    assert threaded.ends(1)["late"].reason is FinishReason.FAILED
    threaded.thread.send(Stop())
    assert threaded.thread.join(WAIT_S)


def test_engine_that_dies_while_it_drains_ends_its_thread() -> None:
    threaded = Threaded(lambda thread: None)
    threaded.thread.send(Submit(request("first", 4)))
    threaded.thread.send(Stop())
    threaded.thread.start()
    assert threaded.ends(1)["first"].reason is FinishReason.FAILED
    assert threaded.thread.join(WAIT_S)


def test_request_that_breaks_the_scheduler_itself_is_answered() -> None:
    threaded = Threaded(lambda thread: None)
    threaded.thread.send(Submit(SimpleNamespace(request_id="odd")))
    threaded.thread.start()
    assert "AttributeError" in threaded.ends(1)["odd"].error
    threaded.thread.send(Stop())
    assert threaded.thread.join(WAIT_S)


class Served:
    """An engine's thread over the exact engine that works; ``seen`` holds every event in order."""

    def __init__(self) -> None:
        self.serving = Serving()
        self.events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.seen: list[Event] = []
        served = SimpleNamespace(
            engine=self.serving.engine,
            make_scheduler=self._make_scheduler,
            note_step=lambda record: None,
        )
        self.thread = EngineThread(served, lambda events: [self.events.put(event) for event in events])

    def _make_scheduler(self, observer: Any) -> Any:
        self.serving.scheduler.observer = observer
        return self.serving.scheduler

    def until_end(self, request_id: str) -> list[Event]:
        """All events of a request up to its end."""
        mine = []
        while not mine or not mine[-1].is_last:
            event = self.events.get(timeout=WAIT_S)
            self.seen.append(event)
            if event.request_id == request_id:
                mine.append(event)
        return mine

    def stop(self) -> list[Event]:
        """Drain the thread; the events that came after those that were taken."""
        self.thread.send(Stop())
        assert self.thread.join(WAIT_S)
        return [self.events.get_nowait() for _ in range(self.events.qsize())]


def test_cancelled_session_ends_in_the_scheduler_and_has_no_token_after_the_cancel() -> None:
    served = Served()
    execute, calls = served.serving.engine.execute, []

    def cancel_in_flight(plan: Any, batch: Any, now_ms: Any) -> Any:
        calls.append(plan)
        if len(calls) == 3:
            served.thread.send(Cancel("first"))
        return execute(plan, batch, now_ms)

    served.serving.engine.execute = cancel_in_flight
    served.thread.send(Submit(request("first", 4, max_tokens=50)))
    served.thread.start()
    events = served.until_end("first")

    assert events[-1].reason is FinishReason.CANCELLED
    assert served.stop() == []  # nothing is published after the end
    assert (
        len(calls) == 3
    )  # the cancel took effect at the step in which it came: no row was computed after it
    assert [event.token is not None for event in events] == [True] * 3 + [False]


# What is asked elsewhere: when a policy is made, by ``parity policies``, after steps without progress.
ASKED_ELSEWHERE = ("can_run", "check_limits", "published_service", "start")
HOOKS = [
    name
    for name, made in vars(Policy).items()
    if callable(made) and not name.startswith("_") and name not in ASKED_ELSEWHERE
]


class OneBadPolicy:
    """An engine's thread over the exact engine in a tight pool; the policy of the first scheduler raises in
    one of its hooks, from the ``after``-th question on. Its successors are sound.
    """

    def __init__(self, hook: str, *, after: int) -> None:
        self.hook, self.left, self.asked = hook, after, 0
        self.events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.servings: list[Serving] = []
        self.served = SimpleNamespace(make_scheduler=self._make, note_step=lambda record: None)
        self.thread = EngineThread(self.served, lambda events: [self.events.put(event) for event in events])

    def _make(self, observer: Callable[..., None]) -> Scheduler:
        serving = Serving(cells=10, options=OPTIMISTIC, max_num_batched_tokens=9, prefix_cache=False)
        serving.scheduler.observer = observer
        if not self.servings:
            policy = serving.scheduler.policy
            policy.__dict__[self.hook] = partial(self._raise, getattr(policy, self.hook))
        self.servings.append(serving)
        self.served.engine = serving.engine
        return serving.scheduler

    def _raise(self, original: Callable[..., object], *arguments: object, **named: object) -> object:
        self.left -= 1
        if self.left < 0:
            self.asked += 1
            raise ZeroDivisionError("by hand")
        return original(*arguments, **named)

    def ends(self, count: int) -> dict[str, Event]:
        """The ends of ``count`` requests."""
        ends: dict[str, Event] = {}
        while len(ends) < count:
            event = self.events.get(timeout=WAIT_S)
            if event.is_last:
                ends[event.request_id] = event
        return ends


@pytest.mark.parametrize("after", [0, 2])
@pytest.mark.parametrize("hook", HOOKS)
def test_a_policy_that_raises_in_any_of_its_hooks_costs_what_is_live_and_not_the_server(
    hook: str, after: int
) -> None:
    threaded = OneBadPolicy(hook, after=after)
    for name in "abcd":
        threaded.thread.send(Submit(request(name, 3, 6)))
    threaded.thread.start()
    ends = threaded.ends(4)
    failed = [event for event in ends.values() if event.reason is FinishReason.FAILED]
    assert threaded.asked > 0, "never asked"
    assert failed and all("ZeroDivisionError: by hand" in event.error for event in failed)
    threaded.thread.send(Submit(request("late", 3, 4)))
    assert threaded.ends(1)["late"].reason is FinishReason.LENGTH and threaded.thread.failure is None
    threaded.thread.send(Stop())
    assert threaded.thread.join(WAIT_S)
