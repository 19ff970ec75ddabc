"""Faults are drawn at any step of a case, however long it takes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, Phase, find, given, settings

from parity.cases.strategies import cases, last_step, tokens_of
from parity.records import Case, FaultKind, Session
from parity.run.runner import replay
from scheduler.limits import Layout

QUICK = settings(max_examples=100, deadline=None, database=None, suppress_health_check=list(HealthCheck))


@pytest.mark.parametrize("layout", [Layout.UNIFIED, Layout.STREAMS])
def test_case_without_faults_is_through_by_its_last_step(layout: Layout) -> None:
    @settings(QUICK, max_examples=25, derandomize=True)
    @given(cases("llama", layout))
    def holds(case: Case) -> None:
        trace = replay(replace(case, faults=())).run.trace
        assert max(traced.step for traced in trace) <= last_step(case)

    holds()


def test_last_step_follows_the_work() -> None:
    one = Case(family="llama", model="llama", sessions=(Session(prompt=tokens_of(1, 90), max_tokens=30),))
    assert 30 < last_step(one) < 90
    slow = replace(one, max_num_batched_tokens=1)
    assert last_step(slow) >= 119 > 40
    assert last_step(replace(one, sessions=one.sessions * 4, max_num_seqs=1)) >= 120


@pytest.mark.parametrize("kind", [FaultKind.PREEMPT, FaultKind.CANCEL])
def test_faults_are_drawn_late_in_a_long_case(kind: FaultKind) -> None:
    def is_late(case: Case) -> bool:
        return any(fault.kind is kind and 60 < fault.step <= last_step(case) for fault in case.faults)

    # One case in some sixty is one: of a hundred draws, two runs in six found none.
    found = settings(QUICK, max_examples=3000, phases=[Phase.generate])
    assert is_late(find(cases("llama", Layout.UNIFIED), is_late, settings=found))
