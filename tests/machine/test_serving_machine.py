"""The state machine on the exact engine, on a user's engine and on a user's scheduler,
and wrong ones that it catches.
"""

from __future__ import annotations

import pytest
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

from parity.engines.exact import ExactEngine
from parity.errors import UsageError
from parity.run.under_test import ENGINE_OFFERS, Brought, check_offers, load_factory
from parity.suites.conformance import make_machine
from parity.suites.machine import exact_model, exact_solo, machine_runs, make_exact
from scheduler.engine import Engine, OpKind
from scheduler.limits import PoolLimits, StepLimits
from scheduler.loop import Scheduler
from scheduler.policies import make_policy
from scheduler.policy.base import Policy
from tests.scheduler.serving import OPTIMISTIC

EXAMPLES = "tests.machine.examples"


def machine_of(brought: Brought) -> type[RuleBasedStateMachine]:
    """The machine with a user's scheduler and engine, and ours where none was brought."""
    schedulers = brought.scheduler_factory
    if brought.engine is not None:
        return make_machine(brought.engine_factory, scheduler_factory=schedulers)
    return make_machine(make_exact, scheduler_factory=schedulers, solo=exact_solo)


def test_scheduler_keeps_the_laws_on_the_engine(brought: Brought) -> None:
    """Ours, or what ``--scheduler`` and ``--engine`` name."""
    run_state_machine_as_test(machine_of(brought), settings=machine_runs(80))


@pytest.mark.parametrize(
    "brought", [Brought(engine=f"{EXAMPLES}:make_engine"), Brought(scheduler=f"{EXAMPLES}:make_scheduler")]
)
def test_the_examples_keep_the_laws(brought: Brought) -> None:
    run_state_machine_as_test(machine_of(brought), settings=machine_runs(25))


def test_optimistic_reference_scheduler_keeps_the_laws_on_the_exact_engine() -> None:
    def make_scheduler(engine: Engine, policy: Policy, steps: StepLimits) -> Scheduler:
        return Scheduler(engine, make_policy("fcfs", **OPTIMISTIC), steps)

    machine = make_machine(make_exact, scheduler_factory=make_scheduler, solo=exact_solo)
    run_state_machine_as_test(machine, settings=machine_runs(80))


class Forgetful(ExactEngine):
    """Wrong: it does not carry out removals, so rows land where they should not."""

    def __init__(self, limits: tuple[PoolLimits, ...]) -> None:
        super().__init__(limits, exact_model(limits))
        for pool in self.pools:
            real = pool.apply
            pool.apply = lambda op, real=real: None if op.kind is OpKind.REMOVE else real(op)


def test_machine_kills_an_engine_with_wrong_memory() -> None:
    with pytest.raises(Exception):  # noqa: B017 - an abort, a failed law or step, whichever is first
        run_state_machine_as_test(
            make_machine(Forgetful, solo=exact_solo), settings=machine_runs(100, shrink=False)
        )


@pytest.mark.parametrize(
    "wrong",
    [
        Brought(engine=f"{EXAMPLES}:CountingEngine"),
        Brought(engine=f"{EXAMPLES}:LeakyEngine"),
        Brought(scheduler=f"{EXAMPLES}:SwappingScheduler"),
    ],
    ids=["counting engine", "leaky engine", "swapping scheduler"],
)
def test_machine_kills_what_a_user_brings_with_a_fault(wrong: Brought) -> None:
    with pytest.raises(AssertionError, match="not as alone|strayed"):
        run_state_machine_as_test(machine_of(wrong), settings=machine_runs(1000, shrink=False))


@pytest.mark.parametrize(
    ("specification", "part"),
    [
        ("tests.machine.examples", "package.module:factory"),
        ("no.such.module:make", "cannot be imported"),
        ("tests.machine.examples:absent", "has no 'absent'"),
        ("tests.machine.test_serving_machine:EXAMPLES", "not a factory"),
    ],
)
def test_a_wrong_factory_is_named(specification: str, part: str) -> None:
    with pytest.raises(UsageError, match=part):
        load_factory(specification)


def test_a_product_that_is_no_engine_is_named() -> None:
    with pytest.raises(UsageError, match="lacks limits, execute, apply"):
        check_offers(object(), ENGINE_OFFERS, specification="a:b")
