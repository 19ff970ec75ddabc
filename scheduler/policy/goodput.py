"""``dist_goodput``: a measure, not a queue order: the offered rate that still
meets its objectives (DistServe).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from scheduler.policy.contract import Contract

contract = Contract(
    scheduling_unit="none: a rate sweep over whole replays",
    protected_identity="offered request",
    visible_state=("attainment of offered load at each swept rate",),
    decision="none: it measures a configuration",
    unknown_future="everything between two swept rates",
    objective="the largest offered rate at which attainment is at least alpha",
    metric="SLO-valid requests",
    denominator="offered requests, rejected and unfinished ones included",
    assumptions=(
        "one workload distribution at every rate",
        "attainment does not recover above a rate that failed",
    ),
    foreign_owners=("the replay that gives an attainment for a rate",),
    not_reproduced=("DistServe's placement of prefill and decode", "repeated trials, warm-up and hardware"),
    starvation_free=False,
    progress="not applicable: it orders nothing",
    source="DistServe, goodput; M5.2 0x07",
)


@dataclass(frozen=True, slots=True)
class Goodput:
    """Result of a sweep.

    ``rate`` is 0 if the lowest rate failed; ``points`` are (rate, attainment) in order.
    """

    rate: float
    alpha: float
    points: tuple[tuple[float, float], ...]


def sweep_goodput(
    attainment_at: Callable[[float], float], rates: Sequence[float], *, alpha: float
) -> Goodput:
    """Largest rate of ``rates`` at which offered attainment is at least ``alpha``, all lower ones included.

    The sweep stops at the first rate that fails: G = max{rate : Pr[valid] >= alpha for every rate up to it}.
    Raises ValueError for rates that do not increase or an alpha outside (0, 1].
    """
    if not rates or any(later <= earlier for earlier, later in zip(rates, rates[1:], strict=False)):
        raise ValueError(f"rates must increase: {list(rates)}")
    if not 0 < alpha <= 1:
        raise ValueError(f"alpha {alpha}: must be in (0, 1]")
    points: list[tuple[float, float]] = []
    best = 0.0
    for rate in rates:
        points.append((rate, attainment_at(rate)))
        if points[-1][1] < alpha:
            break
        best = rate
    return Goodput(best, alpha, tuple(points))
