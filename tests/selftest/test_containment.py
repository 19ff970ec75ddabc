"""An abort in llama.cpp costs one case, not the run; a hanging worker is ended after a bound and reported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from parity.campaign.rerun import Rerun
from parity.mutants import cases, sharing_cases
from parity.processes import CallFailed, Worker, WorkerDied
from parity.records import Verdict
from parity.run.contained import run_case
from parity.run.explain import explain_outcome
from parity.run.runner import run_exact_case
from parity.store import REPOSITORY
from parity.suites.suite import across_stages, pinned_splits

RAISES = "victim_left_in_the_plan"  # a fault by which the scheduler looks for a session that is not there
ABORTING = sharing_cases.shared_prefix("llama", **cases.STREAMS)

SUITE = """
import pytest
from parity.run.contained import run_case
from parity.mutants import cases, sharing_cases
from parity.records import Verdict

ABORTING = sharing_cases.shared_prefix("llama", **cases.STREAMS)

@pytest.mark.parametrize("number", range(6))
def test_case(number):
    outcome = run_case(ABORTING, mutant="partial_copy_between_streams" if number == 2 else None)
    assert outcome.verdict is Verdict.PASS, outcome.reason
"""


def test_abort_costs_one_case_and_keeps_what_llama_cpp_said() -> None:
    crash = run_case(ABORTING, mutant="partial_copy_between_streams")
    assert (crash.verdict, crash.crashed, crash.sessions) == (Verdict.FAIL, True, 0)
    assert "SIGABRT" in crash.reason and "GGML_ASSERT" in crash.reason
    assert "GGML_ASSERT" in crash.stderr
    after = run_case(ABORTING)
    assert (after.verdict, after.crashed) == (Verdict.PASS, False)
    assert after.sessions == after.bit_identical == len(ABORTING.sessions)


def test_abort_costs_one_test_under_xdist(tmp_path: Path) -> None:
    suite = tmp_path / "test_suite.py"
    suite.write_text(SUITE)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-n",
        "2",
        "-q",
        "-p",
        "no:cacheprovider",
        "--rootdir",
        str(tmp_path),
        "-c",
        os.devnull,
        str(suite),
    ]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path, check=False)
    assert "1 failed, 5 passed" in done.stdout, done.stdout + done.stderr
    assert "GGML_ASSERT" in done.stdout
    assert "node down" not in done.stdout


def test_hanging_worker_is_ended_after_a_bound_and_reported() -> None:
    worker = Worker()
    with pytest.raises(WorkerDied, match="no answer within 0.2 s, ended"):
        worker.call("parity.run.faults:hang_here", {}, timeout_s=0.2)
    assert worker.pid is None
    assert worker.call("json:dumps", {}) == "{}"
    worker.close()


def test_hang_of_a_case_is_an_outcome() -> None:
    outcome = run_case(cases.mixed("llama"), mutant="call_that_never_returns", timeout_s=1.0)
    assert (outcome.verdict, outcome.crashed) == (Verdict.FAIL, True)
    assert outcome.reason == "no answer within 1 s, ended"


def test_killed_worker_is_replaced() -> None:
    worker = Worker()
    assert worker.call("json:dumps", {"a": 1}) == '{"a": 1}'
    first = worker.pid
    with pytest.raises(WorkerDied, match="ended by SIGKILL"):
        worker.call("parity.run.faults:die_here", {})
    assert worker.call("json:dumps", {}) == "{}"
    assert worker.pid != first
    worker.close()


def test_exception_of_the_scheduler_costs_one_case_and_keeps_its_traceback() -> None:
    outcome = run_case(cases.crowded("llama"), mutant=RAISES)
    assert (outcome.verdict, outcome.crashed) == (Verdict.FAIL, False)
    assert outcome.problems == ("internal: KeyError: 's0'",)
    assert "Traceback" in outcome.stderr and "KeyError: 's0'" in outcome.stderr
    assert "KeyError: 's0'" in explain_outcome(outcome).splitlines()[-1]
    assert run_case(cases.crowded("llama")).verdict is Verdict.PASS


def test_exception_of_the_scheduler_is_the_same_outcome_on_both_engines() -> None:
    case = cases.crowded("llama")
    real, exact = Rerun(mutant=RAISES), Rerun(exact=True, mutant=RAISES)
    try:
        outcomes = [run(case) for run in (real, exact)]
    finally:
        real.close()
    assert len({outcome.problems for outcome in outcomes}) == 1
    assert all("Traceback" in outcome.stderr for outcome in outcomes)


def test_exception_of_a_checker_is_an_outcome(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(run: Any) -> None:
        raise ZeroDivisionError("in a checker")

    monkeypatch.setattr("parity.run.judge.count_marks", broken)
    outcome = run_exact_case(cases.mixed("llama"))
    assert outcome.verdict is Verdict.FAIL
    assert outcome.problems == ("marks: the checker broke: ZeroDivisionError: in a checker",)


def test_exception_of_the_scheduler_costs_one_case_of_a_split() -> None:
    split = pinned_splits("llama")[0]
    outcome = run_case(across_stages(cases.crowded("llama"), split), mutant=RAISES)
    assert outcome.problems == ("internal: KeyError: 's0'",)
    assert "Traceback" in outcome.stderr


def test_exception_in_a_worker_is_told_from_bad_input() -> None:
    worker = Worker()
    with pytest.raises(CallFailed, match="^TypeError: ") as caught:
        worker.call("json:loads", {})
    assert "Traceback" in caught.value.stderr
    first = worker.pid
    with pytest.raises(CallFailed, match="not JSON serializable"):
        worker.call("builtins:frozenset", {})
    assert worker.pid == first
    worker.close()
