"""A memory in shards: who enters where, what stays of one shard in it, and that all of it is exact."""

from __future__ import annotations

import threading
from dataclasses import replace

import numpy as np
import pytest

from parity.engines.exact import ExactEngine
from parity.engines.shards import ShardedEngine, parts_of
from parity.mutants.in_shards import in_two_shards
from parity.records import Verdict
from parity.run.runner import drive_exact, exact_engine, run_exact_case
from scheduler.engine import PAD_ROW, Batch, Call, EngineFailure, Sample, completed_result
from scheduler.limits import PoolLimits, StepLimits
from scheduler.loop import Scheduler
from scheduler.memory import Memory
from scheduler.policies import make_policy
from scheduler.policy.plan import MAX_IMBALANCE
from scheduler.records import (
    BudgetLedger,
    IllegalTransition,
    IterationPlan,
    IterationResult,
    PlannedChunk,
    PolicyIdentity,
    Request,
    SamplingParams,
)
from scheduler.shards import ShardedMemory

BLOCK = 4


def scheduler_of(num_shards: int, *, cells: int = 40, policy: str = "fcfs", **steps: int) -> Scheduler:
    limits = PoolLimits(num_cells=cells, num_sequences=12, pad_lone_rows=False)
    engine = ShardedEngine([ExactEngine((limits,)) for _ in range(num_shards)])
    return Scheduler(
        engine, make_policy(policy), StepLimits(**{"prefix_block_tokens": BLOCK, "max_num_seqs": 8, **steps})
    )


def submit(scheduler: Scheduler, *requests: tuple[str, tuple[int, ...], int]) -> None:
    for name, prompt, most in requests:
        assert scheduler.submit(Request(request_id=name, prompt=prompt, max_tokens=most), 0.0) is None


def homes(scheduler: Scheduler) -> dict[str, int]:
    memory = scheduler.memory
    return {name: memory.shards.index(memory.home(name)) for name in memory.residences}


def run_out(scheduler: Scheduler) -> None:
    now = 0.0
    while not scheduler.is_idle:
        now += 1.0
        scheduler.step(now)


def test_one_shard_is_the_memory_itself() -> None:
    limits = PoolLimits(num_cells=40)
    scheduler = Scheduler(ExactEngine((limits,)), make_policy("fcfs"), StepLimits())
    assert type(scheduler.memory) is Memory and scheduler.memory.shards == (scheduler.memory,)
    assert type(scheduler_of(2).memory) is ShardedMemory


def test_sessions_that_arrive_together_spread_evenly() -> None:
    """Nothing is resident: the fewest sessions decide, then the lowest number."""
    scheduler = scheduler_of(3)
    submit(scheduler, *((f"s{i}", (10 + i, 20 + i), 3) for i in range(7)))
    scheduler.step(0.0)
    assert homes(scheduler) == {"s0": 0, "s3": 0, "s6": 0, "s1": 1, "s4": 1, "s2": 2, "s5": 2}


def test_a_session_goes_where_the_longest_prefix_is() -> None:
    """Shard 1 keeps the nine tokens of b's prompt, shard 0 the five of a's: c goes on from b's."""
    scheduler = scheduler_of(2)
    trunk = tuple(range(100, 108))
    submit(scheduler, ("a", trunk[:4] + (7,), 2), ("b", (*trunk, 8), 2))
    run_out(scheduler)
    kept = [[entry.count for entry in shard.prefix.entries.values()] for shard in scheduler.memory.shards]
    assert kept == [[5], [9]]
    submit(scheduler, ("c", (*trunk, 9, 9), 3), ("d", (5, 5), 3), ("e", trunk[:5], 3))
    flight = scheduler.begin(50.0)
    assert homes(scheduler) == {"c": 1, "d": 0, "e": 0}
    # c shares 8 of its 10 tokens. e could share 4 in either shard, and one session lives in each; of 40 rows
    # d needs 4 in shard 0, in shard 1 c needs 4 beside the 9 that it pins: more are left in shard 0.
    assert [(c.request_id, c.start, c.stop) for c in flight.plan.chunks] == [
        ("c", 8, 10),
        ("d", 0, 2),
        ("e", 4, 5),
    ]


def test_a_prefix_draws_no_more_sessions_than_the_imbalance_allows() -> None:
    """All want the trunk of shard 0. With 4 more there than in shard 1 the next one goes to shard 1."""
    scheduler = scheduler_of(2, cells=200, max_num_seqs=12)
    trunk = tuple(range(100, 108))
    submit(scheduler, ("a", (*trunk, 1), 2))
    run_out(scheduler)
    submit(scheduler, *((f"s{i}", (*trunk, 30 + i), 4) for i in range(7)))
    scheduler.step(50.0)
    where = homes(scheduler)
    assert MAX_IMBALANCE == 4
    assert [where[f"s{i}"] for i in range(7)] == [0, 0, 0, 0, 1, 0, 1]


def test_a_full_shard_sends_a_session_on_to_the_next_one() -> None:
    """a needs 9 + 10 - 1 rows of shard 0's 20, b 6 of shard 1's. c (4 rows) finds 2 left in shard 0."""
    scheduler = scheduler_of(2, cells=20)
    submit(scheduler, ("a", tuple(range(9)), 10), ("b", (50, 51, 52), 4), ("c", (60, 61), 3))
    scheduler.step(0.0)
    assert homes(scheduler) == {"a": 0, "b": 1, "c": 1}


def test_what_no_shard_has_room_for_waits_and_what_none_could_ever_hold_is_refused() -> None:
    scheduler = scheduler_of(2, cells=20)
    assert scheduler.submit(Request(request_id="x", prompt=tuple(range(12)), max_tokens=10), 0.0) is not None
    submit(scheduler, *((name, tuple(range(i, i + 9)), 8) for i, name in enumerate("abc")))
    scheduler.step(0.0)
    assert homes(scheduler) == {"a": 0, "b": 1}  # 16 rows each: 4 are left in either
    assert list(scheduler.table.waiting) == ["c"]
    run_out(scheduler)


def test_the_victim_runs_in_the_shard_that_lacks_cells() -> None:
    """vllm_fcfs keeps nothing free. The newest of all runs in shard 1, and shard 0 runs out."""
    scheduler = scheduler_of(2, cells=14, policy="vllm_fcfs", prefix_cache=False)
    submit(scheduler, ("a", (1, 2, 3), 10), ("b", (4, 5), 3), ("c", (6, 7, 8), 10), ("d", (9,), 2))
    seen = []
    scheduler.observer = lambda flight, result: seen.extend(flight.preemptions)
    run_out(scheduler)
    assert seen, "the pool was meant to be too small"
    for preemption in seen:
        assert preemption.requester in preemption.candidates
        assert {preemption.victim, preemption.requester} <= {"a", "c"}, preemption


def test_a_preempted_session_may_come_back_in_another_shard() -> None:
    outcome = run_exact_case(in_two_shards("llama", shards=3, policy="vllm_fcfs", pool_cells=24, faults=()))
    assert outcome.verdict is Verdict.PASS, outcome.findings
    assert outcome.marks["preempted"] and outcome.marks["moved"] and outcome.marks["sharded"]


@pytest.mark.parametrize("shards", [1, 2, 4])
@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3next"])
def test_every_number_of_shards_gives_the_solo_answers(family: str, shards: int) -> None:
    outcome = run_exact_case(in_two_shards(family, shards=shards))
    assert outcome.verdict is Verdict.PASS, outcome.findings
    assert (outcome.marks["sharded"] > 0) is (shards > 1)


def test_a_plan_that_names_no_shard_is_refused() -> None:
    scheduler = scheduler_of(2)
    submit(scheduler, ("a", (1, 2), 2))
    plan_iteration = scheduler.policy.plan_iteration

    def elsewhere(state: object) -> IterationPlan:
        plan = plan_iteration(state)
        return replace(plan, intents=tuple(replace(intent, shard=2) for intent in plan.intents))

    scheduler.policy.plan_iteration = elsewhere
    with pytest.raises(IllegalTransition, match="intent names no shard"):
        scheduler.begin(0.0)


def batch_of_two_shards() -> tuple[IterationPlan, Batch]:
    """a (rows 0, 1) and c (row 3) live in shard 1, b (row 2) in shard 0; c's and b's rows are sampled."""
    chunks = (
        PlannedChunk("a", 0, 1, 0, 2),
        PlannedChunk("b", 0, 1, 5, 6),
        PlannedChunk("c", 0, 1, 7, 8),
    )
    plan = IterationPlan(3, 9, PolicyIdentity("fcfs"), chunks, BudgetLedger(8, 8, 4, 3))
    samples = (Sample(2, "b", 6, SamplingParams()), Sample(3, "c", 8, SamplingParams()))
    stages = (
        (Call((), (2,), (1,), (5,)),),
        (Call((), (0, PAD_ROW), (1, 0), (1, 0)), Call((), (1, 3), (1, 2), (2, 9))),
    )
    columns = ((10, 11, 12, 13), (0, 1, 5, 7), (0, 2, 3, 4), samples, (0, 1, 2), ("x", "y", "z"), (0, 5, 7))
    return plan, Batch(*columns, stages, shards=(1, 0, 1), num_shards=2)


def test_a_step_is_cut_by_shard_and_its_rows_are_numbered_anew() -> None:
    plan, batch = batch_of_two_shards()
    first, second = parts_of(plan, batch)
    assert (first.shard, second.shard) == (0, 1)
    assert [chunk.request_id for chunk in first.plan.chunks] == ["b"]
    assert first.batch == Batch(
        (12,),
        (5,),
        (0, 1),
        (Sample(0, "b", 6, SamplingParams()),),
        (1,),
        ("y",),
        (5,),
        ((Call((), (0,), (1,), (5,)),),),
    )
    assert [chunk.request_id for chunk in second.plan.chunks] == ["a", "c"]
    assert second.batch.tokens == (10, 11, 13) and second.batch.offsets == (0, 2, 3)
    assert second.batch.samples == (Sample(2, "c", 8, SamplingParams()),)
    assert [call.rows for call in second.batch.stages[0]] == [(0, PAD_ROW), (1, 2)]


class Shard:
    """An engine that answers its name and position, slowly if it is told to."""

    limits = (PoolLimits(),)

    def __init__(self, *, fails: str = "", waits_for: threading.Event | None = None) -> None:
        self.fails, self.waits_for = fails, waits_for
        self.fail_before_call: int | None = None
        self.observe_logits = None
        self.done = threading.Event()

    def execute(self, plan: IterationPlan, batch: Batch, now_ms: float) -> IterationResult:
        if self.waits_for is not None:
            assert self.waits_for.wait(10)
        self.done.set()
        if self.fails:
            raise EngineFailure(self.fails)
        for sample in batch.samples:
            if self.observe_logits is not None:
                self.observe_logits(sample.request_id, sample.position, np.zeros(2))
        tokens = [sample.position for sample in batch.samples]
        return completed_result(plan, batch, tokens, started_ms=now_ms, finished_ms=now_ms + len(tokens))


def test_shards_run_side_by_side_and_their_result_is_in_the_order_of_the_plan() -> None:
    """Shard 0 does not end before shard 1 has: one after the other they would wait for ever."""
    late = Shard()
    engine = ShardedEngine([Shard(waits_for=late.done), late], num_threads=2)
    seen: list[str] = []
    engine.observe_logits = lambda name, position, row: seen.append(name)
    result = engine.execute(*batch_of_two_shards(), 100.0)
    assert [(c.request_id, c.before, c.after, c.token) for c in result.chunks] == [
        ("a", 0, 2, None),
        ("b", 5, 6, 6),
        ("c", 7, 8, 8),
    ]
    assert result.debits == {"x": 2, "y": 1, "z": 1} and result.finished_ms == 101.0
    assert seen == ["b", "c"]  # shard by shard, though the second one was first


def test_the_first_shard_that_fails_is_told_when_all_are_through() -> None:
    other = Shard(fails="the second")
    engine = ShardedEngine([Shard(fails="the first", waits_for=other.done), other], num_threads=2)
    with pytest.raises(EngineFailure, match="the first"):
        engine.execute(*batch_of_two_shards(), 0.0)
    assert other.done.is_set()


@pytest.mark.parametrize(("call", "armed"), [(0, (0, None)), (2, (None, 1)), (3, (None, None))])
def test_an_injected_failure_counts_the_calls_of_all_shards(
    call: int, armed: tuple[int | None, int | None]
) -> None:
    """One call in shard 0, two in shard 1; the fourth there is none of: it stays armed."""
    engine = ShardedEngine([Shard(), Shard()])
    engine.fail_before_call = call
    engine.execute(*batch_of_two_shards(), 0.0)
    assert tuple(shard.fail_before_call for shard in engine.shards) == armed
    assert (engine.fail_before_call is not None) is (call == 3)


def test_threads_change_nothing_of_a_run() -> None:
    case = in_two_shards("llama", shards=3)
    one, many = exact_engine(case), exact_engine(case)
    many = ShardedEngine(many.shards, num_threads=3)
    first, second = drive_exact(case, one), drive_exact(case, many)
    assert [step.flight.batch for step in first.trace] == [step.flight.batch for step in second.trace]
    assert [step.result for step in first.trace] == [step.result for step in second.trace]
