"""Loads for the scheduler on the exact engine, without a model: churn,
endurance, queue length, small cases.
"""

from __future__ import annotations

import gc
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
from time import process_time

from parity.checkers.conservation import check_conservation
from parity.engines.exact import ExactEngine, ExactModel, expected_tokens
from parity.telemetry import Totals
from scheduler.engine import Batch, MemoryOp, completed_result
from scheduler.limits import PoolLimits, Sharing, StepLimits
from scheduler.loop import Scheduler
from scheduler.policies import make_policy
from scheduler.policies.fcfs import Fcfs
from scheduler.policy.base import Policy
from scheduler.policy.state import SchedulerState
from scheduler.records import (
    IterationPlan,
    IterationResult,
    PolicyIdentity,
    Request,
    SessionState,
    SessionView,
)

VOCABULARY = 32_000


class SilentEngine:
    """Answers every sample with one token and keeps nothing: what is left is the scheduler's own cost."""

    def __init__(self, limits: tuple[PoolLimits, ...]) -> None:
        self.limits = limits

    def execute(self, plan: IterationPlan, batch: Batch, now_ms: float) -> IterationResult:
        return completed_result(plan, batch, [1] * len(batch.samples), started_ms=now_ms, finished_ms=now_ms)

    def apply(self, stages: tuple[tuple[MemoryOp, ...], ...]) -> None:
        """Nothing to forget."""


# -- churn


class Occupying(Policy):
    """FCFS that fills a share of the pool: ``reserving`` counts rows to come, else only prompts count."""

    identity = PolicyIdentity("fcfs")
    contract = Fcfs.contract

    def __init__(self, num_cells: int, occupancy: float, *, reserving: bool) -> None:
        super().__init__()
        self.num_cells, self.occupancy, self.reserving = num_cells, occupancy, reserving

    def future_rows(self, state: SchedulerState, view: SessionView) -> int:
        return (
            view.future_rows
            if self.reserving
            else max(view.num_prompt_tokens, view.committed) - view.computed
        )

    def chunk_tokens(self, state: SchedulerState, view: SessionView, available: int) -> int:
        if view.state is SessionState.RUNNING:
            return available
        reserved = sum(self.future_rows(state, state.views[name]) for name in state.running)
        taken = self.num_cells - state.memory.available_rows() + reserved + self.future_rows(state, view)
        return available if taken <= self.occupancy * self.num_cells else 0


@dataclass(frozen=True, slots=True)
class Churn:
    """What a churn came to: mean share of cells in use while a queue waited, rows rebuilt per useful row."""

    occupancy: float
    rebuild_rate: float
    preemptions: int
    steps: int
    most_retired_ids: int


def run_churn(
    occupancy: float,
    *,
    reserving: bool,
    requests: int = 400,
    num_cells: int = 4096,
    rows: tuple[int, int] = (16, 256),
    seed: int = 0,
) -> Churn:
    """Requests with prompts and outputs of ``rows`` tokens, all waiting at once, through one pool."""
    source = random.Random(seed)
    limits = (PoolLimits(num_cells=num_cells, num_sequences=256, sharing=Sharing.NONE),)
    scheduler = Scheduler(
        SilentEngine(limits),
        Occupying(num_cells, occupancy, reserving=reserving),
        StepLimits(max_num_batched_tokens=512, max_num_seqs=200, max_chunk_tokens=512),
    )
    for index in range(requests):
        prompt = tuple(source.randrange(VOCABULARY) for _ in range(source.randint(*rows)))
        scheduler.submit(
            Request(request_id=f"r{index}", prompt=prompt, max_tokens=source.randint(*rows)), 0.0
        )
    totals, used = Totals(), []
    while not scheduler.is_idle:
        record = scheduler.step(0.0)
        totals.add(record.as_dict())
        if record.waiting:
            used.append(record.cells_used / num_cells)
    useful = totals.values["prefill_tokens"] + totals.values["decode_tokens"]
    return Churn(
        sum(used) / max(len(used), 1),
        totals.values["recompute_tokens"] / useful,
        int(totals.values["preempted"]),
        totals.steps,
        int(totals.values["ids_retired"]),
    )


# -- endurance


@dataclass(frozen=True, slots=True)
class Endurance:
    """A long run in CPU seconds; ``grown_blocks`` is how many more blocks Python holds at the end than
    after a tenth of the requests.
    """

    requests: int
    steps: int
    seconds: float
    checked: int
    grown_blocks: int


def run_endurance(
    requests: int,
    *,
    live: int = 64,
    check_every: int = 997,
    seed: int = 0,
    report: Callable[[int], None] = lambda done: None,
) -> Endurance:
    """Small requests of many clients, some cancelled and some sharing a prefix, through one exact engine.

    Every ``check_every``-th answer is compared with the one it gives alone; raises AssertionError when one
    differs or when anything is left at the end.
    """
    source = random.Random(seed)
    model = ExactModel(vocabulary=VOCABULARY)
    engine = ExactEngine((PoolLimits(num_cells=2048, num_sequences=200),), model)
    scheduler = Scheduler(
        engine,
        make_policy("fcfs"),
        StepLimits(max_num_batched_tokens=256, max_num_seqs=live, prefix_block_tokens=4),
    )
    offered: dict[str, Request] = {}
    submitted = ended = steps = checked = cancelled = early_blocks = 0
    started = process_time()
    while ended < requests:
        while len(scheduler.table.views) < 2 * live and submitted < requests:
            root = tuple(range(8 * (submitted % 5), 8 * (submitted % 5) + 8)) if submitted % 3 == 0 else ()
            prompt = root + tuple(source.randrange(VOCABULARY) for _ in range(source.randint(1, 4)))
            request = Request(
                request_id=f"r{submitted}",
                prompt=prompt,
                max_tokens=source.randint(1, 3),
                client_id=f"c{submitted % 50}",
            )
            scheduler.submit(request, float(steps))
            offered[request.request_id] = request
            submitted += 1
        if steps % 7 == 0 and offered:
            cancelled += scheduler.cancel(next(reversed(offered)), float(steps))
        scheduler.step(float(steps))
        check_conservation(scheduler.memory)
        steps += 1
        for completion in scheduler.take_completions():
            request = offered.pop(completion.request_id)
            ended += 1
            if ended % check_every == 0:
                name = request.request_id
                solo = expected_tokens(model, request.prompt, request.max_tokens, request_id=name)
                if completion.tokens != solo[: len(completion.tokens)]:
                    raise AssertionError(f"{request} gave {completion.tokens}, alone {solo}")
                checked += 1
            if ended == max(requests // 2, 1):
                gc.collect()
                early_blocks = sys.getallocatedblocks()
        report(ended)
    scheduler.drain_prefixes()
    gc.collect()
    grown = sys.getallocatedblocks() - early_blocks
    if engine.pools[0].num_used() or offered or scheduler.memory.residences:
        raise AssertionError("cells, sessions or residences are left when nothing is live")
    return Endurance(requests, steps, process_time() - started, checked, grown)


# -- queue length, and the cost of a step


def step_microseconds(*, running: int, waiting: int, steps: int = 200, prompt: int = 4) -> float:
    """Mean CPU time of planning and applying one step with ``running`` decodes and ``waiting`` requests
    behind them; the engine costs next to nothing.
    """
    limits = (
        PoolLimits(
            num_cells=running * (prompt + steps + 8),
            num_sequences=min(256, running + 2),
            sharing=Sharing.NONE,
        ),
    )
    scheduler = Scheduler(SilentEngine(limits), make_policy("fcfs"), StepLimits(max_num_seqs=running))
    for index in range(running + waiting):
        scheduler.submit(
            Request(request_id=f"r{index}", prompt=tuple(range(prompt)), max_tokens=steps + 8), 0.0
        )
    scheduler.step(0.0)
    started = process_time()
    for _ in range(steps):
        scheduler.step(0.0)
    return (process_time() - started) / steps * 1e6


# -- small cases


def run_small_cases(cases: int, *, seed: int = 0) -> float:
    """CPU seconds for cases of 4 sessions and 40 tokens in all, always-on validation and
    comparison with solo included.
    """
    source = random.Random(seed)
    started = process_time()
    for _ in range(cases):
        recurrent = source.random() < 0.4
        model = ExactModel(recurrent=recurrent, window=None if recurrent else source.choice((None, 4)))
        limits = (
            PoolLimits(
                num_cells=source.choice((16, 40)),
                num_sequences=8,
                recurrent=recurrent,
                sharing=Sharing.WHOLE_STATE if recurrent else Sharing.POSITIONAL,
            ),
        )
        scheduler = Scheduler(
            ExactEngine(limits, model),
            make_policy("fcfs"),
            StepLimits(max_num_batched_tokens=source.choice((4, 64)), prefix_block_tokens=4),
        )
        requests = {}
        for index in range(4):
            prompt = tuple(source.randrange(4) for _ in range(6))
            requests[f"s{index}"] = Request(request_id=f"s{index}", prompt=prompt, max_tokens=4)
            scheduler.submit(requests[f"s{index}"], 0.0)
        while not scheduler.is_idle:
            scheduler.step(0.0)
            check_conservation(scheduler.memory)
        for completion in scheduler.take_completions():
            request = requests[completion.request_id]
            if completion.tokens != expected_tokens(model, request.prompt, 4, request_id=request.request_id):
                raise AssertionError(f"{request} gave {completion.tokens}")
    return process_time() - started
