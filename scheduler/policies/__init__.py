"""Named policies: one file each, and nothing else in this folder; this registry is the only list of them."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping

from scheduler.policy import goodput
from scheduler.policy.base import Policy
from scheduler.policy.contract import Contract
from scheduler.policy.overload import Overload
from scheduler.policy.reservation import Reservation

MEASURES = {"dist_goodput": goodput.contract}  # contracts that order no queue
_SEAMS = {"reservation": Reservation, "overload": Overload}


def policy_names() -> list[str]:
    """Names of all policies, sorted; a policy lives in the module of its name."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def make_policy(name: str, **options: object) -> Policy:
    """A policy by name. Raises ValueError for an unknown name or option.

    ``reservation`` and ``overload`` may be given as their kind or as a mapping of their fields, so
    that options can come from a file.
    """
    kind = policy_class(name)
    try:
        for seam, record in _SEAMS.items():
            if isinstance(options.get(seam), str):
                options[seam] = record(kind=options[seam])
            elif isinstance(options.get(seam), Mapping):
                options[seam] = record(**options[seam])
        return kind(**options)
    except TypeError as error:
        raise ValueError(f"policy {name}: {error}") from error


def policy_class(name: str) -> type[Policy]:
    """The class of a policy. Raises ValueError for an unknown name."""
    if name not in policy_names():
        raise ValueError(f"unknown policy {name!r}; known: {', '.join(policy_names())}")
    module = importlib.import_module(f"scheduler.policies.{name}")
    for candidate in vars(module).values():
        if (
            isinstance(candidate, type)
            and issubclass(candidate, Policy)
            and candidate.__module__ == module.__name__
            and candidate.identity.policy_id == name
        ):
            return candidate
    raise ValueError(f"module scheduler.policies.{name} defines no policy of that name")


def contracts() -> dict[str, Contract]:
    """The declared contract of every policy and measure, by name."""
    declared = {name: policy_class(name).contract for name in policy_names()} | MEASURES
    return dict(sorted(declared.items()))
