"""Mutants: deliberate faults, each naming the checker that must kill it. A survivor is a hole in the checks.

A new one is a function with the decorator ``parity.mutants.mutant.mutant`` in any module of this package: its
docstring and its body are the fault, the decorator says where it is planted, who must see it and in which
cases. ``parity mutants`` runs them all.
"""

from __future__ import annotations

import importlib
import pkgutil

from parity.errors import UsageError
from parity.mutants.mutant import Mutant, mutants_of


def all_mutants() -> tuple[Mutant, ...]:
    """Every mutant, module by module, in the order in which they stand there. Raises ValueError for a doubled
    name.
    """
    found: dict[str, Mutant] = {}
    for module in sorted(f"{__name__}.{info.name}" for info in pkgutil.iter_modules(__path__)):
        importlib.import_module(module)
        for mutant in mutants_of(module):
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
