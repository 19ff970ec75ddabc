"""Mutants: deliberate faults, each naming the checker that must kill it. A
surviving one is a hole in the checks.

Every module of this package that has ``MUTANTS`` is part of the registry; ``parity mutants`` runs them all.
"""

from __future__ import annotations

import importlib
import pkgutil

from parity.errors import UsageError
from parity.mutants.records import Mutant


def all_mutants() -> tuple[Mutant, ...]:
    """Every registered mutant, in the order of modules and of their lists. Raises
    ValueError for a doubled name.
    """
    found: dict[str, Mutant] = {}
    for module in sorted(info.name for info in pkgutil.iter_modules(__path__)):
        for mutant in getattr(importlib.import_module(f"{__name__}.{module}"), "MUTANTS", ()):
            if mutant.name in found:
                raise ValueError(f"two mutants are named {mutant.name}")
            found[mutant.name] = mutant
    return tuple(found.values())


def find_mutant(name: str) -> Mutant:
    """A mutant by name. Raises ``UsageError``."""
    for mutant in all_mutants():
        if mutant.name == name:
            return mutant
    raise UsageError(
        f"no mutant {name!r}", why="it is not registered", todo="list them with `parity mutants --list`"
    )
