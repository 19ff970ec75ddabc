"""Engines that a command is made to hang on, so that it can be ended in the middle of its work."""

from __future__ import annotations

import os
import select
from pathlib import Path
from typing import Any

from parity.engines.exact import ExactEngine
from scheduler.limits import PoolLimits
from scheduler.records import IterationResult

HANGS_IN = "TEST_ENGINE_HANGS_IN"  # variable with the folder where a process that hangs leaves its id


class HangingEngine(ExactEngine):
    """Never gives a result."""

    def execute(self, plan: Any, batch: Any, now_ms: float) -> IterationResult:
        Path(os.environ[HANGS_IN], str(os.getpid())).touch()
        select.select([], [], [])
        raise AssertionError("unreachable")


def make_hanging(limits: tuple[PoolLimits, ...]) -> HangingEngine:
    """A factory for ``--engine``."""
    return HangingEngine(limits)
