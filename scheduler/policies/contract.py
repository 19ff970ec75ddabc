"""What a policy promises, as data next to its code: a policy name is a contract, not a label."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Contract:
    """The declaration of one policy; every field is a sentence or a list of them, shown by ``parity policies``."""

    scheduling_unit: str
    protected_identity: str
    visible_state: tuple[str, ...]
    decision: str
    unknown_future: str
    objective: str
    metric: str
    denominator: str
    assumptions: tuple[str, ...]
    foreign_owners: tuple[str, ...]
    not_reproduced: tuple[str, ...]
    source: str
