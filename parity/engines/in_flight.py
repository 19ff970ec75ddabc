"""Several steps in flight in one process: what stages with a process each do side by side, in a fixed order.

While a step is in its second stage, the step launched after it is in its first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator

from scheduler.engine import Batch, EngineFailure
from scheduler.records import IterationPlan, IterationResult

Walk = Generator[None, None, IterationResult]  # yields between two stages


class _Step:
    """One launched step, somewhere between two stages."""

    def __init__(self, walk: Walk) -> None:
        self._walk = walk
        self.result: IterationResult | None = None
        self.failure: EngineFailure | None = None

    def advance(self) -> bool:
        """Run one stage; False when there is none left, or the step broke off."""
        if self.result is not None or self.failure is not None:
            return False
        try:
            next(self._walk)
        except StopIteration as end:
            self.result = end.value
        except EngineFailure as failure:
            self.failure = failure
        return True


class StagesInTurn:
    """Implements ``launch``, ``collect`` and ``execute`` of ``scheduler.engine.OverlappingEngine`` for an
    engine whose ``walk`` runs a batch stage by stage.

    A launch moves every step in flight on by one stage, the oldest first; a result is waited for by running
    the stages that its step has left. So each stage sees the steps in order, and steps lie in different
    stages, as they do where every stage has a process.
    """

    def __init__(self) -> None:
        super().__init__()
        self._in_flight: deque[_Step] = deque()

    def walk(self, plan: IterationPlan, batch: Batch, now_ms: float) -> Walk:
        """Run a batch, yielding after each stage but the last. Raises ``EngineFailure``."""
        raise NotImplementedError

    def execute(self, plan: IterationPlan, batch: Batch, now_ms: float) -> IterationResult:
        """Run a batch whole, with nothing else in flight. Raises ``EngineFailure``."""
        walk = self.walk(plan, batch, now_ms)
        try:
            while True:
                next(walk)
        except StopIteration as end:
            return end.value

    def launch(self, plan: IterationPlan, batch: Batch, now_ms: float) -> None:
        """Begin a step; that one broke off is told by ``collect``, and those behind it are not run."""
        self._in_flight.append(_Step(self.walk(plan, batch, now_ms)))
        for step in self._in_flight:
            step.advance()
            if step.failure is not None:
                break  # memory is not what the steps behind it need

    def collect(self) -> IterationResult:
        """The result of the oldest launched step. Raises ``EngineFailure``: those behind it are given up."""
        step = self._in_flight.popleft()
        while step.advance():
            pass
        if step.failure is not None:
            self.give_up_launched()
            raise step.failure
        return step.result

    def give_up_launched(self) -> None:
        """Forget what is in flight."""
        self._in_flight.clear()
