"""A mutant: a deliberate fault, where it is planted, who must notice it, and
the small cases that reach it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeVar

from parity.records import Case


class Killer(Enum):
    """Checkers that can kill a mutant."""

    BITS = "bits"  # logits of a session differ from those of the session alone
    BYTES = "bytes"  # tokens of a session differ from those of the session alone
    NOISE = "noise"  # in stock, a token changed by more than rounding can do
    LIVENESS = "liveness"  # a bounded number of steps without progress
    LEGALITY = "legality"  # a plan, result or receipt that is not legal
    CONSERVATION = "conservation"  # a cell, an id or a prefix entry lost or doubled
    MEMORY = "memory"  # something is still held when nothing is live
    ENDS = "ends"  # a session ends not once, or not with what it had
    STREAM = "stream"  # a caller that streams was given other tokens than the session ended with
    ENGINE = "engine"  # the engine refused a step although nothing was injected
    REPRODUCIBILITY = "reproducibility"  # the case differs from itself
    CRASH = "crash"  # the engine would end, or ended, the process
    INTERNAL = "internal"  # an exception out of the scheduler
    MARKS = "marks"  # what a run claims to have exercised
    CONTRACT = "contract"  # a policy breaks its own declaration
    SELF_TEST = "self_test"  # a checker accepts a trace that it must reject


class Place(Enum):
    """Where a trial runs: in this process on the exact engine, or in a worker process on llama.cpp."""

    EXACT = "exact"
    REAL = "real"


@dataclass(frozen=True, slots=True)
class Complaint:
    """One thing that a checker said."""

    killer: Killer
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One attempt to notice a fault: ``run`` returns everything that was
    noticed, nothing when all is well.
    """

    name: str
    run: Callable[[], tuple[Complaint, ...]]
    family: str = "llama"
    place: Place = Place.EXACT
    case: Case | None = None


class Reach:
    """Counts how often a planted fault changed something; a fault that never did proves nothing."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> None:
        self.count += 1


Plant = Callable[[Reach], AbstractContextManager[Any]]
F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """A deliberate fault.

    ``fault`` says in one sentence what is wrong; ``part`` names what is faulty (cells, prefix, ...);
    ``plant`` puts the fault in for the duration of a context and calls its ``Reach`` whenever it changed
    something; ``killers`` are the checkers one of which must complain in every one of ``trials``.
    """

    name: str
    fault: str
    part: str
    killers: tuple[Killer, ...]
    plant: Plant
    trials: tuple[Trial, ...]
    timeout_s: float = 60.0  # after which a trial on llama.cpp is ended and counts as a crash

    def __post_init__(self) -> None:
        if not self.fault or not self.killers or not self.trials:
            raise ValueError(
                f"mutant {self.name}: needs a sentence that says what is wrong, a checker that must kill "
                "it and a trial that reaches it"
            )

    @property
    def families(self) -> tuple[str, ...]:
        """Families that it has trials in, in order."""
        return tuple(dict.fromkeys(trial.family for trial in self.trials))


_PLANTED: dict[str, list[Mutant]] = {}  # by the module that a mutant stands in


def mutants_of(module: str) -> tuple[Mutant, ...]:
    """The mutants of a module that was imported, in the order in which they stand there."""
    return tuple(_PLANTED.get(module, ()))


def mutant(
    where: Callable[[Any], Plant] = lambda plant: plant,
    *,
    part: str,
    killers: tuple[Killer, ...],
    trials: tuple[Trial, ...],
    name: str = "",
    fault: str = "",
    timeout_s: float = 60.0,
) -> Callable[[F], F]:
    """Decorates a function that holds a fault: it becomes a mutant under the function's name.

    ``where`` makes a plant of the function (``parity.mutants.seam``: ``in_method``, ``in_batches``,
    ``in_results``); without it the function is the plant. The first paragraph of its docstring says what is
    wrong. ``name`` and ``fault`` are for a function that is planted in several places.
    """

    def register(function: F) -> F:
        paragraph = (inspect.getdoc(function) or "").split("\n\n")[0]
        found = Mutant(
            name=name or function.__name__,
            fault=fault or " ".join(paragraph.split()),
            part=part,
            killers=killers,
            plant=where(function),
            trials=trials,
            timeout_s=timeout_s,
        )
        _PLANTED.setdefault(function.__module__, []).append(found)
        return function

    return register


@contextmanager
def replaced(owner: Any, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """Replace an attribute of a class or module by ``make(original)`` for the duration of a context.

    An inherited method is replaced in the class that defines it.
    """
    if isinstance(owner, type):
        owner = next(base for base in owner.__mro__ if name in vars(base))
    original = vars(owner)[name]
    setattr(owner, name, make(original))
    try:
        yield
    finally:
        setattr(owner, name, original)
