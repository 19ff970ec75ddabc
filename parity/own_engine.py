"""Runs a case on an engine that a user brings: no model of ours; the truth is the same engine, alone."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

from parity.checkers.ends import ENGINE_FAULTS, check_ends
from parity.checkers.identity import Answer
from parity.conformance import Exhaustible, solo_by
from parity.drive import Driver, session_index
from parity.exact_runner import exact_limits, judge_answers
from parity.judge import Attempt, LogitsRecorder
from parity.plugins import OBSERVED, Brought
from parity.records import Case, Fault, Outcome, outcome_to_data
from parity.sampling import logits_digest
from scheduler.engine import Engine
from scheduler.limits import PoolLimits
from scheduler.policies import make_policy
from scheduler.records import Request


def run_own_engine_here(arguments: dict[str, Any]) -> dict[str, Any]:
    """Entry point of the worker: JSON in, JSON out."""
    brought = Brought(scheduler=arguments["scheduler"], engine=arguments["engine"])
    return outcome_to_data(run_own_engine_case(Case.from_json(arguments["case"]), brought))


def run_own_engine_case(case: Case, brought: Brought) -> Outcome:
    """Run a case twice, each time on a new engine, and judge it against each session alone on another.

    Logits are compared where the engine shows them; elsewhere no session counts as bit-identical.
    """
    first, second = (_attempt(case, brought) for _ in range(2))
    run = first.run
    problems = [*run.problems, *check_ends(run)]
    if first.signature != second.signature:
        problems.append("not reproducible: the case differs from itself when it runs again")
    limits = exact_limits(case)
    expected = {
        index: solo(brought, limits, case.sessions[index].to_request(index, arrival_ms=0.0))
        for index in run.completions
    }
    outcome = judge_answers(case, run, problems, expected=expected, actual=first.answers)
    observed = any(answer.digests for answer in expected.values())
    return outcome if observed else replace(outcome, bit_identical=0)


def _attempt(case: Case, brought: Brought) -> Attempt:
    recorder = LogitsRecorder()
    engine = Exhaustible(observe(brought.engine_factory(exact_limits(case)), recorder))
    policy = make_policy(case.policy, **dict(case.policy_options))

    def inject(fault: Fault) -> bool:
        engine.breaks = engine.breaks or fault.kind in ENGINE_FAULTS
        return fault.kind in ENGINE_FAULTS

    scheduler = brought.scheduler_factory(engine, policy, case.step_limits(), model_digest="")
    return Attempt(Driver(case, scheduler, engine, inject).drive(), recorder, leftovers=[])


@functools.lru_cache(maxsize=4096)
def solo(brought: Brought, limits: tuple[PoolLimits, ...], request: Request) -> Answer:
    """What a session gives alone, on an engine of its own under our scheduler."""
    recorder = LogitsRecorder()
    tokens = solo_by(lambda limits: observe(brought.engine_factory(limits), recorder))(limits, request)
    return Answer(tokens, tuple(map(logits_digest, recorder.rows(session_index(request.request_id)))))


def observe(engine: Engine, recorder: LogitsRecorder) -> Engine:
    """The engine, its logits recorded if it shows them."""
    if hasattr(engine, OBSERVED):
        setattr(engine, OBSERVED, recorder)
    return engine
