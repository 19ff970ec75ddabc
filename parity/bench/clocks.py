"""Clocks of a measurement: wall time, or this thread's CPU time, which other processes disturb less."""

from __future__ import annotations

import time
from collections.abc import Callable
from enum import StrEnum

from parity.errors import UsageError


class ClockKind(StrEnum):
    """What a second is."""

    WALL = "wall"
    CPU = "cpu"


def make_clock(kind: ClockKind, *, n_threads: int) -> Callable[[], float]:
    """A clock in seconds. CPU time counts one thread, so the engine must not use more: ``UsageError``."""
    if kind is ClockKind.WALL:
        return time.perf_counter
    if n_threads != 1:
        raise UsageError(
            "CPU time cannot be compared",
            why=f"{n_threads} threads compute",
            todo="use --threads 1 --clock cpu",
        )
    return time.thread_time
