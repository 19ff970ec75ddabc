"""Faults of steps that are in flight together, to be planted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from parity.engines.in_flight import StagesInTurn
from parity.mutants import cases
from parity.mutants.records import Killer, Mutant, Reach
from parity.mutants.seam import method_plant
from parity.mutants.trials import exact_trial
from parity.records import Case, Fault, FaultKind
from scheduler.loop import Scheduler
from scheduler.pipeline import Pipeline
from scheduler.records import IterationResult, PreemptionCause, SessionView


def overlapped(family: str, **settings: Any) -> Case:
    """Four sessions in two steps in flight. Some are preempted, and one cancelled, while their rows are on
    their way: in the older step and in the newer one.
    """
    faults = (
        Fault(kind=FaultKind.PREEMPT, step=7, session=1),
        Fault(kind=FaultKind.PREEMPT, step=10, session=0, in_flight=True),
        Fault(kind=FaultKind.PREEMPT, step=10, session=3, in_flight=True),
        Fault(kind=FaultKind.CANCEL, step=14, session=2, in_flight=True),
    )
    sessions = tuple(cases.session(40 + i, 5 + 3 * i, 9) for i in range(4))
    return cases.case_of(
        family,
        sessions,
        **{"steps_in_flight": 2, "max_num_batched_tokens": 8, "faults": faults, **settings},
    )


def _newest_first(original: Callable[..., Any], reach: Reach) -> Callable[..., Any]:
    def complete(self: Pipeline, before_result: Callable[[], None]) -> Any:
        if len(self._flights) > 1 and self._flights[-1][0].plan.chunks:
            reach()
            self._flights.rotate(1)
        return original(self, before_result)

    return complete


def _newest_given_first(original: Callable[..., Any], reach: Reach) -> Callable[..., Any]:
    def collect(self: StagesInTurn) -> IterationResult:
        if len(self._in_flight) > 1:
            reach()
            self._in_flight.rotate(1)
        return original(self)

    return collect


def _given_twice(original: Callable[..., Any], reach: Reach) -> Callable[..., Any]:
    given: dict[int, IterationResult] = {}

    def collect(self: StagesInTurn) -> IterationResult:
        if id(self) in given:
            reach()
            return given.pop(id(self))
        given[id(self)] = original(self)
        return given[id(self)]

    return collect


def _planned_again(original: Callable[..., Any], reach: Reach) -> Callable[..., Any]:
    def views_in_flight(self: Scheduler) -> dict[str, SessionView]:
        views = original(self)
        if views:
            reach()
        return {name: replace(view, ready=True) for name, view in views.items()}

    return views_in_flight


def _suspended_at_once(original: Callable[..., Any], reach: Reach) -> Callable[..., Any]:
    def suspend(
        self: Scheduler, view: SessionView, now_ms: float, cause: PreemptionCause, **kept: int
    ) -> None:
        if self._flight_of(view.request_id) is not None:
            reach()
        self._suspend(view, now_ms, cause, **kept)

    return suspend


def _only_the_newest_is_looked_at(original: Callable[..., Any], reach: Reach) -> Callable[..., Any]:
    def flight_of(self: Scheduler, request_id: str) -> Any:
        found = original(self, request_id)
        if found is not None and found is not self._flights[-1]:
            reach()
            return None
        return found

    return flight_of


def _others_live_on(original: Callable[..., Any], reach: Reach) -> Callable[..., Any]:
    def fail(self: Pipeline, failure: Exception) -> Any:
        behind = list(self._flights)[1:]
        done = original(self, failure)
        if any(flight.plan.chunks for flight, _ in behind):
            reach()
            for item in behind:
                self._flights.append(item)
                self._launched_ms.append(item[1])
        return done

    return fail


BROKEN_OFF = overlapped("llama", faults=(Fault(kind=FaultKind.DECODE_ERROR, step=9),))


def _mutant(
    name: str, fault: str, owner: type, method: str, make: Any, *killers: Killer, case: Case | None = None
) -> Mutant:
    played = (case,) if case is not None else (overlapped("llama"), overlapped("qwen3next"))
    return Mutant(
        name=name,
        part="in flight",
        killers=killers,
        plant=method_plant(owner, method, make),
        fault=fault,
        trials=tuple(map(exact_trial, played)),
    )


MUTANTS = (
    _mutant(
        "result_applied_in_order_of_arrival",
        "The newest of two steps in flight is ended first.",
        Pipeline,
        "_complete_oldest",
        _newest_first,
        Killer.LEGALITY,
    ),
    _mutant(
        "newest_result_given_first",
        "The engine gives the result of the newest of two steps in flight first.",
        StagesInTurn,
        "collect",
        _newest_given_first,
        Killer.LEGALITY,
    ),
    _mutant(
        "result_given_twice",
        "The engine gives a result again when the next one is asked for.",
        StagesInTurn,
        "collect",
        _given_twice,
        Killer.LEGALITY,
    ),
    _mutant(
        "planned_while_in_flight",
        "A session whose row is on its way is planned again, before its token is known.",
        Scheduler,
        "_views_in_flight",
        _planned_again,
        Killer.LEGALITY,
    ),
    _mutant(
        "suspended_in_flight",
        "The cells of a session in flight are given away before its step has returned.",
        Scheduler,
        "_suspend_when_landed",
        _suspended_at_once,
        Killer.LEGALITY,
    ),
    _mutant(
        "older_flights_overlooked",
        "What is asked of a session in flight is put off only when it is in the newest step.",
        Scheduler,
        "_flight_of",
        _only_the_newest_is_looked_at,
        Killer.LEGALITY,
    ),
    _mutant(
        "failure_spares_the_steps_behind",
        "When the engine breaks off, steps in flight behind the failed one are still waited for.",
        Pipeline,
        "_fail",
        _others_live_on,
        Killer.LEGALITY,
        case=BROKEN_OFF,
    ),
)
