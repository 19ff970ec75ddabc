"""Percentiles that say "insufficient sample" instead of a number that the sample cannot carry."""

from __future__ import annotations

import math
from collections.abc import Sequence


def needed_samples(percent: float) -> int:
    """Values that a percentile needs so that at least one lies at or above it: 2
    for p50, 20 for p95, 100 for p99.
    """
    return max(2, math.ceil(100 / (100 - percent) - 1e-9)) if percent < 100 else 2


def percentile(values: Sequence[float], percent: float) -> float | None:
    """Nearest rank: the ``ceil(p n)``-th of ``n`` sorted values; None when the sample is too small."""
    if len(values) < needed_samples(percent):
        return None
    rank = math.ceil(percent / 100 * len(values) - 1e-9)
    return sorted(values)[max(rank, 1) - 1]


def mean(values: Sequence[float]) -> float | None:
    """Arithmetic mean; None of nothing."""
    return sum(values) / len(values) if values else None
