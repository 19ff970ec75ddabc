"""One engine and one scheduler of a user's own, as ``--engine`` and ``--scheduler`` take them."""

from __future__ import annotations

from parity.engines.exact import ExactEngine, ExactModel
from scheduler.engine import Engine
from scheduler.limits import PoolLimits, StepLimits
from scheduler.loop import Scheduler
from scheduler.policies import make_policy


def make_engine(limits: tuple[PoolLimits, ...]) -> Engine:
    """An engine with a sliding window of three positions."""
    return ExactEngine(limits, ExactModel(window=None if limits[0].recurrent else 3, vocabulary=1000,
                                          recurrent=limits[0].recurrent))


def make_scheduler(engine: Engine, steps: StepLimits) -> Scheduler:
    """A scheduler that shares nothing and runs one session at a time."""
    return Scheduler(engine, make_policy("fcfs"), StepLimits(
        max_num_batched_tokens=steps.max_num_batched_tokens, max_num_seqs=1, prefix_cache=False,
        max_waiting=steps.max_waiting))
