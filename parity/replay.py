"""Replays a case on the exact engine under a virtual clock: each step takes ``case.ms_per_step``.

Contracts live here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

from parity.drive import Driver, Run
from parity.engines.exact import ExactEngine, hidden_stops
from parity.exact_runner import ENGINE_FAULTS, exact_limits, exact_model
from parity.records import Case, Fault
from scheduler.loop import Scheduler
from scheduler.policies import make_policy
from scheduler.policies.base import Policy


@dataclass(frozen=True, slots=True)
class Replay:
    """A run and the scheduler that it left behind, with the policy's memory in it."""

    run: Run
    scheduler: Scheduler

    @property
    def outputs(self) -> dict[int, tuple[int, ...]]:
        """Tokens of every session that ended, by session."""
        return {index: end.tokens for index, end in sorted(self.run.completions.items())}

    @property
    def schedule(self) -> list[tuple]:
        """Who ran which interval in which step, and every intent: what policies differ in."""
        return [
            (
                traced.step,
                tuple((c.request_id, c.start, c.stop) for c in traced.flight.plan.chunks),
                tuple((i.kind.value, i.request_id) for i in traced.flight.plan.intents),
            )
            for traced in self.run.trace
        ]

    @property
    def digest(self) -> str:
        """One line for the whole schedule and all outputs: equal in every process."""
        return hashlib.blake2b(repr((self.schedule, self.outputs)).encode(), digest_size=16).hexdigest()


def replay(
    case: Case, policy: Policy | None = None, policy_of: Callable[[Case], Policy] | None = None
) -> Replay:
    """Run a case once; ``policy`` or ``policy_of`` takes the place of the policy that the case names."""
    engine = ExactEngine(
        exact_limits(case),
        exact_model(case),
        stops=hidden_stops(case.sessions),
        duration_ms=lambda batch: case.ms_per_step,
    )
    if policy is None:
        policy = (
            make_policy(case.policy, **dict(case.policy_options)) if policy_of is None else policy_of(case)
        )
    scheduler = Scheduler(engine, policy, case.step_limits())

    def inject(fault: Fault) -> bool:
        if fault.kind in ENGINE_FAULTS:
            engine.fail_next(fault.call)
            return True
        return False

    return Replay(Driver(case, scheduler, engine, inject).drive(), scheduler)
