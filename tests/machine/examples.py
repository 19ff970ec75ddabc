"""A user's engine and a user's scheduler, as ``--engine`` and ``--scheduler`` take them, and wrong ones."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from parity.engines.exact import ExactEngine, ExactModel
from scheduler.engine import Batch, Engine, MemoryOp, OpKind
from scheduler.flight import Flight
from scheduler.limits import PoolLimits, StepLimits
from scheduler.loop import Scheduler
from scheduler.policies import make_policy
from scheduler.policy.base import Policy
from scheduler.records import IterationPlan, IterationResult


def make_engine(limits: tuple[PoolLimits, ...]) -> Engine:
    """An engine with a sliding window of three positions."""
    return ExactEngine(limits, example_model(limits))


def example_model(limits: tuple[PoolLimits, ...]) -> ExactModel:
    """Sees the last three positions, or a state where the pool keeps states."""
    recurrent = limits[0].recurrent
    return ExactModel(window=None if recurrent else 3, vocabulary=1000, recurrent=recurrent)


def make_scheduler(engine: Engine, policy: Policy, steps: StepLimits, *, model_digest: str = "") -> Scheduler:
    """A scheduler that has an order of its own whatever policy is asked for."""
    return Scheduler(engine, make_policy("sarathi"), steps, model_digest=model_digest)


class CountingEngine(ExactEngine):
    """Wrong: a token depends on how many sessions are in the batch."""

    def __init__(self, limits: tuple[PoolLimits, ...]) -> None:
        super().__init__(limits, example_model(limits))

    def execute(self, plan: IterationPlan, batch: Batch, now_ms: float) -> IterationResult:
        result = super().execute(plan, batch, now_ms)
        others = len(result.chunks) - 1
        chunks = [
            item if item.token is None else item._replace(token=item.token + others) for item in result.chunks
        ]
        return replace(result, chunks=tuple(chunks))


class BrokenEngine(ExactEngine):
    """Wrong at once."""

    def execute(self, plan: IterationPlan, batch: Batch, now_ms: float) -> IterationResult:
        raise ValueError("broken on purpose")


class UnmadeEngine(ExactEngine):
    """Wrong: cannot be made for every limits that it is given."""

    def __init__(self, limits: tuple[PoolLimits, ...]) -> None:
        super().__init__(limits)
        if limits[0].num_cells < 64:
            raise ValueError("no room")


class ShowingEngine(ExactEngine):
    """Shows logits: one for each token that it chose."""

    noise = 0.0

    def __init__(self, limits: tuple[PoolLimits, ...]) -> None:
        super().__init__(limits, example_model(limits))
        self.observe_logits = None

    def execute(self, plan: IterationPlan, batch: Batch, now_ms: float) -> IterationResult:
        result = super().execute(plan, batch, now_ms)
        tokens = {item.request_id: item.token for item in result.chunks}
        for sample in batch.samples:
            row = np.array([tokens[sample.request_id] + self.noise * len(batch.samples)], np.float32)
            self.observe_logits(sample.request_id, sample.position, row)
        return result


class NoisyEngine(ShowingEngine):
    """Wrong: its logits depend on how many sessions are sampled, its tokens don't."""

    noise = 0.25


class LeakyEngine(ExactEngine):
    """Wrong: a shared prefix is not quite what its donor computed."""

    def __init__(self, limits: tuple[PoolLimits, ...]) -> None:
        super().__init__(limits, example_model(limits))
        for pool in self.pools:
            pool.apply = LeakyCopy(pool)


class LeakyCopy:
    """A pool's ``apply`` that changes what it copies."""

    def __init__(self, pool: Any) -> None:
        self.pool, self.real = pool, pool.apply

    def __call__(self, op: MemoryOp) -> None:
        self.real(op)
        if op.kind is OpKind.COPY and self.pool.sequences[op.seq_id].cells:
            self.pool.sequences[op.seq_id].folds[-1] ^= 1


class SwappingScheduler(Scheduler):
    """Wrong: where two sessions sample in one step, each is given the other's row."""

    def begin(self, now_ms: float) -> Flight:
        flight = super().begin(now_ms)
        samples = flight.batch.samples
        if len(samples) > 1:
            first, second, *rest = samples
            swapped = (first._replace(row=second.row), second._replace(row=first.row), *rest)
            flight.batch = replace(flight.batch, samples=swapped)
        return flight


def make_nothing(*arguments: object, **named: object) -> object:
    """No engine and no scheduler."""
    return object()
