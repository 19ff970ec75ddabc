"""Whatever happens in a run, every accepted session ends exactly once, with its result or a typed error."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from parity.engines.exact import ExactEngine
from parity.engines.numerics import ROW
from parity.mutants import cases
from parity.processes import Worker
from parity.records import Case, Fault, FaultKind, Outcome, Verdict, outcome_from_data
from parity.run.contained import run_case
from parity.run.faults import full_disk
from parity.run.runner import drive_exact, exact_limits, exact_model, run_exact_case
from parity.store import save_text
from scheduler.loop import MAX_ENGINE_FAILURES
from scheduler.records import FinishReason

ON_LLAMA_CPP = [kind for kind in FaultKind if kind is not FaultKind.STAGE_LOST]  # which needs a chain
SESSIONS = 4


def faulty(family: str, kind: FaultKind, **details: Any) -> Case:
    """Four sessions, one of them prefilling and two decoding when the fault comes."""
    return cases.mixed(family, faults=(Fault(kind=kind, step=5, session=1, **details),))


def check_nothing_lost(outcome: Outcome, kind: FaultKind) -> None:
    assert outcome.verdict is Verdict.PASS, (outcome.problems, outcome.reason, outcome.divergences)
    assert outcome.sessions == outcome.bit_identical == SESSIONS
    assert outcome.marks["cancelled"] == (kind is FaultKind.CANCEL)
    failed = kind in (
        FaultKind.NO_SLOT,
        FaultKind.DECODE_ERROR,
        FaultKind.WORKER_KILLED,
        FaultKind.OUT_OF_MEMORY,
    )
    assert outcome.marks["engine_failed"] == failed
    assert outcome.marks["resumed"] == (SESSIONS if failed else kind is FaultKind.PREEMPT)


@pytest.mark.parametrize("kind", ON_LLAMA_CPP, ids=lambda kind: kind.value)
def test_run_on_llama_cpp_loses_nothing_in_a_fault(kind: FaultKind) -> None:
    check_nothing_lost(run_case(faulty("llama", kind, amount=250.0)), kind)


@pytest.mark.parametrize("family", ["deepseek2", "gemma2", "qwen3next"])
def test_sessions_are_rebuilt_after_its_engine_was_killed(family: str) -> None:
    faults = (Fault(kind=FaultKind.WORKER_KILLED, step=3), Fault(kind=FaultKind.OUT_OF_MEMORY, step=7))
    outcome = run_case(cases.mixed(family, faults=faults))
    assert (outcome.verdict, outcome.bit_identical, outcome.marks["engine_failed"]) == (
        Verdict.PASS,
        SESSIONS,
        2,
    )


@pytest.mark.parametrize("kind", ON_LLAMA_CPP, ids=lambda kind: kind.value)
def test_two_shards_lose_nothing_in_a_fault(kind: FaultKind) -> None:
    """One shard's engine fails, is killed or runs out of memory: the sessions of both are rebuilt."""
    outcome = run_case(replace(faulty("llama", kind, amount=250.0), shards=2))
    check_nothing_lost(outcome, kind)
    assert outcome.marks["sharded"]


@pytest.mark.parametrize("call", [0, 1, 2, 3])
@pytest.mark.parametrize("family", cases.FAMILIES)
def test_failure_at_any_micro_batch_is_recovered_from(family: str, call: int) -> None:
    case = cases.failing(family, faults=(Fault(kind=FaultKind.DECODE_ERROR, step=0, call=call),))
    for outcome in (run_exact_case(case), run_case(case)):
        assert outcome.verdict is Verdict.PASS, (outcome.problems, outcome.divergences)
        assert outcome.sessions == outcome.bit_identical == len(case.sessions)
    assert outcome.marks["engine_failed"] == (call < (4 if family in cases.HYBRIDS else 3))


@pytest.mark.parametrize("kind", [FaultKind.DECODE_ERROR, FaultKind.NO_SLOT], ids=lambda kind: kind.value)
def test_sessions_end_with_a_typed_error_after_failures_in_a_row(kind: FaultKind) -> None:
    case = cases.mixed(
        "llama", faults=tuple(Fault(kind=kind, step=4 + i) for i in range(MAX_ENGINE_FAILURES))
    )
    engine = ExactEngine(exact_limits(case), exact_model(case))
    run = drive_exact(case, engine)
    ends = [run.completions[index] for index in range(SESSIONS)]
    assert not run.problems and len(run.completions) == SESSIONS
    failed = [end for end in ends if end.reason is FinishReason.FAILED]
    assert failed and all("injected failure" in end.error for end in failed)


def test_sessions_that_only_get_as_far_as_their_rebuild_end_with_a_typed_error() -> None:
    case = cases.rebuilt_in_vain("llama")
    run = drive_exact(case, ExactEngine(exact_limits(case), exact_model(case)))
    assert [record.engine_failures for record in run.records] == [0, 1, 0, 1, 0, 1]
    assert all(record.recompute_tokens for record in run.records[2:5:2])
    assert {end.reason for end in run.completions.values()} == {FinishReason.FAILED}
    assert run_exact_case(case).problems == ()


def test_failures_with_new_rows_between_end_nobody() -> None:
    fails = tuple(Fault(kind=FaultKind.DECODE_ERROR, step=step) for step in (1, 4, 7, 10))
    outcome = run_exact_case(cases.rebuilt_in_vain("llama", faults=fails))
    assert (outcome.verdict, outcome.marks["engine_failed"]) == (Verdict.PASS, len(fails))
    assert outcome.bit_identical == outcome.sessions == 2


@pytest.mark.parametrize("step", range(14))
@pytest.mark.parametrize("in_flight", [False, True], ids=["before", "in flight"])
@pytest.mark.parametrize("kind", [FaultKind.CANCEL, FaultKind.PREEMPT], ids=lambda kind: kind.value)
def test_cancel_and_preempt_at_any_point_keep_every_answer(
    kind: FaultKind, in_flight: bool, step: int
) -> None:
    for family in ("gemma2", "qwen3next"):
        for session in range(SESSIONS):
            fault = Fault(kind=kind, step=step, session=session, in_flight=in_flight)
            outcome = run_exact_case(cases.mixed(family, faults=(fault,)))
            assert outcome.verdict is Verdict.PASS, (family, session, outcome.problems, outcome.divergences)


@pytest.mark.parametrize("jump_ms", [-1e9, -10.0, 1e9])
def test_clock_may_jump_either_way(jump_ms: float) -> None:
    for family in ("llama", "qwen3next"):
        case = faulty(family, FaultKind.CLOCK_JUMP, amount=jump_ms)
        assert run_exact_case(case).verdict is Verdict.PASS
    assert run_case(case).verdict is Verdict.PASS


def test_full_disk_leaves_the_old_file_and_no_part_of_a_new_one(tmp_path: Path) -> None:
    path = tmp_path / "kept.txt"
    save_text(path, "old")
    with full_disk(), pytest.raises(OSError, match="too large"):
        save_text(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]
    save_text(path, "new")
    assert path.read_text() == "new"


def test_full_disk_costs_the_memory_of_answers_and_no_verdict(tmp_path: Path) -> None:
    worker = Worker((("SAMEBYTES_CACHE", str(tmp_path)),))
    full = faulty("llama", FaultKind.DISK_FULL)
    try:
        for case, remembered in ((full, 0), (replace(full, faults=()), SESSIONS)):
            data = worker.call(
                "parity.run.runner:run_case_here", {"case": case.to_json(), "profile": ROW.to_json()}
            )
            outcome = outcome_from_data(case, data)
            assert (outcome.verdict, outcome.bit_identical) == (Verdict.PASS, SESSIONS)
            assert len(list(tmp_path.glob("oracle/*/*"))) == remembered
            worker.close()
    finally:
        worker.close()
