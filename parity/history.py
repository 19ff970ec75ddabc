"""The history of one case: submissions, steps, tokens, ends. Written by the driver, read by checkers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from parity.records import Case, Fault, Finding
from scheduler.loop import Flight
from scheduler.records import Completion, IterationResult, Refusal
from scheduler.telemetry import StepRecord


@dataclass(frozen=True, slots=True)
class TraceStep:
    """One executed step: what was planned, which calls ran, what came back (None:
    nothing ran or the engine failed). ``is_given_up``: it was in flight behind a step that failed.
    """

    step: int
    flight: Flight
    result: IterationResult | None
    is_given_up: bool = False


@dataclass(frozen=True, slots=True)
class Answer:
    """What one session gave: token ids and per token a digest of the logits that it was chosen from."""

    tokens: Sequence[int]
    digests: Sequence[str]


@dataclass(frozen=True, slots=True)
class Earlier:
    """A generation of session ``session`` that was given up at ``fault`` and submitted anew: how it ended
    after step ``ended_at``, and the steps and tokens that its caller had been given.
    """

    session: int
    fault: Fault
    completion: Completion
    ended_at: int
    given_at: tuple[int, ...]
    stream: tuple[int, ...]


@dataclass(slots=True)
class Run:
    """The history of one case.

    ``emitted_at[i]`` lists the scheduler step that computed every token of session i, ``given_at[i]`` the
    newest step when it was given to the caller (another one where several are in flight), ``streams[i]``
    those tokens as the engine gave them, which is what a caller that streams has seen; ``ended_at[i]`` is
    the step after which its end was there. ``earlier`` are generations that were given up, all else is of
    the last one. ``findings`` are what the driver saw go wrong while it ran: no progress, illegal
    transitions, lost cells, ends. ``answers`` are what the sessions gave, ``logits`` their rows, float32
    [n_vocab] for each generated token, where the engine shows them; ``leftovers`` what is still held after
    the case, ``lost`` which stage of a chain ended, and how.
    """

    case: Case
    completions: dict[int, Completion] = field(default_factory=dict)
    refusals: dict[int, Refusal] = field(default_factory=dict)
    records: list[StepRecord] = field(default_factory=list)
    trace: list[TraceStep] = field(default_factory=list)
    emitted_at: dict[int, list[int]] = field(default_factory=dict)
    given_at: dict[int, list[int]] = field(default_factory=dict)
    streams: dict[int, list[int]] = field(default_factory=dict)
    ended_at: dict[int, int] = field(default_factory=dict)
    earlier: list[Earlier] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    fired: list[Fault] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)  # what the engine said when a step failed
    answers: Mapping[int, Answer] = field(default_factory=dict)
    logits: Mapping[int, Sequence[np.ndarray]] = field(default_factory=dict)
    leftovers: str = ""
    lost: str = ""

    @property
    def problems(self) -> list[str]:
        """What the driver saw go wrong, one sentence each."""
        return [str(finding) for finding in self.findings]

    @property
    def signature(self) -> list[tuple]:
        """What must be the same when the case runs again: ends, tokens, logits."""
        return [
            (index, end.reason, tuple(end.tokens), tuple(self.answers[index].digests))
            for index, end in sorted(self.completions.items())
        ]


def session_index(request_id: str) -> int:
    """Index in the case of a request named by ``Session.to_request``."""
    return int(request_id.removeprefix("s"))
