"""Nearest-rank percentiles that are reported only when the sample reaches their tail."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from parity.ledger.outcomes import Served

INSUFFICIENT = "insufficient sample"
# one sample per tail interval: a rule of transparency, no confidence interval
LEAST_SAMPLE = {50: 2, 95: 20, 99: 100}


def nearest_rank(values: Sequence[float], percent: int) -> float:
    """``x_(ceil(p n))``. Raises ValueError for an empty sample or a percentage outside 1 to 100."""
    if not values or not 1 <= percent <= 100:
        raise ValueError(f"p{percent} of {len(values)} values")
    return sorted(values)[math.ceil(Fraction(percent * len(values), 100)) - 1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tails:
    """Mean and percentiles of one population; a percentile that the sample cannot carry is
    ``INSUFFICIENT``."""

    population: str
    count: int
    mean: float | None
    p50: float | str
    p95: float | str
    p99: float | str

    def __post_init__(self) -> None:
        for percent, least in LEAST_SAMPLE.items():
            if self.count < least and getattr(self, f"p{percent}") != INSUFFICIENT:
                raise ValueError(f"p{percent} of {self.count} samples of {self.population}: {least} needed")


def tails_of(values: Sequence[float], *, population: str) -> Tails:
    """Percentiles of ``values``, each if there are enough of them."""
    reported = {
        f"p{percent}": nearest_rank(values, percent) if len(values) >= least else INSUFFICIENT
        for percent, least in LEAST_SAMPLE.items()
    }
    mean = math.fsum(values) / len(values) if values else None
    return Tails(population=population, count=len(values), mean=mean, **reported)


def tpot_ms(served: Served) -> float | None:
    """Time per output token after the first; None for fewer than two outputs: undefined, not zero."""
    gaps = served.gaps_ms
    return math.fsum(gaps) / len(gaps) if gaps else None
