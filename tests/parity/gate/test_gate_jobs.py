"""One check at a time: verdicts by tier, and that whatever breaks on the way is unknown, never pass."""

from __future__ import annotations

import ast
import os
import signal
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from parity.cases.strategies import landmark
from parity.errors import UsageError
from parity.gate import jobs as gate_jobs
from parity.gate.jobs import noise_histogram, run_job, suite_check
from parity.gate.plan import GateJob, plan_jobs
from parity.gate.result import CheckKind, GateCheck, GateOptions
from parity.gate.running import TESTS, _run_jobs, by_cost, line_of, located
from parity.golden.cases import GoldenMode, golden_path
from parity.golden.regenerate import ModeChange
from parity.models.families import load_families
from parity.mutants.running import MutantReport, Status, TrialReport
from parity.records import Finding, Outcome, Tier, Verdict
from parity.store import REPOSITORY
from parity.suites.policies import PolicyCheck
from parity.suites.suite import SuiteResult, pinned_splits
from scheduler.limits import Layout
from tests.parity.gate.gate_results import DIVERGENCE

JOB = GateJob(
    kind=CheckKind.SUITE,
    name="llama unified",
    family="llama",
    layout=Layout.UNIFIED,
    model="llama",
    sessions=3,
)


def suite_result(verdict: Verdict, *found: str, **counts: Any) -> SuiteResult:
    """A suite's result with one finding of each checker named."""
    findings = [Finding(checker, "session 3") for checker in found]
    marks = Counter(shared=1)
    return SuiteResult(
        "llama", JOB.layout, "llama", **{"verdict": verdict, "marks": marks, "findings": findings, **counts}
    )


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (UsageError("model is gone", todo="fetch it"), "model is gone; fetch it"),
        (ValueError("oops"), "internal error: ValueError: oops"),
    ],
)
def test_check_that_breaks_is_unknown_with_its_message(
    error: Exception, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(job: GateJob) -> GateCheck:
        raise error

    monkeypatch.setitem(gate_jobs.RUNNERS, CheckKind.SUITE, broken)
    check = run_job(JOB)
    assert (check.verdict, check.reason, check.name) == (Verdict.UNKNOWN, reason, "llama unified")


def kill_this_process(job: GateJob) -> GateCheck:
    os.kill(os.getpid(), signal.SIGKILL)


def test_gate_process_that_dies_leaves_unknown_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("parity.gate.running.run_job", kill_this_process)
    (check,) = _run_jobs([JOB], 1)
    assert check.verdict is Verdict.UNKNOWN
    assert "a process of the gate died" in check.reason
    assert (check.family, check.layout) == ("llama", "unified")


def test_all_identical_sessions_pass_both_tiers() -> None:
    check = suite_check(JOB, suite_result(Verdict.PASS, sessions=4, bit_identical=4, byte_identical=4))
    assert (check.verdict, check.bits, check.bytes) == (Verdict.PASS,) * 3


def test_same_bytes_with_other_bits_fail_only_tier_bits() -> None:
    check = suite_check(
        JOB, suite_result(Verdict.PASS, "bits", sessions=4, bit_identical=3, byte_identical=4)
    )
    assert (check.bits, check.bytes) == (Verdict.FAIL, Verdict.PASS)


def test_divergence_and_case_file_reach_the_check() -> None:
    case = landmark("llama", Layout.UNIFIED)
    failure = Outcome(case=case, verdict=Verdict.FAIL, divergences=(DIVERGENCE,))
    result = suite_result(
        Verdict.FAIL, sessions=4, bit_identical=3, byte_identical=3, failure=failure, case_file="a.json"
    )
    check = suite_check(JOB, result)
    assert (check.divergence, check.replay) == (DIVERGENCE, "parity replay a.json")
    assert "family llama, session 3, generated token 7" in check.headline


def test_crashes_and_missing_marks_pass_no_tier() -> None:
    crashed = suite_check(
        JOB, suite_result(Verdict.FAIL, "crash", sessions=4, bit_identical=4, byte_identical=4, crashes=1)
    )
    assert (crashed.bits, crashed.bytes) == (Verdict.FAIL, Verdict.FAIL)
    empty = suite_check(JOB, suite_result(Verdict.FAIL, marks=Counter(), required=("shared",)))
    assert (empty.bits, empty.missing_marks) == (Verdict.FAIL, ("shared",))


def test_bits_are_unknown_where_no_profile_is_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    class Inexact:
        reason = "llamafile SGEMM is on"

    monkeypatch.setattr(gate_jobs, "profile_of", lambda model: Inexact)
    check = suite_check(JOB, suite_result(Verdict.UNKNOWN, sessions=4, bit_identical=4, byte_identical=4))
    assert (check.bits, check.bytes) == (Verdict.UNKNOWN, Verdict.PASS)


def test_stock_is_measured_and_judged_by_noise_alone() -> None:
    stock = GateJob(
        kind=CheckKind.SUITE, name="llama stock", family="llama", layout=Layout.STOCK, model="llama"
    )
    check = suite_check(
        stock, suite_result(Verdict.PASS, sessions=4, bit_identical=1, byte_identical=3, noise=[0.0, 0.1])
    )
    assert (check.measured, check.bits, check.bytes, check.noise.samples) == (True, None, None, 2)


def test_noise_histogram_counts_every_sample_once() -> None:
    noise = noise_histogram([0.0, 0.0, 5e-12, 2e-5, 3e-5, 0.5, 1e9])
    assert (noise.samples, noise.unmoved, noise.largest) == (7, 2, 1e9)
    assert sum(noise.counts) == 5
    assert len(noise.edges) == len(noise.counts) + 1
    assert (noise.counts[0], noise.counts[3], noise.counts[-1]) == (1, 2, 1)


def test_every_kind_of_job_has_a_runner_and_a_place_in_the_order() -> None:
    kinds = set(CheckKind) - {CheckKind.MODEL, CheckKind.SYSTEM}  # decided in the plan; a gate of its own
    assert set(gate_jobs.RUNNERS) == kinds
    jobs = [GateJob(kind=kind, name=kind.value) for kind in kinds]
    assert {job.kind for job in by_cost(jobs)} == kinds


def test_annotations_point_at_tests_that_exist() -> None:
    for kind, (file, function) in TESTS.items():
        assert (REPOSITORY / file).is_file(), kind
        line = (REPOSITORY / file).read_text().splitlines()[line_of(file, function) - 1]
        assert line.startswith(f"def {function or 'test_'}"), kind


def test_model_checks_point_at_the_manifest() -> None:
    check = located(GateCheck(kind=CheckKind.MODEL, name="x", family="llama", verdict=Verdict.UNKNOWN))
    assert (check.test_file, check.test_line) == ("manifests/llama.yaml", 1)


def test_tier_is_handed_to_the_suite(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {}

    def run_suite(family: Any, layout: Any, **settings: Any) -> Any:
        asked.update(settings, family=family)
        return suite_result(Verdict.PASS, sessions=3, bit_identical=3, byte_identical=3)

    monkeypatch.setattr(gate_jobs, "run_suite", run_suite)
    run_job(replace(JOB, sessions=7, seed=3, tier=Tier.BYTES))
    assert (asked["tier"], asked["min_sessions"], asked["seed_value"]) == (Tier.BYTES, 7, 3)


def test_policy_and_its_options_are_handed_to_the_suites(monkeypatch: pytest.MonkeyPatch) -> None:
    options = GateOptions(
        families=("llama",),
        is_selection=True,
        required={},
        policy="orca",
        policy_options=(("slots", 90),),
    )
    asked = {}

    def run_suite(family: Any, layout: Any, **settings: Any) -> Any:
        asked[layout] = (settings["policy"], settings["policy_options"])
        return suite_result(Verdict.PASS, sessions=3, bit_identical=3, byte_identical=3)

    monkeypatch.setattr(gate_jobs, "run_suite", run_suite)
    for job in plan_jobs(options):
        if job.kind is CheckKind.SUITE:
            run_job(job)
    assert asked == dict.fromkeys(Layout, ("orca", (("slots", 90),)))


def test_tier_is_handed_to_splits_and_goldens(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def run_split_suite(family: Any, split: Any, **settings: Any) -> Any:
        asked.append(settings["tier"])
        return suite_result(Verdict.PASS, sessions=3, bit_identical=3, byte_identical=3)

    def find_changes(family: Any, **settings: Any) -> Any:
        asked.append(settings["tier"])
        return [], {}

    monkeypatch.setattr(gate_jobs, "run_split_suite", run_split_suite)
    monkeypatch.setattr(gate_jobs, "find_changes", find_changes)
    split = pinned_splits("llama")[0].name
    run_job(replace(JOB, kind=CheckKind.SPLIT, split=split, tier=Tier.BYTES))
    run_job(replace(JOB, kind=CheckKind.GOLDEN, tier=Tier.BYTES))
    assert asked == [Tier.BYTES, Tier.BYTES]


def test_policy_that_breaks_its_promise_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def check(policy: str) -> list[PolicyCheck]:
        found = (Finding("starved", "a completed nothing"),)
        return [PolicyCheck(policy, "progress", found if policy == "vtc" else ())]

    monkeypatch.setattr(gate_jobs, "check_policy", check)
    monkeypatch.setattr(gate_jobs, "check_hash_seeds", lambda policies: [])
    monkeypatch.setattr(gate_jobs, "real_verdicts", lambda policies, tick: {"vtc": (Verdict.PASS, "9/9")})
    found = run_job(GateJob(kind=CheckKind.POLICIES, name="policies"))
    assert (found.verdict, found.reason) == (
        Verdict.FAIL,
        "policy vtc, progress: starved: a completed nothing",
    )
    assert found.marks["policies"] + 1 == found.marks["checks"] >= 16


def test_surviving_mutant_fails_the_gate_and_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def judge(mutants: Any, select: Any, on_report: Any) -> Any:
        return [
            MutantReport("a_fault", "is wrong", "cells", ("llama",), (TrialReport("t", status, "", "", 0.1),))
            for status in (Status.KILLED, Status.SURVIVED)
        ]

    monkeypatch.setattr(gate_jobs, "judge_mutants", judge)
    found = run_job(GateJob(kind=CheckKind.MUTANTS, name="mutants"))
    assert (found.verdict, found.reason) == (Verdict.FAIL, "1 of 2 not killed: a_fault")
    monkeypatch.setattr(gate_jobs, "judge_mutants", lambda *_: [])
    assert run_job(GateJob(kind=CheckKind.MUTANTS, name="mutants")).verdict is Verdict.UNKNOWN


def test_mutant_that_is_red_without_its_fault_says_what_is_wrong_with_the_tree(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trials = (
        TrialReport("fine", Status.KILLED, "bits", "session 0", 0.1),
        TrialReport("drawn", Status.BROKEN, "", "red without the fault: token 3 instead of 0", 0.1),
    )
    report = MutantReport("a_fault", "It is wrong.", "sampling", ("llama",), trials)
    monkeypatch.setattr(gate_jobs, "judge_mutants", lambda *_: [report])
    found = run_job(GateJob(kind=CheckKind.MUTANTS, name="mutants"))
    assert found.verdict is Verdict.FAIL
    assert found.reason == "drawn: red without the fault: token 3 instead of 0; 1 of 1 not killed: a_fault"
    assert found.explanation == (
        "a_fault: broken, It is wrong. drawn: red without the fault: token 3 instead of 0"
    )


def test_golden_that_differs_fails_the_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    def changes(family: str, *, search: bool, tier: Tier) -> Any:
        assert not search and tier is Tier.BITS
        path = golden_path(family, GoldenMode.SHORT)
        made = {"family": family, "path": path, "golden": None, "is_new": False, "context": ()}
        return [
            ModeChange(mode=GoldenMode.SHORT, differences=(), problems=(), **made),
            ModeChange(mode=GoldenMode.LONG, differences=("session 0: tokens differ",), problems=(), **made),
        ], {}

    monkeypatch.setattr(gate_jobs, "find_changes", changes)
    found = run_job(GateJob(kind=CheckKind.GOLDEN, name="llama goldens", family="llama"))
    assert (found.verdict, found.reason) == (Verdict.FAIL, "llama long: differs")
    assert "session 0: tokens differ" in found.explanation


def test_family_tests_run_the_gates_own_jobs() -> None:
    """The pytest test of every kind that judges a model takes its parameters from the gate's plan."""
    options = GateOptions(families=tuple(load_families()), is_selection=False, required={})
    for kind in dict.fromkeys(job.kind for job in plan_jobs(options) if job.model):
        file, function = TESTS[kind]
        tree = ast.parse((REPOSITORY / file).read_text(encoding="utf-8"))
        found = next(
            node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == function
        )
        parameters = [ast.unparse(decorator) for decorator in found.decorator_list]
        assert any(f"gate_params(CheckKind.{kind.name}" in text for text in parameters), (kind, parameters)
