"""Faults of steps that are in flight together, to be planted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from parity.engines.in_flight import StagesInTurn
from parity.mutants import cases
from parity.mutants.mutant import Killer, Reach, mutant
from parity.mutants.seam import in_method
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


BROKEN_OFF = overlapped("llama", faults=(Fault(kind=FaultKind.DECODE_ERROR, step=9),))

PLAYED = tuple(map(exact_trial, (overlapped("llama"), overlapped("qwen3next"))))


@mutant(
    in_method(Pipeline, "_complete_oldest"),
    part="in flight",
    killers=(Killer.LEGALITY, Killer.CRASH),
    trials=PLAYED,
)
def result_applied_in_order_of_arrival(original: Callable[..., Any], reach: Reach) -> Callable[..., Any]:
    """The newest of two steps in flight is ended first."""

    def complete(self: Pipeline, before_result: Callable[[], None]) -> Any:
        if len(self._flights) > 1 and self._flights[-1][0].plan.chunks:
            reach()
            self._flights.rotate(1)
        return original(self, before_result)

    return complete


@mutant(
    in_method(Scheduler, "_views_in_flight"),
    part="in flight",
    killers=(Killer.LEGALITY,),
    trials=PLAYED,
)
def planned_while_in_flight(original: Callable[..., Any], reach: Reach) -> Callable[..., Any]:
    """A session whose row is on its way is planned again, before its token is known."""

    def views_in_flight(self: Scheduler) -> dict[str, SessionView]:
        views = original(self)
        if views:
            reach()
        return {name: replace(view, ready=True) for name, view in views.items()}

    return views_in_flight


@mutant(
    in_method(Scheduler, "_suspend_when_landed"),
    part="in flight",
    killers=(Killer.LEGALITY,),
    trials=PLAYED,
)
def suspended_in_flight(original: Callable[..., Any], reach: Reach) -> Callable[..., Any]:
    """The cells of a session in flight are given away before its step has returned."""

    def suspend(
        self: Scheduler, view: SessionView, now_ms: float, cause: PreemptionCause, **kept: int
    ) -> None:
        if self._flight_of(view.request_id) is not None:
            reach()
        self._suspend(view, now_ms, cause, **kept)

    return suspend


@mutant(
    in_method(Scheduler, "_flight_of"),
    part="in flight",
    killers=(Killer.LEGALITY,),
    trials=PLAYED,
)
def older_flights_overlooked(original: Callable[..., Any], reach: Reach) -> Callable[..., Any]:
    """What is asked of a session in flight is put off only when it is in the newest step."""

    def flight_of(self: Scheduler, request_id: str) -> Any:
        found = original(self, request_id)
        if found is not None and found is not self._flights[-1]:
            reach()
            return None
        return found

    return flight_of


@mutant(
    in_method(Pipeline, "_fail"),
    part="in flight",
    killers=(Killer.LEGALITY, Killer.CRASH),
    trials=(exact_trial(BROKEN_OFF),),
)
def failure_spares_the_steps_behind(original: Callable[..., Any], reach: Reach) -> Callable[..., Any]:
    """When the engine breaks off, steps in flight behind the failed one are still waited for."""

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


@mutant(
    in_method(StagesInTurn, "collect"),
    part="in flight",
    killers=(Killer.LEGALITY,),
    trials=PLAYED,
)
def newest_result_given_first(original: Callable[..., Any], reach: Reach) -> Callable[..., Any]:
    """The engine gives the result of the newest step in flight in place of the oldest one's."""

    def collect(self: StagesInTurn) -> IterationResult:
        if len(self._in_flight) > 1:
            reach()
            self._in_flight.rotate(1)
        return original(self)

    return collect


@mutant(
    in_method(StagesInTurn, "collect"),
    part="in flight",
    killers=(Killer.LEGALITY,),
    trials=PLAYED,
)
def result_given_twice(original: Callable[..., Any], reach: Reach) -> Callable[..., Any]:
    """The engine gives one result for two steps in flight."""
    given: dict[int, IterationResult] = {}

    def collect(self: StagesInTurn) -> IterationResult:
        if id(self) in given:
            reach()
            return given.pop(id(self))
        given[id(self)] = original(self)
        return given[id(self)]

    return collect
