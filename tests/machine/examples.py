"""A user's engine and a user's scheduler, as ``--engine`` and ``--scheduler`` take them, and wrong ones."""

from __future__ import annotations

from dataclasses import replace

from parity.engines.exact import ExactEngine, ExactModel
from scheduler.engine import Engine, MemoryOp, OpKind
from scheduler.flight import Flight
from scheduler.limits import PoolLimits, StepLimits
from scheduler.loop import Scheduler
from scheduler.policies import make_policy
from scheduler.policies.base import Policy


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


class LeakyEngine(ExactEngine):
    """Wrong: a shared prefix is not quite what its donor computed."""

    def __init__(self, limits: tuple[PoolLimits, ...]) -> None:
        super().__init__(limits, example_model(limits))
        for pool in self.pools:
            pool.apply = LeakyCopy(pool)


class LeakyCopy:
    """A pool's ``apply`` that changes what it copies."""

    def __init__(self, pool) -> None:
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
            swapped = (replace(first, row=second.row), replace(second, row=first.row), *rest)
            flight.batch = replace(flight.batch, samples=swapped)
        return flight


def make_nothing(*arguments: object, **named: object) -> object:
    """No engine and no scheduler."""
    return object()
