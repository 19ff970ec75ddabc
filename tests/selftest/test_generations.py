"""A caller that gives up and asks the same again under its id is answered as if it had never asked before."""

from __future__ import annotations

from dataclasses import replace

import pytest

from parity.cases.strategies import edges, landmark
from parity.checkers.checker import Expectation
from parity.checkers.ends import EndsChecker
from parity.checkers.marks import count_marks, possible_marks
from parity.engines.numerics import ROW
from parity.mutants import cases
from parity.records import Fault, FaultKind, Verdict
from parity.run.contained import run_case
from parity.run.runner import drive_exact, exact_engine, exact_solo, run_exact_case
from scheduler.limits import Layout
from scheduler.records import FinishReason


@pytest.mark.parametrize("step", range(12))
@pytest.mark.parametrize("in_flight", [False, True], ids=["before", "in flight"])
def test_resubmission_at_any_step_gives_the_whole_answer(step: int, in_flight: bool) -> None:
    for family in ("gemma2", "qwen3next"):
        for session in range(4):
            fault = Fault(kind=FaultKind.RESUBMIT, step=step, session=session, in_flight=in_flight)
            case = cases.mixed(family, faults=(fault,))
            outcome = run_exact_case(case)
            assert outcome.verdict is Verdict.PASS, outcome.findings
            assert outcome.sessions == outcome.bit_identical == 4


def test_both_generations_are_in_the_history() -> None:
    fault = Fault(kind=FaultKind.RESUBMIT, step=6, session=1, in_flight=True)
    case = cases.mixed("llama", faults=(fault,))
    run = drive_exact(case, exact_engine(case))
    (earlier,) = run.earlier
    whole = exact_solo(case, 1).tokens
    assert (earlier.completion.generation, earlier.completion.reason) == (0, FinishReason.CANCELLED)
    assert earlier.completion.tokens == whole[: len(earlier.completion.tokens)]
    assert (run.completions[1].generation, run.completions[1].tokens) == (1, whole)
    assert run.streams[1] == list(whole)
    marks = count_marks(run)
    assert (marks["resubmitted"], marks["resumed"], marks["preempted"]) == (1, 0, 0)


def test_a_generation_that_is_given_up_keeps_what_it_was_given_and_no_more() -> None:
    fault = Fault(kind=FaultKind.RESUBMIT, step=5, session=1)
    case = cases.mixed("llama", faults=(fault,))
    run = drive_exact(case, exact_engine(case))
    (earlier,) = run.earlier
    checker, expectation = EndsChecker(), Expectation({}, None, run)
    assert earlier.stream and list(checker.check(run, expectation)) == []
    short = replace(earlier.completion, tokens=earlier.completion.tokens[:-1])
    run.earlier[0] = replace(earlier, completion=short)
    (finding,) = checker.check(run, expectation)
    assert finding.data == {"step": 5, "session": 1}
    run.earlier[0] = replace(earlier, completion=replace(earlier.completion, reason=FinishReason.LENGTH))
    (finding,) = checker.check(run, expectation)
    assert finding.text == "session 1 was given up at step 5 but ended by length"


@pytest.mark.parametrize("layout", Layout)
@pytest.mark.parametrize("family", cases.FAMILIES)
def test_fixed_cases_hit_every_mark_that_a_layout_can_have(family: str, layout: Layout) -> None:
    outcomes = [run_exact_case(fixed(family, layout)) for fixed in (landmark, edges)]
    assert [outcome.problems for outcome in outcomes] == [(), ()]
    zero = [mark for mark in possible_marks(layout, pads=True) if not any(o.marks[mark] for o in outcomes)]
    assert zero == []


def test_the_same_on_llama_cpp() -> None:
    outcomes = [run_case(fixed("llama", Layout.UNIFIED), profile=ROW) for fixed in (landmark, edges)]
    assert [outcome.verdict for outcome in outcomes] == [Verdict.PASS, Verdict.PASS]
    marks = possible_marks(Layout.UNIFIED, pads=True)
    assert [mark for mark in marks if not any(outcome.marks[mark] for outcome in outcomes)] == []


def test_padding_rows_are_asked_for_only_where_there_are_some() -> None:
    assert "padded_call" in possible_marks(Layout.UNIFIED, pads=True)
    for layout, pads in ((Layout.UNIFIED, False), (Layout.STREAMS, True), (Layout.STOCK, True)):
        assert "padded_call" not in possible_marks(layout, pads=pads)
        assert len(possible_marks(layout, pads=pads)) == 18
