"""One protocol for every check: a history is held to an expectation, what is wrong comes back as findings."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from parity.history import Answer, Run
from parity.records import Finding, earliest_first


class Alone(Protocol):
    """What each session gives alone."""

    def answer(self, session: int) -> Answer:
        """Its tokens and logits' digests."""

    def margin(self, session: int, step: int) -> float:
        """The reference's top-1 minus top-2 logit at its generated token ``step``; 0 beyond its end."""

    def logits(self, session: int) -> Sequence[np.ndarray]:
        """Its rows, float32 [n_vocab] each; none where the engine does not show them."""


@dataclass(frozen=True, slots=True)
class Expectation:
    """What a history is held to: every session that it completed alone, and the same case run again."""

    answers: Mapping[int, Answer]
    alone: Alone
    again: Run


class Checker(Protocol):
    """Pure: the same history and expectation give the same findings, and neither is changed."""

    @property
    def name(self) -> str:
        """What its findings are filed under."""

    def check(self, run: Run, expectation: Expectation) -> Iterable[Finding]:
        """What is wrong, nothing when all is well."""


def check_all(checkers: Iterable[Checker], run: Run, expectation: Expectation) -> tuple[Finding, ...]:
    """What the driver saw and what the checkers find, earliest first.

    An exception of a checker is a finding of that checker: what it cannot judge has not passed.
    """
    findings = list(run.findings)
    for checker in checkers:
        try:
            for found in checker.check(run, expectation):
                findings.append(found)
        except Exception as error:  # whatever broke it, the others are still heard
            findings.append(broken_checker(checker.name, error))
    return earliest_first(findings)


def broken_checker(name: str, error: Exception) -> Finding:
    """The finding of a checker that raised ``error``."""
    kind = type(error).__name__
    return Finding(name, " ".join(f"the checker broke: {kind}: {error}".split()), {"exception": kind})
