"""Loads what users bring: ``package.module:factory``, from ``--engine`` and ``--scheduler``.

An engine factory takes the limits of its pools, one per stage, and returns a ``scheduler.engine.Engine``. A
scheduler factory takes an engine and ``scheduler.limits.StepLimits`` and returns what
``scheduler.loop.Scheduler`` offers.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from parity.errors import UsageError

ENGINE_OFFERS = ("limits", "execute", "apply")
SCHEDULER_OFFERS = ("submit", "cancel", "preempt", "step", "begin", "finish", "fail", "take_completions",
                    "is_idle")


def load_factory(specification: str) -> Callable[..., Any]:
    """The callable named by ``package.module:name``. Raises ``UsageError`` saying which part is wrong."""
    module_name, colon, name = specification.partition(":")
    if not colon or not module_name or not name:
        raise UsageError(f"{specification!r} names no factory",
                         why="it must be written package.module:factory",
                         todo="for instance tests.machine.examples:make_engine")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise UsageError(f"module {module_name!r} cannot be imported", where=specification, why=str(error),
                         todo="install it, or run where it can be imported") from error
    factory = getattr(module, name, None)
    if factory is None:
        raise UsageError(f"module {module_name!r} has no {name!r}", where=specification,
                         todo="name a function of that module")
    if not callable(factory):
        raise UsageError(f"{name!r} is a {type(factory).__name__}, not a factory", where=specification,
                         todo="name a function or a class")
    return factory


def check_offers(made: object, offers: tuple[str, ...], *, specification: str) -> None:
    """Raise ``UsageError`` unless a factory's product has every attribute that the protocol names."""
    missing = [name for name in offers if not hasattr(made, name)]
    if missing:
        raise UsageError(f"{type(made).__name__} lacks {', '.join(missing)}", where=specification,
                         todo="see scheduler/engine.py for the two protocols")
