"""Marks are proved by what was planned, called and given back: a scheduler's own counts prove nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from parity.cases.strategies import landmark
from parity.checkers.marks import MARKS, count_marks, possible_marks
from parity.checkers.residence import StageMemory, facts_of
from parity.history import Run
from parity.mutants import cases, sharing_cases
from parity.mutants.in_flight import overlapped
from parity.records import Case, Fault, FaultKind
from parity.run.runner import drive_exact, exact_engine
from scheduler.engine import PAD_ROW, Call, MemoryOp, OpKind
from scheduler.limits import Layout
from scheduler.loop import Scheduler
from scheduler.policies import make_policy
from scheduler.records import IterationResult
from scheduler.telemetry import StepRecord


def run_of(case: Case) -> Run:
    run = drive_exact(case, exact_engine(case))
    assert run.findings == []
    return run


def counted(run: Run) -> dict[str, int]:
    """The same marks as the scheduler counts them itself."""
    records, streams = run.records, run.case.layout is Layout.STREAMS
    return {
        "shared": sum(record.prefix_hits for record in records),
        "preempted": sum(record.preempted for record in records),
        "resumed": sum(record.resumed for record in records),
        "rebuilt": sum(record.recompute_tokens > 0 for record in records),
        "engine_failed": sum(record.engine_failures for record in records),
        "pool_full": sum(
            record.cells_available == 0 or (streams and record.slots_used == run.case.num_sequences)
            for record in records
        ),
    }


@pytest.mark.parametrize("layout", Layout)
@pytest.mark.parametrize("family", cases.FAMILIES)
def test_our_scheduler_counts_what_the_trace_proves(family: str, layout: Layout) -> None:
    run = run_of(landmark(family, layout))
    proved = count_marks(run)
    assert {mark: proved[mark] for mark in counted(run)} == counted(run)
    assert proved["shared"] and proved["resumed"]


@pytest.mark.parametrize("layout", [Layout.UNIFIED, Layout.STOCK])
@pytest.mark.parametrize(
    "make", [cases.crowded, cases.failing, cases.rebuilt_in_vain, cases.refilled, cases.exactly_full]
)
@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3next"])
def test_no_mark_is_proved_that_did_not_happen(make: Callable[..., Any], family: str, layout: Layout) -> None:
    run = run_of(make(family, layout=layout))
    proved, own = count_marks(run), counted(run)
    assert all(proved[mark] <= own[mark] for mark in own)
    assert {mark for mark in own if proved[mark]} == {mark for mark in own if own[mark]}


class Boaster(Scheduler):
    """Never shares and is never full, preempts and resumes nobody, but counts as if it did."""

    def finish(self, result: IterationResult, now_ms: float) -> StepRecord:
        record = super().finish(result, now_ms)
        for name in ("prefix_hits", "preempted", "resumed", "recompute_tokens", "engine_failures"):
            setattr(record, name, 7)
        record.cells_available, record.slots_used = 0, 99
        return record


@pytest.mark.parametrize("layout", Layout)
def test_what_a_scheduler_says_of_itself_is_no_mark(layout: Layout) -> None:
    case = cases.mixed("llama", layout=layout)
    engine = exact_engine(case)
    run = drive_exact(case, engine, Boaster(engine, make_policy("fcfs"), case.step_limits()))
    proved = count_marks(run)
    assert all(counted(run).values())
    assert {mark: proved[mark] for mark in counted(run)} == dict.fromkeys(counted(run), 0)
    assert proved["mixed_step"] and set(proved) == set(MARKS)


def test_facts_name_sessions_and_steps() -> None:
    fault = Fault(kind=FaultKind.PREEMPT, step=6, session=1)
    facts = {f.traced.step: f for f in facts_of(run_of(cases.preempted("llama", faults=(fault,))))}
    (step,) = [step for step, found in facts.items() if found.resumed]
    assert facts[step].resumed == facts[step].displaced == (1,) and step >= 6
    assert [found.rebuilt for found in facts.values() if found.rebuilt][0] == (1,)
    assert not any(found.shared or found.full or found.failed for found in facts.values())


def test_shared_rows_are_named_by_who_took_them_over() -> None:
    run = run_of(sharing_cases.shared_prefix("llama"))
    taken = [session for facts in facts_of(run) for session in facts.shared]
    assert taken and 0 not in taken  # the first had nobody to take over from


def call(*rows: tuple[int, int, int], ops: tuple[MemoryOp, ...] = ()) -> Call:
    """Rows as (batch row, sequence id, cell)."""
    numbers, seq_ids, cells = zip(*rows, strict=True)
    return Call(ops, numbers, seq_ids, cells)


def test_rows_of_a_context_by_hand() -> None:
    memory = StageMemory(streams=False)
    memory.place(call((0, 1, 4), (1, 1, 5), (2, 1, 9), (PAD_ROW, 0, 0)), (0, 1, 2))
    memory.apply(MemoryOp(OpKind.COPY, 2, 0, 2, 1))
    memory.place(call((0, 2, 6)), (2,))
    assert memory.rows == {1: {0: 4, 1: 5, 2: 9}, 2: {0: 4, 1: 5, 2: 6}}
    assert memory.copied_from == {2: 1}
    memory.apply(MemoryOp(OpKind.REMOVE, 1, 1, 3))
    assert (memory.rows[1], memory.touched) == ({0: 4}, [1])
    memory.apply(MemoryOp(OpKind.REMOVE, 1))
    assert 1 not in memory.rows and memory.copied_from == {2: 1}
    memory.apply(MemoryOp(OpKind.CLEAR))
    assert (memory.rows, memory.copied_from) == ({}, {})


def test_copies_between_streams_have_cells_of_their_own() -> None:
    memory = StageMemory(streams=True)
    memory.place(call((0, 1, -1), (1, 1, -1)), (0, 1))
    memory.apply(MemoryOp(OpKind.COPY, 2, source=1))
    assert memory.rows[1].keys() == memory.rows[2].keys()
    assert not set(memory.rows[1].values()) & set(memory.rows[2].values())


@pytest.mark.parametrize("layout", list(Layout))
@pytest.mark.parametrize("pads", [False, True])
@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("in_shards", [False, True])
def test_marks_that_a_run_cannot_have_are_not_asked_of_it(
    layout: Layout, pads: bool, overlaps: bool, in_shards: bool
) -> None:
    possible = possible_marks(layout, pads=pads, overlaps=overlaps, in_shards=in_shards)
    impossible = {
        "padded_call": not (pads and layout is Layout.UNIFIED),
        "overlapped": not overlaps,
        "sharded": not in_shards,
        "moved": not in_shards,
    }
    assert possible == tuple(mark for mark in MARKS if not impossible.get(mark, False))


def test_tokens_overlap_where_steps_are_in_flight_together_and_nowhere_else() -> None:
    run = run_of(overlapped("llama"))
    busy = [traced.step for traced in run.trace if traced.flight.plan.chunks]
    late = [
        any(emitted < step <= given for step in busy)
        for session, steps in run.emitted_at.items()
        for emitted, given in zip(steps, run.given_at[session], strict=True)
    ]
    assert count_marks(run)["overlapped"] == sum(late) and 0 < sum(late) < len(late)
    assert count_marks(run_of(overlapped("llama", steps_in_flight=1)))["overlapped"] == 0
