"""The verdict's truth table, every row by hand, and what checkers that break come to."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace

import pytest

from parity.cases.strategies import landmark
from parity.checkers.checker import Expectation, check_all
from parity.history import Run
from parity.records import (
    Finding,
    Outcome,
    Tier,
    Verdict,
    earliest_first,
    outcome_from_data,
    outcome_to_data,
    verdict_of,
)
from parity.run.explain import explain_outcome
from scheduler.limits import Layout
from tests.parity.gate.gate_results import DIVERGENCE

UNIFIED, STREAMS, STOCK = Layout.UNIFIED, Layout.STREAMS, Layout.STOCK
BITS, BYTES = Tier.BITS, Tier.BYTES
PASS, UNKNOWN, FAIL = Verdict.PASS, Verdict.UNKNOWN, Verdict.FAIL
WHY = "llamafile SGEMM is on"

# layout, tier, why bits cannot be compared, checkers that found something, verdict
TABLE = [
    (UNIFIED, BITS, "", (), PASS),
    (UNIFIED, BITS, "", ("bits",), FAIL),
    (UNIFIED, BITS, "", ("bytes",), FAIL),
    (UNIFIED, BITS, "", ("bits", "bytes"), FAIL),
    (UNIFIED, BITS, "", ("conservation",), FAIL),
    (UNIFIED, BITS, "", ("crash",), FAIL),
    (UNIFIED, BITS, WHY, (), UNKNOWN),
    (UNIFIED, BITS, WHY, ("bits",), UNKNOWN),
    (UNIFIED, BITS, WHY, ("bytes",), FAIL),
    (UNIFIED, BITS, WHY, ("ends",), FAIL),
    (UNIFIED, BITS, WHY, ("crash",), FAIL),
    (UNIFIED, BYTES, "", (), PASS),
    (UNIFIED, BYTES, "", ("bits",), PASS),
    (UNIFIED, BYTES, "", ("bytes",), FAIL),
    (UNIFIED, BYTES, "", ("liveness",), FAIL),
    (UNIFIED, BYTES, WHY, (), PASS),
    (UNIFIED, BYTES, WHY, ("bits",), PASS),
    (UNIFIED, BYTES, WHY, ("bytes",), FAIL),
    (UNIFIED, BYTES, WHY, ("internal",), FAIL),
    (STREAMS, BITS, "", (), PASS),
    (STREAMS, BITS, "", ("bits",), FAIL),
    (STREAMS, BITS, WHY, (), UNKNOWN),
    (STREAMS, BITS, WHY, ("reproducibility",), FAIL),
    (STREAMS, BYTES, "", ("bits",), PASS),
    (STREAMS, BYTES, "", ("bytes",), FAIL),
    (STREAMS, BYTES, WHY, (), PASS),
    (STOCK, BITS, "", (), PASS),
    (STOCK, BITS, "", ("bits", "bytes"), PASS),
    (STOCK, BITS, "", ("noise",), FAIL),
    (STOCK, BITS, "", ("bits", "bytes", "noise"), FAIL),
    (STOCK, BITS, "", ("memory",), FAIL),
    (STOCK, BITS, WHY, (), PASS),
    (STOCK, BITS, WHY, ("crash",), FAIL),
    (STOCK, BYTES, "", (), PASS),
    (STOCK, BYTES, "", ("bytes",), PASS),
    (STOCK, BYTES, "", ("noise",), FAIL),
]


def found(checkers: Iterable[str]) -> list[Finding]:
    return [Finding(checker, "session 0") for checker in checkers]


@pytest.mark.parametrize(("layout", "tier", "inexact", "checkers", "verdict"), TABLE)
def test_truth_table(layout: Layout, tier: Tier, inexact: str, checkers: tuple, verdict: Verdict) -> None:
    judged, reason = verdict_of(found(checkers), sessions=3, tier=tier, layout=layout, inexact=inexact)
    assert judged is verdict
    reasons = {PASS: "", UNKNOWN: f"bits not comparable: {WHY}", FAIL: "a case failed"}
    assert reason == reasons[verdict]


# sessions, checkers that found something, marks, required, verdict, reason
FULL = {"mixed_step": 2, "shared": 1}
MARK_TABLE = [
    (3, (), FULL, ("mixed_step", "shared"), PASS, ""),
    (3, (), {"mixed_step": 2, "shared": 0}, ("mixed_step", "shared"), FAIL, "nothing exercised: shared"),
    (3, (), {}, ("mixed_step", "shared"), FAIL, "nothing exercised: mixed_step, shared"),
    (3, (), {"mixed_step": 2}, (), PASS, ""),
    (3, ("bytes",), {}, ("shared",), FAIL, "a case failed"),
    (0, (), FULL, ("shared",), UNKNOWN, "no session was compared"),
    (0, (), {}, ("shared",), FAIL, "nothing exercised: shared"),
    (0, (), {}, (), UNKNOWN, "no session was compared"),
    (0, ("ends",), {}, (), FAIL, "a case failed"),
]


@pytest.mark.parametrize(("sessions", "checkers", "marks", "required", "verdict", "reason"), MARK_TABLE)
def test_marks_and_sessions(
    sessions: int,
    checkers: tuple[str, ...],
    marks: dict[str, int],
    required: tuple[str, ...],
    verdict: Verdict,
    reason: str,
) -> None:
    for layout in Layout:
        for tier in Tier:
            judged = verdict_of(
                found(checkers), sessions=sessions, tier=tier, layout=layout, marks=marks, required=required
            )
            is_measured = layout is STOCK and checkers == ("bytes",)
            expected = (FAIL, "nothing exercised: shared") if is_measured else (verdict, reason)
            assert judged == expected


class Broken:
    name = "ends"

    def check(self, run: Run, expectation: Expectation) -> Iterable[Finding]:
        yield Finding(self.name, "seen before it broke", {"step": 9})
        raise IndexError("list index\nout of range")


class Sound:
    name = "memory"

    def check(self, run: Run, expectation: Expectation) -> Iterable[Finding]:
        yield Finding(self.name, "early", {"step": 2})


def test_exception_of_a_checker_is_a_finding_of_that_checker_and_the_others_are_heard() -> None:
    run = Run(landmark("llama", UNIFIED), findings=[Finding("liveness", "late", {"step": 40})])
    findings = check_all([Broken(), Sound()], run, Expectation({}, None, run))
    assert [(f.checker, f.text) for f in findings] == [
        ("memory", "early"),
        ("ends", "seen before it broke"),
        ("liveness", "late"),
        ("ends", "the checker broke: IndexError: list index out of range"),
    ]
    assert findings[-1].data == {"exception": "IndexError"}


def test_findings_are_told_earliest_first_and_those_of_no_step_last() -> None:
    named = [Finding("a", "", {"step": 7}), Finding("b", ""), Finding("c", "", {"step": 0}), Finding("d", "")]
    assert [finding.checker for finding in earliest_first(named)] == ["c", "a", "b", "d"]


def test_findings_come_out_of_a_worker_and_problems_stay_texts() -> None:
    case = landmark("llama", UNIFIED)
    findings = (
        Finding("crash", "SIGABRT"),
        Finding("bits", "session 1 from its token 2 on", {"session": 1, "token": 2}),
        Finding("ends", "session 3 ended twice", {"step": 4, "session": 3}),
    )
    data = outcome_to_data(Outcome(case=case, verdict=FAIL, crashed=True, findings=findings))
    assert data["problems"] == ["ends: session 3 ended twice"]
    assert outcome_from_data(case, json.loads(json.dumps(data))).findings == findings


def test_every_finding_is_told_the_earliest_first() -> None:
    late = replace(DIVERGENCE, session=1, scheduler_step=20)
    findings = (
        Finding("conservation", "cells 3 are lost", {"step": 7}),
        Finding("ends", "session 3 ended twice", {"step": 25}),
        Finding("memory", "something is left"),
    )
    divergences = tuple(replace(late, session=session) for session in range(6))
    case = landmark("llama", UNIFIED)
    text = explain_outcome(Outcome(case=case, verdict=FAIL, findings=findings, divergences=divergences))
    places = [
        text.index(part)
        for part in (
            "problem: conservation: cells 3 are lost",
            *(f"session {session} differs first" for session in range(6)),
            "problem: ends: session 3 ended twice",
            "problem: memory: something is left",
        )
    ]
    assert places == sorted(places)
