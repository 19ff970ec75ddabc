"""A process per stage: the same bits, and a stage that dies or hangs ends its
sessions with its name, never a hang.
"""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from parity.engines.chain_processes import ProcessChain, StageLost
from parity.engines.numerics import ROW
from parity.errors import UsageError
from parity.models import resolve_model
from parity.models.families import load_family
from parity.plugin import family_params
from parity.processes import Wire, WireClosed, WireSilent, calls_from_data, calls_to_data
from parity.records import Fault, FaultKind, Verdict
from parity.run.chains import hand_settings, stage_limits
from parity.run.contained import run_case
from parity.run.explain import explain_outcome
from parity.run.runner import Runner, known_model, pool_limits
from parity.suites.suite import crowd_case, pinned_splits
from scheduler.engine import Batch, Call, EngineFailure, MemoryOp, OpKind, Sample
from scheduler.records import (
    BudgetLedger,
    FinishReason,
    IterationPlan,
    IterationResult,
    PlannedChunk,
    PolicyIdentity,
    SamplingParams,
)

HANG_S = 3.0  # a step takes milliseconds, so that only a stopped stage is late, however busy the machine is


def crowd(family: str, place: int, *faults: Fault) -> Any:
    case = crowd_case(family, pinned_splits(family)[place], 0, sessions=10)
    return replace(case, faults=faults or case.faults)


@pytest.fixture(scope="module")
def runner() -> Iterator[Runner]:
    """One runner with a process per stage for the whole module."""
    made = Runner(stage_processes=True)
    yield made
    made.chains.close()


@pytest.mark.parametrize("family", family_params())
def test_process_chain_gives_the_bits_of_the_whole_model(family: str) -> None:
    case = crowd(family, -1)
    failure = Fault(
        kind=FaultKind.DECODE_ERROR, step=7, call=1
    )  # a step that breaks off leaves no stale states behind

    outcome = run_case(replace(case, faults=(*case.faults, failure)), profile=ROW, stage_processes=True)

    assert outcome.verdict is Verdict.PASS, explain_outcome(outcome)
    assert outcome.bit_identical == outcome.sessions >= 8
    assert outcome.marks["engine_failed"] == 1


@pytest.mark.family_llama
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_lost_stage_ends_its_sessions_with_its_name(runner: Runner, stage: int) -> None:
    """The process of one stage dies in the middle of step 5. The next stage's turn starts them all anew."""
    case = crowd("llama", 1, Fault(kind=FaultKind.STAGE_LOST, step=5, call=stage))
    family, file = load_family("llama"), known_model(case.model)
    engine = runner.engine(case, file, family, ROW)

    attempt = runner.attempt(case, engine, family, ROW, file)
    ends = [end for end in attempt.completions.values() if end.reason is FinishReason.FAILED]

    assert attempt.lost == f"stage {stage} (layers {2 * stage}:{2 * stage + 2}): its process ended by SIGKILL"
    assert ends and all(attempt.lost in end.error for end in ends)
    assert len(attempt.completions) == len(case.sessions)
    assert not attempt.problems


@pytest.mark.family_llama
def test_what_was_emitted_before_a_loss_is_right_to_the_bit(runner: Runner) -> None:
    outcome = runner.run(crowd("llama", 1, Fault(kind=FaultKind.STAGE_LOST, step=5, call=1)), ROW)

    assert outcome.verdict is Verdict.PASS, explain_outcome(outcome)
    assert outcome.bit_identical == outcome.sessions > 3


@pytest.mark.family_llama
def test_killed_stage_is_a_crash_that_names_it_and_the_next_case_runs(runner: Runner) -> None:
    case = crowd("llama", 1)
    engine = runner.engine(case, known_model(case.model), load_family("llama"), ROW)
    launch, steps = engine.launch, 0

    def kill_and_launch(*arguments: Any) -> None:
        nonlocal steps
        steps += 1
        if steps == 6:
            os.kill(engine.pids[1], signal.SIGKILL)
        launch(*arguments)

    engine.launch = kill_and_launch
    outcome = runner.run(case, ROW)
    assert (outcome.verdict, outcome.crashed) == (Verdict.FAIL, True)
    assert outcome.reason == "stage 1 (layers 2:4): its process ended by SIGKILL"

    del engine.launch
    outcome = runner.run(case, ROW)
    assert outcome.verdict is Verdict.PASS, explain_outcome(outcome)


@pytest.fixture
def three_stages() -> Iterator[ProcessChain]:
    """A chain of three processes."""
    chain = ProcessChain(hand_settings(resolve_model("llama"), load_family("llama"), "thirds"))
    yield chain
    chain.close()


@pytest.mark.family_llama
@pytest.mark.parametrize("stage", [0, 1])
def test_hanging_stage_is_named_and_ended(three_stages: ProcessChain, stage: int) -> None:
    case = replace(crowd("llama", 1), stage_cells=(), pool_cells=200, num_sequences=12, faults=())
    runner, family, file = Runner(), load_family("llama"), known_model(case.model)
    limits = stage_limits(runner.chains.legal(file, case.split), pool_limits(case, family, ROW))
    three_stages.configure(*limits)
    pids = list(three_stages.pids)
    steps = 0
    execute = three_stages.execute

    def stop_before_the_third_step(*arguments: Any) -> IterationResult:
        nonlocal steps
        steps += 1
        if steps == 3:  # between steps: one that had begun would wait for its own, longer bound
            os.kill(pids[stage], signal.SIGSTOP)
            three_stages.timeout_s = HANG_S
        return execute(*arguments)

    runner.engine = lambda *_: three_stages
    three_stages.execute = stop_before_the_third_step
    outcome = runner.run(case, ROW)

    assert outcome.crashed and outcome.verdict is Verdict.FAIL
    assert (
        outcome.reason == f"stage {stage} (layers {2 * stage}:{2 * stage + 2}): no answer within {HANG_S:g} s"
    )
    assert all(_is_gone(pid) for pid in pids)


def _is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


@pytest.mark.family_llama
def test_lost_chain_holds_nothing_and_says_so_at_the_next_step(three_stages: ProcessChain) -> None:
    os.kill(three_stages.pids[2], signal.SIGKILL)
    three_stages.apply([[MemoryOp(OpKind.CLEAR)]] * 3)

    assert three_stages.lost.startswith("stage 2 (layers 4:6): its process ended by SIGKILL")
    assert three_stages.leftover_sequences() == [] and three_stages.pids == []
    three_stages.launch(*two_rows((0, 1), (0, 1), (0, 1)))
    with pytest.raises(StageLost, match="stage 2"):
        three_stages.collect()


def two_rows(*rows_of_stages: tuple[int, int]) -> tuple[IterationPlan, Batch, float]:
    """A step of two rows of one session, in which each stage gets them in its own order."""
    plan = IterationPlan(
        1, 0, PolicyIdentity("fcfs"), (PlannedChunk("s0", 0, 0, 0, 2),), BudgetLedger(2, 1, 2, 1)
    )
    sample = Sample(1, "s0", 2, SamplingParams())
    stages = tuple((Call((), rows, (1, 1), (-1, -1)),) for rows in rows_of_stages)
    return plan, Batch((5, 6), (0, 1), (0, 2), (sample,), (0,), ("a",), (0,), stages), 0.0


@pytest.mark.family_llama
def test_failed_call_names_its_stage_not_those_that_starve_and_is_no_loss(three_stages: ProcessChain) -> None:
    """Stage 1 gets its rows in the wrong order, which llama.cpp refuses; stage 2 waits for nothing then."""
    three_stages.launch(*two_rows((0, 1), (1, 0), (0, 1)))
    with pytest.raises(EngineFailure, match=r"^stage 1 \(layers 2:4\): llama_decode returned -1$"):
        three_stages.collect()
    assert not three_stages.lost

    three_stages.apply([[MemoryOp(OpKind.CLEAR)]] * 3)
    three_stages.launch(*two_rows((0, 1), (0, 1), (0, 1)))
    (chunk,) = three_stages.collect().chunks
    assert (chunk.before, chunk.after) == (0, 2) and chunk.token is not None


@pytest.mark.family_llama
def test_failure_takes_the_steps_behind_it_along_and_the_chain_goes_on(three_stages: ProcessChain) -> None:
    clear = [[MemoryOp(OpKind.CLEAR)]] * 3
    three_stages.launch(*two_rows((0, 1), (0, 1), (0, 1)))
    (alone,) = three_stages.collect().chunks
    three_stages.apply(clear)

    three_stages.launch(*two_rows((0, 1), (1, 0), (0, 1)))
    three_stages.launch(*two_rows((0, 1), (0, 1), (0, 1)))
    with pytest.raises(EngineFailure, match="stage 1"):
        three_stages.collect()
    assert not three_stages._launched and not three_stages.lost

    three_stages.apply(clear)
    three_stages.launch(*two_rows((0, 1), (0, 1), (0, 1)))
    assert three_stages.collect().chunks == (alone,)


@pytest.mark.family_llama
def test_steps_behind_one_that_broke_off_touch_no_memory_there(three_stages: ProcessChain) -> None:
    """Stage 1 refuses the first step; the second, which it could run, begins behind rows that are missing."""
    three_stages.launch(*two_rows((0, 1), (1, 0), (0, 1)))
    plan, batch, now_ms = two_rows((0, 1), (0, 1), (0, 1))
    other = tuple((replace(stage[0], seq_ids=(2, 2)),) for stage in batch.stages)
    three_stages.launch(plan, replace(batch, stages=other), now_ms)
    with pytest.raises(EngineFailure, match="stage 1"):
        three_stages.collect()

    (left,) = three_stages._order([None, {"do": "leftovers"}, None])
    assert left["leftovers"] == []
    assert three_stages.leftover_sequences() == [1, 2], "the stage before ran both"


@pytest.mark.family_llama
def test_stage_that_breaks_off_takes_what_the_one_before_still_sends(monkeypatch: pytest.MonkeyPatch) -> None:
    """252 rows of hidden states are more than these connections hold: the stage before waits until they are
    taken, longer than anybody may be silent.
    """
    pair = socket.socketpair

    def narrow_pair() -> tuple[socket.socket, socket.socket]:
        ends = pair()
        for end in ends:
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        return ends

    settings = hand_settings(resolve_model("llama"), load_family("llama"), "halves")
    rows, width = 252, 63
    calls = tuple(
        Call((), tuple(range(at, at + width)), (1,) * width, (-1,) * width) for at in range(0, rows, width)
    )
    plan, batch, now_ms = two_rows((0, 1), (0, 1))
    long = replace(batch, tokens=(5,) * rows, positions=tuple(range(rows)), samples=(), stages=(calls, calls))
    monkeypatch.setattr(socket, "socketpair", narrow_pair)
    chain = ProcessChain(settings, timeout_s=60.0)
    try:
        chain.fail_before_call = len(calls)
        chain.launch(plan, long, now_ms)
        with pytest.raises(EngineFailure, match=r"^stage 1 .*injected failure before its native call 0$"):
            chain.collect()
        chain.apply([[MemoryOp(OpKind.CLEAR)]] * 2)
        chain.launch(plan, batch, now_ms)
        assert chain.collect().chunks[0].token is not None
    finally:
        chain.close()


@pytest.mark.family_llama
def test_stage_that_cannot_be_loaded_is_bad_input_not_a_hang(tmp_path: Path) -> None:
    settings = hand_settings(resolve_model("llama"), load_family("llama"), "halves")
    broken = tmp_path / "stage.gguf"
    broken.write_bytes(b"GGUF" + bytes(60))

    with pytest.raises(UsageError, match="model cannot be loaded"):
        ProcessChain([settings[0], replace(settings[1], path=str(broken))])


def test_stages_end_when_their_coordinator_closes() -> None:
    chain = ProcessChain(hand_settings(resolve_model("llama"), load_family("llama"), "halves"))
    pids = list(chain.pids)
    assert not any(_is_gone(pid) for pid in pids)
    chain.close()

    assert all(_is_gone(pid) for pid in pids)


# -- frames


def test_frames_carry_headers_and_floats_and_waits_are_bounded() -> None:
    left, right = (Wire(end, timeout_s=0.05) for end in socket.socketpair())
    values = np.array([[1.5, -0.0], [np.inf, 1e-45]], np.float32)
    left.send({"rows": [3, 1]}, values)
    header, received = right.receive()

    assert header == {"rows": [3, 1]}
    assert received.tobytes() == values.tobytes()
    with pytest.raises(WireSilent):
        right.receive()
    left.connection.sendall(b"\x05\x00")  # half of a length, then nobody
    left.close()
    with pytest.raises(WireClosed):
        right.receive()
    with pytest.raises(WireClosed):
        right.send({})
        right.send({})
    right.close()


def test_calls_survive_the_wire() -> None:
    ops = (MemoryOp(OpKind.REMOVE, 3, 4, 5), MemoryOp(OpKind.COPY, 6, 0, 9, 2))
    calls = (Call(ops, (0, -1), (3, 0), (7, 0)), Call((), (1,), (4,), (-1,)))

    assert tuple(calls_from_data(calls_to_data(calls))) == calls
