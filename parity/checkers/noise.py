"""The stock layout: how far its logits move, and whether a changed token is within what that noise can do."""

from __future__ import annotations

import numpy as np

# A first difference is noise up to this many times the run's 99th percentile, or this share of the row's
# spread.
NOISE_FACTOR = 16.0
RELATIVE_FLOOR = 0.25


def logit_distance(left: np.ndarray, right: np.ndarray) -> float:
    """Largest absolute difference of two float32 rows [n_vocab]; infinite where only one is finite."""
    with np.errstate(invalid="ignore"):
        difference = np.abs(left.astype(np.float64) - right.astype(np.float64))
    return float("inf") if np.isnan(difference).any() else float(difference.max(initial=0.0))


def is_noise(distance: float, reference: np.ndarray, noise: list[float]) -> bool:
    """Whether the first difference of a session is rounding: its row moved about as far as rows usually move
    here.

    The first difference is judged, not the one at the changed token: rounding is carried on and amplified (an
    expert chosen otherwise moves a row by far more), while a wrong row or a foreign state is large from its
    first step.
    """
    usual = float(np.quantile(noise, 0.99)) if noise else 0.0
    return distance <= max(NOISE_FACTOR * usual, RELATIVE_FLOOR * float(reference.std()))
