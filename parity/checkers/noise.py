"""The stock layout: how far its logits move, and whether a changed token is within what that noise can do."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from parity.checkers.checker import Expectation
from parity.checkers.identity import Comparison, compare_run, differing
from parity.history import Run
from parity.records import NOISE, Finding

# A first difference is noise up to this many times the 99th percentile of the other sessions, but always up
# to the first and never beyond the second share of the row's spread: rounding moved first rows by at most
# 0.05 of it in every family, planted faults by 1 and more.
NOISE_FACTOR = 16.0
RELATIVE_FLOOR = 0.25
RELATIVE_CAP = 0.5


class Change(StrEnum):
    """Why a token of ``stock`` changed."""

    NEAR_TIE = "near-tie"  # the margin at that token is within what rounding moved the session's first row by
    CARRIED_ON = "carried on"  # the margin is larger: rounding of an earlier row was carried on and grew
    UNEXPLAINED = "unexplained"  # the first row that moved did so by more than rounding


def logit_distance(left: np.ndarray, right: np.ndarray) -> float:
    """Largest absolute difference of two float32 rows [n_vocab]; infinite where only one is finite."""
    with np.errstate(invalid="ignore"):
        difference = np.abs(left.astype(np.float64) - right.astype(np.float64))
    return float("inf") if np.isnan(difference).any() else float(difference.max(initial=0.0))


def is_noise(distance: float, reference: np.ndarray, others: Sequence[float]) -> bool:
    """Whether the first difference of a session is rounding: its row moved about as far as rows usually move.

    ``others`` are distances of other sessions' rows: measured against its own, any row is usual. The
    first difference is judged, not the one at the changed token: rounding is carried on and
    amplified (an expert chosen otherwise moves a row by far more), while a wrong row or a foreign
    state is large from its first step.
    """
    usual = float(np.quantile(others, 0.99)) if others else 0.0
    spread = float(reference.std())
    return distance <= max(RELATIVE_FLOOR * spread, min(NOISE_FACTOR * usual, RELATIVE_CAP * spread))


def explain_change(first: float, margin: float, *, is_rounding: bool) -> Change:
    """Class of a changed token: ``first`` is how far the session's first differing row moved, ``margin`` how
    far the best token leads where the token changed.
    """
    if not is_rounding:
        return Change.UNEXPLAINED
    return Change.NEAR_TIE if margin <= 2 * first else Change.CARRIED_ON


@dataclass(frozen=True, slots=True)
class Weighed:
    """How far every comparable row moved, and why the token of each session that changed one did."""

    noise: tuple[float, ...]
    changes: dict[int, Change]


class NoiseChecker:
    """In ``stock``: no session's token changed by more than rounding can do."""

    name = NOISE

    def check(self, run: Run, expectation: Expectation) -> Iterable[Finding]:
        comparisons = compare_run(run, expectation.answers, run.answers)
        changes = weigh_noise(run, expectation, comparisons).changes
        for comparison in comparisons:
            if changes.get(comparison.session) is Change.UNEXPLAINED:
                yield differing(run, NOISE, comparison.session, first_step(comparison))


def first_step(comparison: Comparison) -> int:
    """The first token at which logits or ids differ; the comparison must have one."""
    return min(step for step in (comparison.bits_step, comparison.bytes_step) if step is not None)


def row_distance(run: Run, expectation: Expectation, session: int, step: int) -> float:
    """How far a session's row moved from the same session's alone; infinite where one has none."""
    rows, reference = run.logits.get(session, ()), expectation.alone.logits(session)
    if step >= min(len(rows), len(reference)):
        return float("inf")
    return logit_distance(rows[step], reference[step])


def weigh_noise(run: Run, expectation: Expectation, comparisons: Sequence[Comparison]) -> Weighed:
    """Noise of every comparable step, and the class of each changed token."""
    alone, noise = expectation.alone, {}
    for comparison in comparisons:
        rows = len(run.logits.get(comparison.session, ()))
        comparable = rows if comparison.bytes_step is None else comparison.bytes_step
        noise[comparison.session] = [
            row_distance(run, expectation, comparison.session, step) for step in range(min(comparable, rows))
        ]
    changes = {}
    for comparison in comparisons:
        if comparison.bytes_step is None:
            continue
        session, first = comparison.session, first_step(comparison)
        reference = alone.logits(session)
        moved = row_distance(run, expectation, session, first)
        others = [sample for other, samples in noise.items() if other != session for sample in samples]
        changes[session] = explain_change(
            moved,
            alone.margin(session, comparison.bytes_step),
            is_rounding=first < len(reference) and is_noise(moved, reference[first], others),
        )
    return Weighed(tuple(sample for samples in noise.values() for sample in samples), changes)
