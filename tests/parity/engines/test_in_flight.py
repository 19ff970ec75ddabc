"""Steps of one process in different stages: which stage runs when, and what a failure leaves of the rest."""

from __future__ import annotations

import pytest

from parity.engines.in_flight import StagesInTurn, Walk
from parity.records import Case, Fault, FaultKind, Session, Verdict
from parity.run.runner import run_exact_case
from scheduler.engine import Batch, EngineFailure
from scheduler.records import BudgetLedger, IterationPlan, IterationResult, PolicyIdentity

NO_BATCH = Batch((), (), (0,), (), (), (), (), ())


def plan(number: int) -> IterationPlan:
    return IterationPlan(number, 0, PolicyIdentity("fcfs"), (), BudgetLedger(1, 1, 0, 0))


class Stages(StagesInTurn):
    """Three stages that only say who ran where; step ``failing`` breaks off in the second."""

    def __init__(self, failing: int = -1) -> None:
        super().__init__()
        self.failing, self.ran = failing, []

    def walk(self, plan: IterationPlan, batch: Batch, now_ms: float) -> Walk:
        for stage in range(3):
            if stage:
                yield
            if (plan.decision_id, stage) == (self.failing, 1):
                raise EngineFailure("broke off")
            self.ran.append((plan.decision_id, stage))
        return IterationResult(plan.decision_id, 0, (), {}, now_ms, now_ms)


def test_while_a_step_is_in_its_second_stage_the_next_one_is_in_its_first() -> None:
    stages = Stages()
    for number in range(3):
        stages.launch(plan(number), NO_BATCH, 0.0)
    assert stages.ran == [(0, 0), (0, 1), (1, 0), (0, 2), (1, 1), (2, 0)]
    assert [stages.collect().decision_id for _ in range(3)] == [0, 1, 2]
    for stage in range(3):
        assert [number for number, at in stages.ran if at == stage] == [0, 1, 2]


def test_execute_runs_a_step_whole() -> None:
    stages = Stages(failing=1)
    assert stages.execute(plan(0), NO_BATCH, 0.0).decision_id == 0
    assert stages.ran == [(0, 0), (0, 1), (0, 2)]
    with pytest.raises(EngineFailure, match="broke off"):
        stages.execute(plan(1), NO_BATCH, 0.0)


def test_what_was_launched_behind_a_failure_is_never_run_and_never_collected() -> None:
    stages = Stages(failing=1)
    for number in range(4):
        stages.launch(plan(number), NO_BATCH, 0.0)
    assert stages.collect().decision_id == 0
    with pytest.raises(EngineFailure, match="broke off"):
        stages.collect()
    assert (3, 0) not in stages.ran and (2, 1) not in stages.ran
    stages.launch(plan(5), NO_BATCH, 0.0)
    assert stages.collect().decision_id == 5


@pytest.mark.parametrize("family", ["llama", "gemma2", "falcon_h1"])
@pytest.mark.parametrize("stage_cells", [(60, 44), (60, 52, 44)])
def test_a_later_stage_may_be_smaller_and_a_failure_in_flight_rolls_every_step_back(
    family: str, stage_cells: tuple[int, ...]
) -> None:
    """Five sessions of 20 rows in 44 cells of the last stage, as many steps in flight as stages; one breaks
    off while others are behind it.
    """
    sessions = tuple(
        Session(prompt=tuple(range(60 * i, 60 * i + 12)), max_tokens=9, arrival_step=i) for i in range(5)
    )
    case = Case(
        family=family,
        model=family,
        sessions=sessions,
        num_sequences=12,
        max_num_batched_tokens=16,
        max_chunk_tokens=5,
        policy="vllm_fcfs",
        stage_cells=stage_cells,
        steps_in_flight=len(stage_cells),
        faults=(
            Fault(kind=FaultKind.DECODE_ERROR, step=10, call=1),
            Fault(kind=FaultKind.PREEMPT, step=14, session=1, in_flight=True),
        ),
    )
    outcome = run_exact_case(case)
    assert outcome.verdict is Verdict.PASS, (outcome.reason, outcome.findings)
    assert outcome.marks["engine_failed"] == 1 and outcome.marks["overlapped"] > 0
    assert outcome.sessions == 5
