"""What a policy promises, as data next to its code: a policy name is a contract, not a label."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True, kw_only=True)
class Contract:
    """The declaration of one policy; every field is a sentence or a list of
    them, shown by ``parity policies``.

    ``starvation_free`` is the promise that whoever stays eligible is served in the end, however
    many others keep coming; ``progress`` says by what, or who can starve and when: starvation by
    design is a documented property.
    """

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
    starvation_free: bool
    progress: str
    source: str

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if value in ("", ()) and item.name != "not_reproduced":
                raise ValueError(f"contract without {item.name}")


# Who owns what every policy uses and none of them does.
CELLS = "cells, ids and eviction: the memory"
TOKENS = "tokens and time of a step: the engine"
READINESS = "readiness: whoever calls set_ready"
HIDDEN_LENGTH = "the realised output length"
# What every policy with a reservation does about it; a smaller one than the default may be wrong.
FORECAST = "the reservation's forecast is kept free, by default the declared maximum"
