"""The state machine of ``parity.suites.conformance`` with our scheduler on the exact engine."""

from __future__ import annotations

from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from parity.engines.exact import ExactEngine, ExactModel, expected_tokens
from parity.suites.conformance import make_machine
from scheduler.limits import PoolLimits
from scheduler.records import Request

VOCABULARY = 1 << 30  # digests practically never agree by chance


def exact_model(limits: tuple[PoolLimits, ...], window: int | None = None) -> ExactModel:
    """What a session sees in such pools: a state where they keep one, else all its cells, or a window."""
    recurrent = limits[0].recurrent
    return ExactModel(recurrent=recurrent, window=None if recurrent else window, vocabulary=VOCABULARY)


def make_exact(limits: tuple[PoolLimits, ...]) -> ExactEngine:
    """The engine of a run."""
    return ExactEngine(limits, exact_model(limits))


def exact_solo(limits: tuple[PoolLimits, ...], request: Request) -> tuple[int, ...]:
    """What a request gives alone, by the definition."""
    return expected_tokens(
        exact_model(limits),
        request.prompt,
        request.max_tokens,
        request_id=request.request_id,
        sampling=request.sampling,
        stop_token_ids=request.stop_token_ids,
        stages=len(limits),
    )


def machine_runs(runs: int, *, shrink: bool = True) -> settings:
    """The same runs every time, of thirty rules each."""
    return settings(
        max_examples=runs,
        stateful_step_count=30,
        deadline=None,
        derandomize=True,
        phases=[Phase.generate, Phase.shrink] if shrink else [Phase.generate],
        database=None,
        suppress_health_check=list(HealthCheck),
    )


def run_machine(runs: int) -> None:
    """Run it. Raises whatever broke, with the steps that lead there in its notes."""
    machine = make_machine(make_exact, solo=exact_solo)
    run_state_machine_as_test(machine, settings=machine_runs(runs))
