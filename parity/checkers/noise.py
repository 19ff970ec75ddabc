"""The stock layout: how far its logits move, and whether a changed token is within what that noise can do."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

import numpy as np

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
