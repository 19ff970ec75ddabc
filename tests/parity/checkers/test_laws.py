"""Each checker rejects histories that break its law on either side, and says who, when and where."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from parity.checkers.checker import Expectation
from parity.checkers.conservation import breaches_of, check_conservation, find_losses, owners_of, ranges_of
from parity.checkers.ends import ReproducibilityChecker, StreamChecker
from parity.engines.exact import ExactEngine
from parity.history import Answer, Run
from parity.mutants import cases, sharing_cases
from parity.records import Case, Fault, FaultKind, Finding
from parity.run.judge import LogitsRecorder
from parity.run.runner import exact_engine, run_exact_case
from scheduler.engine import Batch
from scheduler.loop import Scheduler
from scheduler.memory import Memory
from scheduler.policies import make_policy
from scheduler.records import Completion, FinishReason, IterationPlan, IterationResult
from scheduler.telemetry import StepRecord

CASE = cases.mixed("llama")


def memory_in_use(case: Case = CASE, steps: int = 4) -> Memory:
    """A scheduler's memory in the middle of a case, with some cells live, some retired, some free."""
    scheduler = Scheduler(exact_engine(case), make_policy(case.policy), case.step_limits())
    for index, session in enumerate(case.sessions):
        scheduler.submit(session.to_request(index, arrival_ms=0.0), 0.0)
    for _ in range(steps):
        scheduler.step(0.0)
    check_conservation(scheduler.memory)
    return scheduler.memory


def texts(memory: Memory) -> list[str]:
    return [breach.text for breach in breaches_of(memory)]


def test_lost_cell_names_operation_step_session_and_cells() -> None:
    memory = memory_in_use()
    before, pool = owners_of(memory), memory.pools[0]
    seq_id = memory.residences["s1"].seq_ids[0]
    cell = pool.owners[seq_id].cells.pop()
    pool.owners[seq_id].mask ^= 1 << cell
    (finding,) = find_losses(memory, before, operation="preempt of session 1", step=7)
    assert finding.checker == "conservation"
    assert finding.text == (
        f"after preempt of session 1 of step 7, stage 0: cells {cell} are lost: neither live nor available; "
        "held by session 1"
    )
    assert finding.data == {
        "step": 7, "operation": "preempt of session 1", "stage": 0, "cells": [cell], "session": 1,
    }  # fmt: skip


def test_cell_that_is_live_and_available_is_doubled() -> None:
    memory = memory_in_use()
    cell = memory.pools[0].owners[memory.residences["s0"].seq_ids[0]].cells[0]
    memory.pools[0].available |= 1 << cell
    assert texts(memory) == [f"cells {cell} are live and available at once"]


def test_cell_beyond_the_pool_is_none_of_its() -> None:
    memory = memory_in_use()
    beyond = memory.pools[0].everything.bit_length()
    memory.pools[0].available |= 1 << beyond
    assert texts(memory) == [f"cells {beyond} are none of the pool's"]


def test_lost_id_and_doubled_id_are_told_also_when_their_number_is_right() -> None:
    memory = memory_in_use()
    pool = memory.pools[0]
    lost = pool.free_ids.popleft()
    assert texts(memory) == [f"6 ids for 7: lost [{lost}], too many []"]
    pool.free_ids.append(pool.free_ids[0])
    assert texts(memory) == [f"7 ids for 7: lost [{lost}], too many [{pool.free_ids[0]}]"]
    pool.free_ids.append(lost)
    assert texts(memory) == [f"8 ids for 7: lost [], too many [{pool.free_ids[0]}]"]


@pytest.mark.parametrize("change", [1, -1])
def test_retired_cells_are_counted_by_id_both_ways(change: int) -> None:
    memory = memory_in_use(cases.early_finishers("llama", max_num_batched_tokens=8), steps=9)
    pool = memory.pools[0]
    seq_id = next(iter(pool.retired_left))
    pool.retired_left[seq_id] += change
    count = len(pool.retired)
    assert texts(memory) == [f"{count} retired cells, {count + change} counted, of ids [{seq_id}]"]


def test_owners_are_compared_not_counted() -> None:
    memory = memory_in_use()
    residence = memory.residences["s1"]
    live = residence.seq_ids[0]
    strange = next(iter(memory.pools[0].free_ids))
    residence.seq_ids = (strange,)  # as many as before
    assert texts(memory) == [
        f"sequences [{strange}] are a session's or a prefix's but not live, "
        f"sequences [{live}] are live but nobody's"
    ]


@pytest.mark.parametrize("change", [1, -1])
def test_users_of_a_kept_prefix_are_counted_both_ways(change: int) -> None:
    memory = memory_in_use(sharing_cases.shared_prefix("llama"), steps=6)
    entry = next(iter(memory.prefix.entries.values()))
    users = entry.users
    entry.users += change
    (text,) = texts(memory)
    assert text.startswith(
        f"a prefix of {entry.count} tokens counts {users + change} users, {users} sessions"
    )


def test_prefixes_that_are_as_many_and_as_large_as_they_may_be_are_no_breach_and_one_more_is() -> None:
    memory = memory_in_use(sharing_cases.shared_prefix("llama"), steps=6)
    count, rows = len(memory.prefix.entries), sum(e.count for e in memory.prefix.entries.values())
    memory.prefix.max_entries = count
    assert texts(memory) == []
    memory.prefix.max_entries = count - 1
    assert texts(memory) == [f"{count} prefixes are kept, at most {count - 1} may be"]
    memory.prefix.max_entries = count
    memory.total_rows = lambda: 2 * rows
    assert texts(memory) == []
    memory.total_rows = lambda: 2 * rows - 1
    assert texts(memory) == [f"prefixes keep {rows} tokens, more than half of the pool, {rows - 1}"]


def test_ranges_of_cells_are_half_read() -> None:
    assert ranges_of([1, 2, 3, 9, 11, 12]) == "1-3 9 11-12"
    assert ranges_of([]) == "none"


# -- streams, second runs, recorded rows


def ended(tokens: tuple[int, ...], given: list[tuple[int, int]], *, fired: tuple[Fault, ...] = ()) -> Run:
    """Session 0 was given (step, token) pairs and ended with ``tokens``."""
    reason = FinishReason.CANCELLED if fired else FinishReason.LENGTH
    run = Run(CASE, completions={0: Completion("s0", 0, tokens, reason)}, fired=list(fired))
    run.given_at, run.streams = {0: [step for step, _ in given]}, {0: [token for _, token in given]}
    return run


def stream_findings(run: Run) -> list[Finding]:
    return list(StreamChecker().check(run, Expectation({}, None, run)))


def test_doubled_lost_and_changed_tokens_of_a_stream_are_found_with_their_step() -> None:
    assert stream_findings(ended((4, 5), [(1, 4), (2, 5)])) == []
    (doubled,) = stream_findings(ended((4, 5), [(1, 4), (2, 4), (3, 5)]))
    assert doubled.text == "session 0 was given 3 tokens and ended with 2; they part at its token 1"
    assert doubled.data == {"step": 2, "session": 0, "token": 1}
    (lost,) = stream_findings(ended((4, 5), [(1, 4)]))
    assert (lost.data["token"], lost.data["step"]) == (1, 1)
    (changed,) = stream_findings(ended((4, 5), [(1, 4), (2, 6)]))
    assert changed.data["token"] == 1
    (silent,) = stream_findings(ended((4,), []))
    assert silent.data == {"session": 0, "token": 0}


def test_step_in_flight_when_its_session_is_cancelled_was_given_to_nobody() -> None:
    cancel = (Fault(kind=FaultKind.CANCEL, step=2, in_flight=True),)
    assert stream_findings(ended((4,), [(1, 4), (2, 5)], fired=cancel)) == []
    (late,) = stream_findings(ended((4, 5), [(1, 4), (2, 5)], fired=cancel))
    assert late.data["token"] == 1


def test_second_run_is_compared_by_logits_too() -> None:
    first, second = ended((4, 5), []), ended((4, 5), [])
    first.answers, second.answers = {0: Answer((4, 5), ("a", "b"))}, {0: Answer((4, 5), ("a", "c"))}
    checker = ReproducibilityChecker()
    assert list(checker.check(first, Expectation({}, None, first))) == []
    (finding,) = checker.check(first, Expectation({}, None, second))
    assert finding.data == {"session": 0}
    second.answers = {0: Answer((4, 5), ("a",))}
    assert len(list(checker.check(first, Expectation({}, None, second)))) == 1


def test_recorder_keeps_the_last_row_of_a_position() -> None:
    recorder, row = LogitsRecorder(), np.zeros(3, np.float32)
    recorder("s1", 7, row)
    row[0] = 5.0  # the engine's buffer is used again
    recorder("s1", 6, row)
    recorder("s1", 7, row + 1)
    assert [kept.tolist() for kept in recorder.rows(1)] == [[5.0, 0.0, 0.0], [6.0, 1.0, 1.0]]


# -- through the driver


@contextmanager
def scheduler_method(name: str, faulty: Callable[..., Any]) -> Iterator[None]:
    original = getattr(Scheduler, name)
    setattr(Scheduler, name, faulty(original))
    try:
        yield
    finally:
        setattr(Scheduler, name, original)


def test_livelock_is_a_cycle_and_ends_after_a_few_rounds() -> None:
    """Two sessions preempt each other before either has a new row: one's rebuild costs the other's rows."""

    def faulty(original: Callable[..., Any]) -> Callable[..., Any]:
        def finish(self: Any, result: IterationResult, now_ms: float) -> StepRecord:
            record = original(self, result, now_ms)
            running = list(self.table.running)
            if self._decision > 5 and running:
                for name in running:
                    self.preempt(name, now_ms)
            return record

        return finish

    case = cases.case_of(
        "llama", (cases.session(4, 9, 12), cases.session(5, 7, 12)), prefix_cache=False, max_num_seqs=1,
        max_num_batched_tokens=4,
    )  # fmt: skip
    with scheduler_method("finish", faulty):
        outcome = run_exact_case(case)
    (finding,) = [f for f in outcome.findings if f.checker == "liveness"]
    assert "the same rows were computed 65 times and no new one: a cycle of" in finding.text
    assert "session 0 [0," in finding.text and finding.text.endswith("sessions 0, 1 have no end")
    assert finding.data["step"] < 300


def test_step_that_fails_unasked_names_step_sessions_and_intervals() -> None:
    calls = []

    def faulty(
        self: Any,
        plan: IterationPlan,
        batch: Batch,
        now_ms: float,
        *,
        original: Callable[..., Any] = ExactEngine.execute,
    ) -> Callable[..., Any] | IterationResult | None:
        calls.append(plan)
        if len(calls) == 3:
            self.fail_next()
        return original(self, plan, batch, now_ms)

    original = ExactEngine.execute
    ExactEngine.execute = faulty
    try:
        outcome = run_exact_case(replace(CASE, sessions=CASE.sessions[:2]))
    finally:
        ExactEngine.execute = original
    (finding,) = [f for f in outcome.findings if f.checker == "engine"]
    assert finding.text.startswith("step 2 failed unasked with session 0 [6,7), session 1 [")
    assert finding.text.endswith("injected failure of a native call")
    assert (finding.data["step"], finding.data["session"]) == (2, 0)
