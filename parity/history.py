"""The history of one case: submissions, steps, tokens, ends. Written by the driver, read by checkers."""

from __future__ import annotations

from dataclasses import dataclass, field

from parity.records import Case, Fault
from scheduler.loop import Flight
from scheduler.records import Completion, IterationResult, Refusal
from scheduler.telemetry import StepRecord


@dataclass(frozen=True, slots=True)
class TraceStep:
    """One executed step: what was planned, which calls ran, what came back (None:
    nothing ran or the engine failed).
    """

    step: int
    flight: Flight
    result: IterationResult | None


@dataclass(slots=True)
class Run:
    """The history of one case. ``emitted_at[i]`` lists the scheduler step of every token of session i,
    ``ended_at[i]`` is the step after which its completion was there.
    """

    case: Case
    completions: dict[int, Completion] = field(default_factory=dict)
    refusals: dict[int, Refusal] = field(default_factory=dict)
    records: list[StepRecord] = field(default_factory=list)
    trace: list[TraceStep] = field(default_factory=list)
    emitted_at: dict[int, list[int]] = field(default_factory=dict)
    ended_at: dict[int, int] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    fired: list[Fault] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)  # what the engine said when a step failed


def session_index(request_id: str) -> int:
    """Index in the case of a request named by ``Session.to_request``."""
    return int(request_id.removeprefix("s"))
