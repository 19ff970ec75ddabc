"""The suite's verdicts on runs that are stand-ins: what fails, what is unknown, what is kept of a failure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from parity.cases.files import load_case
from parity.cases.shrink import size_of
from parity.cases.strategies import landmark
from parity.checkers.marks import POLICY_MATTERED, possible_marks
from parity.engines.numerics import ROW
from parity.models.families import load_families
from parity.models.splits import Split
from parity.records import Case, Finding, Outcome, Tier, Verdict, broken_outcome
from parity.run.runner import run_exact_case
from parity.run.under_test import Brought
from parity.suites.policies import check_decides
from parity.suites.suite import (
    SHRINK_RUNS,
    SuiteResult,
    failures_folder,
    pinned_splits,
    run_split_suite,
    run_suite,
)
from scheduler.limits import Layout
from scheduler.policies.vtc import Vtc
from scheduler.policy.base import Policy
from tests.parity.gate.gate_results import DIVERGENCE

MARKS = ("mixed_step", "shared")
ALL_MARKS = possible_marks(Layout.UNIFIED, pads=True, overlaps=True)
LLAMAFILE = "llamafile SGEMM is on"
FIRST_TOKEN = replace(DIVERGENCE, session=0, step=0, chunks=((0, 1),), neighbours=())
Run = Callable[[Case], Outcome]


def green(case: Case) -> Outcome:
    count = len(case.sessions)
    return Outcome(
        case=case,
        verdict=Verdict.PASS,
        sessions=count,
        bit_identical=count,
        byte_identical=count,
        marks=dict.fromkeys(MARKS, 1),
    )


def differing(case: Case, *, in_bytes: bool = True) -> Outcome:
    outcome = green(case)
    wrong = [Finding(checker, "session 0", {"session": 0}) for checker in ("bits", "bytes")[: 1 + in_bytes]]
    return replace(
        outcome,
        findings=tuple(wrong),
        verdict=Verdict.FAIL,
        bit_identical=outcome.sessions - 1,
        byte_identical=outcome.sessions - in_bytes,
        divergences=(FIRST_TOKEN,),
    )


def suite(run: Run, folder: Path, *, layout: Layout = Layout.UNIFIED, **settings: Any) -> SuiteResult:
    settings = {"min_sessions": 10, "marks": MARKS, **settings}
    return run_suite("llama", layout, run=run, failures=folder, **settings)


@pytest.fixture(autouse=True)
def exact_build(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    choice = SimpleNamespace(exact=True, reason="", profile=ROW)
    monkeypatch.setattr("parity.suites.suite.profile_of", lambda model: choice)
    return choice


@pytest.fixture
def inexact_build(exact_build: SimpleNamespace) -> None:
    exact_build.exact, exact_build.reason = False, LLAMAFILE


def test_suite_of_identical_sessions_passes(tmp_path: Path) -> None:
    result = suite(green, tmp_path)
    assert (result.verdict, result.reason, result.case_file) == (Verdict.PASS, "", "")
    assert result.sessions >= 10 and list(tmp_path.iterdir()) == []


def test_mark_that_stays_zero_fails_the_suite_and_is_named(tmp_path: Path) -> None:
    result = suite(lambda case: replace(green(case), marks={"mixed_step": 1}), tmp_path)
    assert (result.verdict, result.missing) == (Verdict.FAIL, ("shared",))
    assert result.reason == "nothing exercised: shared"


def test_suite_whose_policy_never_decided_otherwise_than_fcfs_is_red(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = suite(green, tmp_path, policy="vtc")
    assert result.verdict is Verdict.PASS and result.marks[POLICY_MATTERED] == 1
    monkeypatch.setattr(Vtc, "waiting_order", Policy.waiting_order)
    result = suite(green, tmp_path, policy="vtc")
    assert (result.verdict, result.missing) == (Verdict.FAIL, (POLICY_MATTERED,))
    assert result.reason == "nothing exercised: policy_mattered"
    assert len(list(check_decides("vtc"))) == len(load_families()) * len(Layout)


@pytest.mark.usefixtures("inexact_build")
def test_bits_are_unknown_on_an_inexact_build_and_bytes_are_compared_all_the_same(tmp_path: Path) -> None:
    result = suite(lambda case: differing(case, in_bytes=False), tmp_path)
    assert result.verdict is Verdict.UNKNOWN
    assert result.reason == f"bits not comparable: {LLAMAFILE}"
    assert result.sessions == result.byte_identical >= 10 > 0
    assert result.bit_identical < result.sessions


@pytest.mark.usefixtures("inexact_build")
def test_other_bytes_fail_on_an_inexact_build(tmp_path: Path) -> None:
    assert suite(differing, tmp_path).verdict is Verdict.FAIL


@pytest.mark.usefixtures("inexact_build")
@pytest.mark.parametrize(
    ("layout", "tier"),
    [(Layout.UNIFIED, Tier.BYTES), (Layout.STREAMS, Tier.BYTES), (Layout.STOCK, Tier.BITS)],
)
def test_inexact_build_says_nothing_against_bytes_or_stock(
    layout: Layout, tier: Tier, tmp_path: Path
) -> None:
    result = suite(green, tmp_path, layout=layout, tier=tier)
    assert (result.verdict, result.reason) == (Verdict.PASS, "")


def test_other_bits_fail_tier_bits_and_pass_tier_bytes(tmp_path: Path) -> None:
    def run(case: Case) -> Outcome:
        return differing(case, in_bytes=False)

    assert suite(run, tmp_path, tier=Tier.BITS).verdict is Verdict.FAIL
    assert suite(run, tmp_path, tier=Tier.BYTES).verdict is Verdict.PASS


@pytest.mark.parametrize("tier", Tier)
@pytest.mark.parametrize(
    "wrong",
    [
        {"findings": (Finding("memory", "two cells too many"),)},
        {"crashed": True, "reason": "SIGABRT", "findings": (Finding("crash", "SIGABRT"),)},
    ],
)
def test_problem_or_crash_fails_every_tier_and_layout(wrong: dict, tier: Tier, tmp_path: Path) -> None:
    def run(case: Case) -> Outcome:
        return replace(green(case), verdict=Verdict.FAIL, **wrong)

    for layout in Layout:
        assert suite(run, tmp_path, layout=layout, tier=tier).verdict is Verdict.FAIL


def test_stock_fails_only_where_the_case_does(tmp_path: Path) -> None:
    def measured(case: Case) -> Outcome:
        return replace(differing(case), verdict=Verdict.PASS)

    def unexplained(case: Case) -> Outcome:
        return replace(differing(case), findings=(Finding("noise", "session 0"),))

    assert suite(measured, tmp_path, layout=Layout.STOCK).verdict is Verdict.PASS
    assert suite(unexplained, tmp_path, layout=Layout.STOCK).verdict is Verdict.FAIL


def test_changed_tokens_of_stock_are_reported_by_why_they_changed(tmp_path: Path) -> None:
    def run(case: Case) -> Outcome:
        return replace(green(case), changes={"near-tie": 2, "carried on": 1})

    result = suite(run, tmp_path, layout=Layout.STOCK)
    assert result.verdict is Verdict.PASS
    assert result.to_data()["changed_tokens"] == {"near-tie": 2 * result.cases, "carried on": result.cases}
    assert result.explanation.startswith("sessions with a changed token: ")


def fails_with(sessions: int) -> Run:
    """Differs as long as so many sessions are there."""
    return lambda case: differing(case) if len(case.sessions) >= sessions else green(case)


def test_failing_landmark_is_shrunk_before_it_is_written_and_explained(tmp_path: Path) -> None:
    result = suite(fails_with(2), tmp_path)
    assert (result.verdict, result.cases) == (Verdict.FAIL, 1)
    kept = load_case(Path(result.case_file))
    assert kept == result.failure.case
    assert len(kept.sessions) == 2 and sum(len(session.prompt) for session in kept.sessions) == 2
    assert "1 of 2 sessions bit-identical" in result.explanation
    assert f"parity replay {result.case_file}" in result.explanation


def test_exception_in_a_case_fails_the_suite_and_is_kept_with_the_case(tmp_path: Path) -> None:
    said = "Traceback (most recent call last):\nKeyError: 's2'\n"

    def run(case: Case) -> Outcome:
        return broken_outcome(case, "KeyError: 's2'", stderr=said)

    result = suite(run, tmp_path)
    assert (result.verdict, result.cases, result.crashes) == (Verdict.FAIL, 1, 0)
    assert "problem: internal: KeyError: 's2'\n  | Traceback" in result.explanation
    assert Path(result.case_file).with_suffix(".stderr.txt").read_text() == said


def is_generated(case: Case) -> bool:
    return case.prefix_block_tokens != landmark("llama", case.layout).prefix_block_tokens


def test_failing_generated_case_is_shrunk_too(tmp_path: Path) -> None:
    found = []

    def run(case: Case) -> Outcome:
        outcome = fails_with(2)(case) if is_generated(case) else green(case)
        found.extend([case] if outcome.verdict is Verdict.FAIL else [])
        return outcome

    result = suite(run, tmp_path, min_sessions=60)
    assert result.cases > 1
    kept = load_case(Path(result.case_file))
    assert is_generated(kept) and kept in found
    assert len(kept.sessions) == 2 < len(found[0].sessions)
    assert size_of(kept)[1] < size_of(found[0])[1] / 4


def test_shrinking_for_tier_bytes_keeps_a_case_whose_bytes_differ(tmp_path: Path) -> None:
    def run(case: Case) -> Outcome:
        return differing(case, in_bytes=len(case.sessions) >= 3)

    result = suite(run, tmp_path, tier=Tier.BYTES)
    assert len(result.failure.case.sessions) == 3


def test_shrinking_runs_a_bounded_number_of_cases(tmp_path: Path) -> None:
    runs = []

    def run(case: Case) -> Outcome:
        runs.append(case)
        return differing(case) if len(runs) == 1 or case == runs[0] else green(case)

    result = suite(run, tmp_path)
    assert result.failure.case == runs[0]
    assert 10 < len(runs) <= SHRINK_RUNS + 2


def test_case_that_passes_when_it_runs_again_is_not_reproducible_and_red(tmp_path: Path) -> None:
    runs = []

    def run(case: Case) -> Outcome:
        runs.append(case)
        return green(case) if len(runs) > 1 else differing(case)

    result = suite(run, tmp_path)
    assert (result.verdict, result.failure.case) == (Verdict.FAIL, runs[0])
    assert result.explanation.startswith("not reproducible: it passed when it ran again\n")
    assert load_case(Path(result.case_file)) == runs[0]


def test_generated_case_that_passes_when_it_runs_again_is_not_reproducible_and_red(tmp_path: Path) -> None:
    failed = []

    def run(case: Case) -> Outcome:
        if failed or not is_generated(case):
            return green(case)
        failed.append(case)
        return differing(case)

    result = suite(run, tmp_path, min_sessions=60)
    assert result.verdict is Verdict.FAIL
    assert result.explanation.startswith("not reproducible")


def test_bug_of_the_suite_is_not_taken_for_a_failing_case(tmp_path: Path) -> None:
    def broken(case: Case) -> Outcome:
        raise ZeroDivisionError("in the suite")

    with pytest.raises(ZeroDivisionError):
        suite(broken, tmp_path)


@pytest.fixture
def split() -> Split:
    return pinned_splits("llama")[0]


def test_split_suite_compares_the_tier_that_it_is_asked_for(split: Split, tmp_path: Path) -> None:
    def run(case: Case, *, stage_processes: bool) -> Outcome:
        assert case.split == split.name
        return replace(differing(case, in_bytes=False), marks=dict.fromkeys(ALL_MARKS, 1))

    verdicts = [
        run_split_suite("llama", split, min_sessions=9, tier=tier, failures=tmp_path, run=run).verdict
        for tier in Tier
    ]
    assert verdicts == [Verdict.FAIL, Verdict.PASS]


def test_failing_case_of_a_split_is_kept_with_its_split(split: Split, tmp_path: Path) -> None:
    def run(case: Case, *, stage_processes: bool) -> Outcome:
        return fails_with(2)(case)

    result = run_split_suite("llama", split, min_sessions=9, failures=tmp_path, run=run)
    kept = load_case(Path(result.case_file))
    assert (len(kept.sessions), kept.split) == (2, split.name)


def test_a_suite_with_a_seed_remembers_what_failed_and_tries_it_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SAMEBYTES_CACHE", str(tmp_path / "cache"))
    brought = Brought(engine="tests.machine.examples:make_engine")
    settings = {
        "tier": Tier.BYTES,
        "min_sessions": 9,
        "seed_value": 5,
        "brought": brought,
        "failures": tmp_path,
    }
    tried: list[Case] = []

    def run(case: Case, *, broken: bool) -> Outcome:
        tried.append(case)
        outcome = run_exact_case(case)
        return replace(outcome, findings=(Finding("ends", "planted"),)) if broken else outcome

    first = run_suite("llama", Layout.UNIFIED, run=partial(run, broken=True), **settings)
    kept = failures_folder("llama", Layout.UNIFIED, "llama", brought)
    other = failures_folder("llama", Layout.STREAMS, "llama", brought)
    assert first.verdict is Verdict.FAIL and len(list(kept.iterdir())) == 1 and list(other.iterdir()) == []
    tried.clear()
    run_suite("llama", Layout.UNIFIED, run=partial(run, broken=True), **settings)
    assert tried[0] == first.failure.case
    run_suite("llama", Layout.UNIFIED, run=partial(run, broken=False), **settings)
    assert list(kept.iterdir()) == []  # it passes now
