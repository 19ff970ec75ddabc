"""Ledgers refuse every way of telling a run better than it was: one mutation each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest

from parity.checkers.outcomes import End, Served, served_sessions
from parity.checkers.policy import (
    check_hidden_truth,
    check_logical_plans,
    check_original_ages,
    check_original_clocks,
    check_published_service,
)
from parity.checkers.service import service_of, starved_clients
from parity.history import Run
from parity.records import Case, Fault, FaultKind, Session
from parity.run.runner import Replay, replay
from parity.suites.policies import busy_case
from scheduler.records import PlannedChunk, ServiceLevel, SessionView


@pytest.fixture(scope="module")
def failing_run() -> Replay:
    """A run with a failed step and a preemption under the policy that publishes service."""
    faults = (Fault(kind=FaultKind.DECODE_ERROR, step=3), Fault(kind=FaultKind.PREEMPT, step=9, session=2))
    return replay(busy_case("vtc_completed", faults=faults))


# -- service


def published(played: Replay) -> dict[str, int]:
    return played.scheduler.policy.published_service(played.scheduler.policy_memory)


def problems_of(played: Replay, service: dict[str, int]) -> list[str]:
    found = check_published_service(played.run, service, input_weight=1, output_weight=2)
    return [str(finding) for finding in found]


def test_completed_service_is_accepted(failing_run: Replay) -> None:
    assert problems_of(failing_run, published(failing_run)) == []


def test_planned_work_published_as_service_is_rejected(failing_run: Replay) -> None:
    planned: dict[str, int] = {}
    for traced in failing_run.run.trace:
        for chunk in traced.flight.plan.chunks:
            client = traced.flight.views[chunk.request_id].request.client_id
            planned[client] = planned.get(client, 0) + chunk.stop - chunk.start
    assert problems_of(failing_run, planned)


def test_failed_work_published_as_service_is_rejected(failing_run: Replay) -> None:
    failed = next(traced for traced in failing_run.run.trace if traced.result is None)
    chunk = failed.flight.plan.chunks[0]
    client = failed.flight.views[chunk.request_id].request.client_id
    service = published(failing_run)
    service[client] += chunk.stop - chunk.start
    assert [problem.split(":")[0] for problem in problems_of(failing_run, service)] == ["service"]


def test_service_of_a_run_has_no_rebuilt_row(failing_run: Replay) -> None:
    ledger = service_of(failing_run.run)
    prompts = sum(len(session.prompt) for session in failing_run.run.case.sessions)
    rebuilt = sum(record.recompute_tokens for record in failing_run.run.records)
    shared = sum(record.prefix_tokens_saved for record in failing_run.run.records)
    assert rebuilt and shared
    assert sum(event.input_rows for event in ledger.events) <= prompts
    assert sum(event.outputs for event in ledger.events) == sum(
        len(end.tokens) for end in failing_run.run.completions.values()
    )


# -- clocks


def test_a_clock_restarted_at_admission_is_rejected() -> None:
    played = replay(busy_case("least_slack"))
    cost = played.scheduler.policy.cost
    assert check_original_clocks(played.run, cost) == []
    assert check_original_clocks(with_arrivals_at_admission(played.run), cost)


def test_a_clock_restarted_at_resume_is_rejected() -> None:
    faults = tuple(Fault(kind=FaultKind.PREEMPT, step=step, session=step % 5) for step in (6, 9, 14))
    played = replay(busy_case("least_slack", faults=faults))
    resumed = {
        intent.request_id
        for traced in played.run.trace
        for intent in traced.flight.plan.intents
        if intent.kind.value == "resume"
    }
    assert resumed
    assert check_original_clocks(played.run, played.scheduler.policy.cost) == []
    assert check_original_clocks(
        with_arrivals_at_admission(played.run, only=resumed), played.scheduler.policy.cost
    )


def test_an_age_that_restarts_in_every_step_is_rejected() -> None:
    played = replay(busy_case("aging"))
    quantum_ms = played.scheduler.policy.quantum_ms
    assert check_original_ages(played.run, quantum_ms) == []
    for traced in played.run.trace:
        plan, views = traced.flight.plan, traced.flight.views
        declared = [views[chunk.request_id].request.priority for chunk in plan.chunks]
        keys = ((k[0], p, *k[2:]) for k, p in zip(plan.order, declared, strict=True))
        traced.flight.plan = replace(plan, order=tuple(keys))
    assert check_original_ages(played.run, quantum_ms)


def with_arrivals_at_admission(run: Run, only: set[str] | None = None) -> Run:
    """The run as if order keys had been made with clocks that start when a session enters."""
    for traced in run.trace:
        plan, keys = traced.flight.plan, []
        entering = {intent.request_id for intent in plan.intents}
        for chunk, key in zip(plan.chunks, plan.order, strict=True):
            view = traced.flight.views[chunk.request_id]
            origin = view.request.arrival_ms if view.emitted == 0 else view.last_emitted_ms
            late = traced.flight.started_ms - origin if chunk.request_id in entering else 0.0
            if only is not None and chunk.request_id not in only:
                late = 0.0
            keys.append((key[0] + late, *key[1:]))
        traced.flight.plan = replace(plan, order=tuple(keys))
    return run


def test_ttft_counts_from_arrival_although_the_session_waited() -> None:
    served = served_sessions(replay(busy_case("single_lane")).run)
    assert max(item.ttft_ms for item in served) > 500
    assert all(item.ttft_ms == item.emissions_ms[0] - item.arrival_ms for item in served)


def test_clocks_that_run_backwards_are_refused() -> None:
    with pytest.raises(ValueError, match="backwards"):
        served((5.0, 4.0))


def served(emissions: tuple[float, ...], end: End = End.COMPLETED, slo: ServiceLevel | None = None) -> Served:
    return Served(
        session=0,
        client_id="a",
        arrival_ms=0.0,
        slo=slo or ServiceLevel(),
        emissions_ms=emissions,
        end=end,
        ended_ms=emissions[-1] if emissions else 0.0,
    )


def test_request_of_one_output_has_no_gap_and_can_be_valid() -> None:
    one = served((10.0,), slo=ServiceLevel(ttft_ms=10.0, tbt_ms=1.0))
    assert one.gaps_ms == () and one.is_valid
    assert served((10.0, 30.0, 40.0)).gaps_ms == (20.0, 10.0)


# -- hidden truth and physical facts


def test_a_plan_that_depends_on_a_hidden_length_is_rejected() -> None:
    first, second = (replay(busy_case("fcfs", hidden=hidden)).run for hidden in (lambda i: 9, lambda i: 4))
    assert check_hidden_truth(first, second) == []
    flight = second.trace[1].flight
    assert flight.plan.chunks
    flight.plan = replace(flight.plan, chunks=flight.plan.chunks[:-1], order=flight.plan.order[:-1])
    assert [str(finding) for finding in check_hidden_truth(first, second)] == [
        "hidden length: step 1 is planned differently after equal results"
    ]


def test_the_hidden_length_of_a_session_is_no_part_of_what_a_policy_sees() -> None:
    assert "hidden_output_tokens" not in SessionView.__slots__
    session = busy_case("fcfs").sessions[0]
    shown = session.to_request(0, arrival_ms=0.0)
    assert replace(session, hidden_output_tokens=1).to_request(0, arrival_ms=0.0) == shown


class ChunkWithSequence(PlannedChunk):
    """A chunk that knows its sequence id."""

    __slots__ = ("seq_id",)


@pytest.mark.parametrize(
    "mutate",
    [
        lambda plan: replace(plan, chunks=(ChunkWithSequence("s0", 0, 0, 0, 1), *plan.chunks)),
        lambda plan: replace(plan, order=((b"address",), *plan.order[1:])),
        lambda plan: replace(plan, ledger={"cells": [1, 2]}),
    ],
)
def test_physical_facts_in_a_plan_are_rejected(mutate: Callable[..., Any]) -> None:
    run = replay(busy_case("fcfs")).run
    assert check_logical_plans(run) == []
    run.trace[0].flight.plan = mutate(run.trace[0].flight.plan)
    assert [finding.checker for finding in check_logical_plans(run)] == ["physical"]


# -- windows


def waited_and_gave_up(cancelled_at: int, blocked: bool = False) -> Run:
    """One lane of ten steps for s0 of client a; s1 of client b waits, and is cancelled."""
    holder = Session(prompt=(1,), max_tokens=10, client_id="a")
    waits = Session(prompt=(2,), max_tokens=1, client_id="b")
    layer = {"policy": "layer_ready", "policy_options": (("facts", {"s1": [["miss", 0]]}),)}
    return replay(
        Case(
            family="llama",
            model="llama",
            sessions=(holder, waits),
            max_num_seqs=1,
            prefix_cache=False,
            faults=(Fault(kind=FaultKind.CANCEL, step=cancelled_at, session=1),),
            **(layer if blocked else {}),
        )
    ).run


def test_a_session_that_waited_ended_when_it_was_cancelled() -> None:
    item = served_sessions(waited_and_gave_up(6))[1]
    assert (item.end, item.ended_ms, item.emissions_ms) == (End.CANCELLED, 60.0, ())


@pytest.mark.parametrize(("until_ms", "end"), [(60.0, End.CANCELLED), (59.9, End.OPEN)])
def test_a_cancel_after_the_window_leaves_its_session_open(until_ms: float, end: End) -> None:
    assert served_sessions(waited_and_gave_up(6), until_ms=until_ms)[1].end is end


@pytest.mark.parametrize(("until_ms", "end"), [(40.0, End.REJECTED), (39.9, End.OPEN)])
def test_a_rejection_after_the_window_leaves_its_session_open(until_ms: float, end: End) -> None:
    """One lane; s1 is due at 45 and needs a tick of 10: it is given up at 40."""
    case = Case(
        family="llama",
        model="llama",
        sessions=(
            Session(prompt=(1,), max_tokens=10),
            Session(prompt=(2,), max_tokens=1, slo=ServiceLevel(ttft_ms=45.0)),
        ),
        max_num_seqs=1,
        policy_options=(("overload", {"kind": "reject_infeasible"}),),
    )
    assert served_sessions(replay(case).run, until_ms=until_ms)[1].end is end


def test_a_client_that_waited_in_vain_and_was_cancelled_is_starved_until_then() -> None:
    ledger = service_of(waited_and_gave_up(6))
    assert starved_clients(ledger, start_ms=0.0, stop_ms=60.0) == ["b"]
    assert starved_clients(ledger, start_ms=0.0, stop_ms=60.1) == []


def test_a_client_whose_layers_are_elsewhere_is_not_starved() -> None:
    ledger = service_of(waited_and_gave_up(6, blocked=True))
    assert ledger.backlog("b") == [(0.0, 60.0)]
    assert ledger.eligible("b") == []
    assert starved_clients(ledger, start_ms=0.0, stop_ms=60.0) == []


def test_a_resumed_session_finds_no_prefix_hit() -> None:
    """A prefix of eight is resident; s1 shares seven of it, is suspended and finds it again."""
    prompt = tuple(range(1, 9))
    case = Case(
        family="llama",
        model="llama",
        sessions=(
            Session(prompt=prompt, max_tokens=1),
            Session(prompt=prompt, max_tokens=9, arrival_step=2),
        ),
        prefix_block_tokens=1,
        faults=(Fault(kind=FaultKind.PREEMPT, step=5, session=1),),
    )
    records = replay(case).run.records
    assert sum(record.resumed for record in records) == 1
    assert sum(record.prefix_hits for record in records) == 1
    assert sum(record.prefix_misses for record in records) == 1
    assert sum(record.prefix_tokens_saved for record in records) == 7


@pytest.mark.parametrize(
    ("key", "is_logical"),
    [(True, True), (3, True), (1.5, True), ("s1", True), (Fraction(1, 3), True), ((1, 2.5), True)]
    + [(None, False), (object(), False), ((1, None), False)],
)
def test_sessions_are_ordered_by_comparable_keys_and_by_no_address(
    failing_run: Replay, key: Any, is_logical: bool
) -> None:
    first = failing_run.run.trace[0]
    flight = replace(first.flight, plan=replace(first.flight.plan, order=(key,)))
    run = Run(failing_run.run.case, trace=[replace(first, flight=flight)])
    assert (check_logical_plans(run) == []) is is_logical
