"""Several steps in flight: who is in which, worked out by hand, and what may not happen meanwhile."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from parity.campaign.hunt import draw_case, judge_hunted
from parity.mutants.in_flight import overlapped
from parity.records import Case, Fault, FaultKind, Verdict
from parity.run.runner import run_exact_case
from scheduler.engine import EngineFailure
from scheduler.flight import Flight
from scheduler.pipeline import Pipeline
from scheduler.policies import policy_names
from scheduler.policies.fcfs import Fcfs
from scheduler.policy.plan import PlanBuilder
from scheduler.policy.state import SchedulerState
from scheduler.records import FinishReason, IllegalTransition, IterationPlan, PreemptionReason, SessionState
from tests.scheduler.serving import OPTIMISTIC, Serving, request

ONE_BATCH_AT_A_TIME = ("single_lane", "fixed_batch")  # nobody joins while somebody runs


def planned(flight: Flight) -> list[tuple[str, int, int]]:
    return [(chunk.request_id, chunk.start, chunk.stop) for chunk in flight.plan.chunks]


def two_sessions(**settings: object) -> Serving:
    serving = Serving(steps_in_flight=2, max_num_batched_tokens=8, **settings)
    assert serving.submit(request("a", 2, 3), request("b", 3, 3)) == [None, None]
    return serving


def test_two_sessions_take_turns_in_two_steps_in_flight() -> None:
    """Each step has half of who is live, so one of them, and the other one's row is on its way."""
    serving = two_sessions()
    flights = [serving.launch(), serving.launch()]
    seen = [*map(planned, flights)]
    for _ in range(4):
        serving.commit(flights.pop(0))
        flights.append(serving.launch())
        seen.append(planned(flights[-1]))
    assert seen == [
        [("a", 0, 2)],
        [("b", 0, 3)],
        [("a", 2, 3)],
        [("b", 3, 4)],
        [("a", 3, 4)],
        [("b", 4, 5)],
    ]
    for flight in flights:
        serving.commit(flight)
    assert {name: end.reason for name, end in serving.ends.items()} == dict.fromkeys(
        "ab", FinishReason.LENGTH
    )
    assert serving.scheduler.is_idle
    serving.check_all_as_alone()


def test_no_more_steps_are_begun_than_may_be_in_flight() -> None:
    serving = two_sessions()
    serving.launch(), serving.launch()
    with pytest.raises(IllegalTransition, match="2 steps are already in flight"):
        serving.launch()
    assert serving.scheduler.num_in_flight == 2


class GivesPlacesAway(Fcfs):
    """Preempts whoever runs, and lets the next one in at once."""

    def plan_iteration(self, state: SchedulerState) -> IterationPlan:
        plan = PlanBuilder(state, self)
        free = replace(state, running=())
        for name in state.running:
            plan.preempt(state.views[name], "the next one's turn")
        plan.state = free
        for name in state.waiting:
            plan.enter(state.views[name])
            break
        plan.state = state
        return plan.build()


def test_the_place_of_a_session_that_is_preempted_in_flight_is_taken_until_its_step_returns() -> None:
    """One place: while a is in flight b may not have it, once a has landed it may."""
    serving = Serving(steps_in_flight=2, max_num_seqs=1)
    serving.scheduler.policy = GivesPlacesAway()
    serving.submit(request("a", 2, 3), request("b", 3, 3))
    first = serving.launch()
    assert planned(first) == [("a", 0, 2)]
    with pytest.raises(IllegalTransition, match="a place in flight is given away: 2"):
        serving.launch()
    serving.commit(first)
    assert planned(serving.launch()) == [("b", 0, 3)]
    assert list(serving.scheduler.table.running) == ["b"]


def test_everybody_in_flight_leaves_nothing_to_plan() -> None:
    serving = Serving(steps_in_flight=2)
    serving.submit(request("a", 2, 3))
    first, second = serving.launch(), serving.launch()
    assert (planned(first), planned(second)) == ([("a", 0, 2)], [])


def test_results_are_applied_in_order_only() -> None:
    serving = two_sessions()
    first, second = serving.launch(), serving.launch()
    results = [serving.engine.execute(f.plan, f.batch, serving.now_ms) for f in (first, second)]
    with pytest.raises(IllegalTransition, match="result of another decision"):
        serving.scheduler.finish(results[1], serving.now_ms)
    serving.scheduler.finish(results[0], serving.now_ms)
    serving.scheduler.finish(results[1], serving.now_ms)
    with pytest.raises(IllegalTransition, match="without a step in flight"):
        serving.scheduler.finish(results[1], serving.now_ms)


@pytest.mark.parametrize("older", [True, False])
def test_a_session_that_is_cancelled_in_flight_keeps_its_cells_until_its_own_step_returns(
    older: bool,
) -> None:
    serving = two_sessions()
    first, second = serving.launch(), serving.launch()
    name = "a" if older else "b"
    assert serving.scheduler.cancel(name, serving.now_ms)
    assert not serving.scheduler.cancel(name, serving.now_ms)
    serving.commit(first)
    assert (name in serving.scheduler.memory.residences) is not older
    assert ("a" in serving.ends) is older
    serving.commit(second)
    assert serving.ends[name].reason is FinishReason.CANCELLED and serving.ends[name].tokens == ()
    assert name not in serving.scheduler.memory.residences


def test_a_session_that_is_preempted_in_flight_is_suspended_with_its_new_row() -> None:
    serving = two_sessions()
    first, second = serving.launch(), serving.launch()
    assert serving.scheduler.preempt("b", serving.now_ms)
    serving.commit(first)
    assert serving.scheduler.table.views["b"].state is SessionState.RUNNING
    serving.commit(second)
    view = serving.scheduler.table.views["b"]
    assert (view.state, view.emitted, view.committed, view.computed) == (SessionState.SUSPENDED, 1, 3, 0)
    [record] = second.preemptions
    assert (record.victim, record.reason, record.released_rows) == ("b", PreemptionReason.ASKED, 3)


def test_the_victim_is_the_policys_even_in_flight_and_gives_way_when_its_step_returns() -> None:
    """Eight cells, three sessions of three rows with no cells kept free: a and b decode, c is the newest.

    The first lack is met by b, in the step in which c's row is on its way: c gives way when that returns, and
    b waits until then.
    """
    serving = Serving(
        cells=10, steps_in_flight=2, max_num_batched_tokens=8, prefix_cache=False, options=OPTIMISTIC
    )
    serving.submit(request("a", 2, 6), request("b", 2, 6), request("c", 2, 6))
    pipeline = Pipeline(serving.scheduler, serving.engine, depth=2)
    flights = []
    while not any(flight.preemptions for flight in flights):
        flights.append(pipeline.begin(serving.now_ms))
        pipeline.launch()
        waiting = [name for flight in flights[-2:] for name, what in flight.late.items()]
        if pipeline.must_complete:
            pipeline.complete()
    [record] = [item for flight in flights for item in flight.preemptions]
    assert (record.victim, record.reason) == ("c", PreemptionReason.NO_CELLS)
    assert record.requester in ("a", "b") and record.candidates == ("a", "b", "c")
    assert waiting == ["c"], "it was suspended at once, though its row was on its way"
    asked = next(flight for flight in flights if flight.plan.decision_id == record.decision_id)
    assert record.requester not in [chunk.request_id for chunk in asked.plan.chunks]


def test_a_failure_ends_all_steps_in_flight_and_is_counted_for_the_failed_one_alone() -> None:
    serving = two_sessions()
    for _ in range(3):
        first, second = serving.launch(), serving.launch()
        assert planned(first)[0][0] == "a" and planned(second)[0][0] == "b"
        serving.scheduler.fail(EngineFailure("gone"), serving.now_ms)
        assert serving.scheduler.num_in_flight == 0
    serving.collect()
    assert serving.ends["a"].reason is FinishReason.FAILED, "three failed steps of its own"
    assert serving.scheduler.table.views["b"].state is SessionState.SUSPENDED
    serving.scheduler.abandon("enough", serving.now_ms)
    serving.collect()
    assert serving.ends["b"].error == "enough" and serving.scheduler.is_idle


def test_abandon_forgets_what_is_in_flight() -> None:
    serving = two_sessions()
    serving.launch(), serving.launch()
    serving.scheduler.abandon("over", serving.now_ms)
    assert serving.scheduler.is_idle and serving.scheduler.memory.counts().cells_used == 0
    serving.submit(request("d", 4, 2))
    assert planned(serving.launch()) == [("d", 0, 4)]


@pytest.mark.parametrize("policy", policy_names())
def test_every_policy_gives_the_same_bytes_with_two_to_four_steps_in_flight(policy: str) -> None:
    """Tight pools, shared prefixes, drawn options and faults, as in the hunt."""
    marks: Counter[str] = Counter()
    for number in range(12):
        case = replace(draw_case(number, [policy]), steps_in_flight=2 + number % 3)
        outcome, _ = judge_hunted(case)
        assert outcome.verdict is Verdict.PASS, (number, outcome.findings)
        marks.update(outcome.marks)
    assert (marks["overlapped"] > 0) is (policy not in ONE_BATCH_AT_A_TIME)


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3next"])
def test_a_run_with_steps_in_flight_repeats_and_marks_say_so(family: str) -> None:
    outcome = run_exact_case(overlapped(family))
    assert outcome.verdict is Verdict.PASS, outcome.findings
    assert outcome.marks["overlapped"] > 0 and outcome.marks["preempted_in_flight"] > 0
    alone = run_exact_case(replace(overlapped(family), steps_in_flight=1))
    assert alone.marks["overlapped"] == 0


def test_a_case_file_names_the_steps_only_where_there_are_several() -> None:
    case = overlapped("llama", faults=(Fault(kind=FaultKind.DECODE_ERROR, step=9),))
    assert Case.from_json(case.to_json()) == case
    assert '"steps_in_flight": 2' in case.to_json()
    assert "steps_in_flight" not in replace(case, steps_in_flight=1).to_json()
