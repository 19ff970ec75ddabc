"""``fcfs``: the default. All seams as in the base class."""

from __future__ import annotations

from scheduler.policy.base import Policy
from scheduler.policy.contract import FORECAST, HIDDEN_LENGTH, Contract
from scheduler.records import PolicyIdentity


class Fcfs(Policy):
    """First come, first served: nobody is overtaken, admission counts the rows to
    come, the newest is the victim.
    """

    identity = PolicyIdentity("fcfs")
    contract = Contract(
        scheduling_unit="one step: a chunk per session under a token and a sequence budget",
        protected_identity="submission order among sessions that wait",
        visible_state=("counts of each session", "available rows and sequences", "resident prefixes"),
        decision="who runs which interval, who enters",
        unknown_future=f"{HIDDEN_LENGTH}: {FORECAST}",
        objective="no head-of-line overtaking and, by default, no preemption for lack of cells",
        metric="order of first admission",
        denominator="admitted sessions",
        assumptions=("declared max_tokens bounds the output",),
        foreign_owners=("cells and ids: the memory", "tokens: the engine"),
        not_reproduced=(),
        starvation_free=True,
        progress="everybody: nobody is overtaken, and the oldest gives way to nobody; where less than the "
        "maximum is reserved it may be rebuilt in lower cells",
        source="the design issue, the step and policies' defaults",
    )
