"""Large failing cases become small ones that fail for the same reason."""

from __future__ import annotations

from dataclasses import replace

import pytest

from parity.campaign.large_cases import MOST_SESSIONS, MOST_TOKENS, PLANTED, large_case, shrink_planted
from parity.campaign.rerun import Rerun
from parity.cases.shrink import fault_signature, is_same_fault, shrink_case, size_of, without_sessions
from parity.records import Case, Fault, FaultKind, Outcome, Verdict
from parity.run.runner import run_exact_case

IN_DEFAULT_SUITE = ("prefix_shared_one_token_too_far", "cancel_in_flight_lost", "logits_rows_swapped")


def check_shrunk(name: str) -> None:
    shrunk = shrink_planted(name)
    run = Rerun(exact=True, mutant=name)
    assert len(shrunk.before.sessions) >= 12
    assert is_same_fault(fault_signature(run(shrunk.before)), fault_signature(run(shrunk.after)))
    sessions, tokens, _, _ = size_of(shrunk.after)
    assert sessions <= MOST_SESSIONS and tokens <= MOST_TOKENS
    assert run_exact_case(shrunk.after).verdict is Verdict.PASS  # it is the fault that fails, not the case


@pytest.mark.parametrize("name", IN_DEFAULT_SUITE)
def test_planted_failing_case_shrinks(name: str) -> None:
    check_shrunk(name)


@pytest.mark.nightly
@pytest.mark.parametrize("name", [name for name in PLANTED if name not in IN_DEFAULT_SUITE])
def test_every_planted_failing_case_shrinks(name: str) -> None:
    check_shrunk(name)


def test_there_are_twenty_planted_cases() -> None:
    assert len(set(PLANTED)) == 20


def test_shrinking_is_deterministic() -> None:
    def run() -> tuple[Case, int]:
        rerun = Rerun(exact=True, mutant="session_ends_twice")
        return shrink_case(large_case("llama", 1), rerun), rerun.count

    assert run() == run()


def test_passing_case_is_left_alone() -> None:
    case = large_case("llama", 1)
    assert shrink_case(case, run_exact_case) is case


def test_shrinking_asks_at_most_as_often_as_allowed() -> None:
    rerun = Rerun(exact=True, mutant="logits_rows_swapped")
    shrink_case(large_case("llama", 1), rerun, max_runs=25)
    assert rerun.count <= 26


def test_shrinking_ends_in_time_with_the_smallest_case_so_far() -> None:
    seconds = [0.0]

    def slow(case: Case) -> Outcome:
        seconds[0] += 30.0
        return rerun(case)

    rerun, case = Rerun(exact=True, mutant="logits_rows_swapped"), large_case("llama", 1)
    small = shrink_case(case, slow, seconds=100.0, clock=lambda: seconds[0])
    assert rerun.count == 4  # they end after 30, 60, 90 and 120 s
    assert size_of(small) < size_of(case) and rerun(small).verdict is Verdict.FAIL


def test_faults_follow_their_sessions() -> None:
    case = large_case("llama", 1)
    faults = tuple(Fault(kind=FaultKind.CANCEL, step=i, session=i) for i in range(4))
    fewer = without_sessions(replace(case, faults=faults), {0, 2})
    assert [(fault.step, fault.session) for fault in fewer.faults] == [(1, 0), (3, 1)]
    assert fewer.sessions[:2] == (case.sessions[1], case.sessions[3])
