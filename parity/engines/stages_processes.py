"""A chain of stages with a process each, as one engine.

A stage that dies is named, and nobody waits for it for ever.
"""

from __future__ import annotations

import atexit
import selectors
import socket
import subprocess
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Any

import numpy as np

from parity.engines.pool import SamplingEngine
from parity.engines.stages_process import StageProcess
from parity.engines.stages_stage import StageSettings
from parity.engines.stages_wire import WireClosed, WireSilent, calls_to_data, ops_to_data
from parity.errors import UsageError
from scheduler.engine import Batch, EngineFailure, MemoryOp
from scheduler.limits import PoolLimits

ANSWER_TIMEOUT_S = 120.0
START_TIMEOUT_S = 300.0  # a large stage is read from a slow disk


class StageLost(EngineFailure):
    """A stage's process has ended or does not answer; ``stage`` is its index. Its memory is gone."""

    def __init__(self, stage: int, reason: str) -> None:
        self.stage = stage
        super().__init__(reason)


class ProcessChain(SamplingEngine):
    """Implements ``scheduler.engine.Engine``; the same as ``StageChain``, with one process per stage.

    After a loss every step fails at once with the same reason, until ``configure`` starts the stages anew.
    """

    def __init__(self, settings: Sequence[StageSettings], *, timeout_s: float = ANSWER_TIMEOUT_S) -> None:
        super().__init__()
        self.settings, self.timeout_s = tuple(settings), timeout_s
        self.lost = ""
        self.lose_next: int | None = None  # a fault: this stage's process dies in the middle of the next step
        self._step = 0
        self._stages: list[StageProcess] = []
        atexit.register(self.close)
        self._start()

    # -- processes

    @property
    def pids(self) -> list[int]:
        """Process ids of the stages."""
        return [stage.process.pid for stage in self._stages]

    def _start(self) -> None:
        links = [socket.socketpair() for _ in self.settings[1:]]
        for index, settings in enumerate(self.settings):
            upstream = links[index - 1][1] if index else None
            downstream = links[index][0] if index < len(links) else None
            self._stages.append(StageProcess(settings, upstream, downstream, timeout_s=self.timeout_s))
        for stage in self._stages:
            stage.wire.send({"settings": stage.settings.to_json()})
        self.lost = ""
        self._gather(range(len(self._stages)), timeout_s=START_TIMEOUT_S)

    def _end(self) -> None:
        while self._stages:
            self._stages.pop().close()

    def close(self) -> None:
        atexit.unregister(self.close)
        self._end()

    # -- engine

    def configure(self, *limits: PoolLimits) -> None:
        """Use ``limits``, one per stage, from now on; lost stages are started anew."""
        for settings, own in zip(self.settings, limits, strict=True):
            if own.num_sequences > settings.num_sequences or own.num_cells >= self._context_cells(settings):
                raise ValueError(f"limits {own} do not fit {settings}")
        self.limits, self.lose_next = limits, None
        if not self.lost:
            try:
                self._order([{"do": "clear"}] * len(self._stages))
            except StageLost:
                pass  # it died idle: nobody was harmed
        if self.lost:
            self._end()
            self._start()

    @staticmethod
    def _context_cells(settings: StageSettings) -> int:
        return settings.num_cells * (settings.num_sequences if settings.layout.value == "streams" else 1)

    def apply(self, stages: Sequence[Sequence[MemoryOp]]) -> None:
        """Apply operations. With a lost stage there is no memory to apply them to: the next step says so."""
        if self.lost:
            return
        try:
            self._order([{"do": "apply", "ops": ops_to_data(ops)} if ops else None for ops in stages])
        except StageLost:
            pass

    def leftover_sequences(self) -> list[int]:
        """Logical ids that still hold something in any stage; none when a stage
        is lost, and its memory with it.
        """
        if self.lost:
            return []
        try:
            answers = self._order([{"do": "leftovers"}] * len(self._stages))
        except StageLost:
            return []
        return sorted({seq_id for answer in answers for seq_id in answer["leftovers"]})

    def _run(
        self, batch: Batch, wanted: Sequence[int], give: Callable[[Sequence[int], np.ndarray], None]
    ) -> None:
        if self.lost:
            raise StageLost(self._lost_stage, self.lost)
        self._step += 1
        orders = []
        for index, calls in enumerate(batch.stages):
            orders.append(
                {
                    "do": "step",
                    "step": self._step,
                    "calls": calls_to_data(calls),
                    "tokens": batch.tokens,
                    "positions": batch.positions,
                    "wanted": wanted,
                    "fail_before": self._fail_before(len(calls)),
                    "die_before": 0 if index == self.lose_next else None,
                }
            )
        self.lose_next = None
        self._order(orders, give)

    def _fail_before(self, num_calls: int) -> int | None:
        """Which of a stage's calls an injected failure hits; calls are counted over all stages."""
        begun = self._calls_begun
        self._calls_begun += num_calls
        if self.fail_before_call is None or not begun <= self.fail_before_call < begun + num_calls:
            return None
        at, self.fail_before_call = self.fail_before_call - begun, None
        return at

    # -- orders and answers

    def _order(
        self,
        orders: Sequence[dict[str, Any] | None],
        give: Callable[[Sequence[int], np.ndarray], None] | None = None,
    ) -> list[dict[str, Any]]:
        """Send each stage its order (None: none) and gather the answers.

        Raises ``EngineFailure`` or ``StageLost``.
        """
        asked = []
        for index, order in enumerate(orders):
            if order is not None:
                asked.append(index)
                try:
                    self._stages[index].wire.send(order)
                except (WireClosed, WireSilent):
                    pass  # gathering finds out how it ended
        return self._gather(asked, give)

    def _gather(
        self,
        asked: Sequence[int],
        give: Callable[[Sequence[int], np.ndarray], None] | None = None,
        *,
        timeout_s: float | None = None,
    ) -> list[dict[str, Any]]:
        """One answer of every asked stage, within ``timeout_s`` in all; logits on the way go to ``give``."""
        timeout_s = self.timeout_s if timeout_s is None else timeout_s
        answers: dict[int, dict[str, Any]] = {}
        dead: list[int] = []
        deadline = monotonic() + timeout_s
        with selectors.DefaultSelector() as selector:
            for index in asked:
                selector.register(self._stages[index].wire.connection, selectors.EVENT_READ, index)
            while len(answers) + len(dead) < len(asked):
                ready = selector.select(max(0.0, deadline - monotonic()))
                if not ready:
                    silent = next(index for index in asked if index not in answers and index not in dead)
                    self._lose(silent, f"{self.settings[silent].label}: no answer within {timeout_s:g} s")
                for key, _ in ready:
                    index = key.data
                    try:
                        header, values = self._stages[index].wire.receive()
                    except (WireClosed, WireSilent):
                        header = None
                    if header is not None and "rows" in header:
                        give(header["rows"], values.reshape(len(header["rows"]), -1))
                        continue
                    selector.unregister(key.fileobj)
                    if header is None:
                        dead.append(index)
                    else:
                        answers[index] = header
        if dead:
            self._lose(min(dead), "; ".join(self._obituary(index) for index in sorted(dead)))
        self._raise_failures(answers)
        return [answers[index] for index in asked]

    def _obituary(self, index: int) -> str:
        stage = self._stages[index]
        try:
            stage.process.wait(timeout=self.timeout_s)
        except subprocess.TimeoutExpired:
            stage.process.kill()  # its connection is closed, yet it lives
        return stage.obituary()

    def _lose(self, index: int, reason: str) -> None:
        """Give the chain up: end every stage, remember why, and say so."""
        self.lost, self._lost_stage = reason, index
        self._end()
        raise StageLost(index, reason)

    def _raise_failures(self, answers: dict[int, dict[str, Any]]) -> None:
        """The failure of the first stage that has one: those behind it only starve."""
        for index, answer in sorted(answers.items()):
            if "usage" in answer or "error" in answer:
                self._end()
                self.lost, self._lost_stage = answer.get("error", "it was not loaded"), index
                if "usage" in answer:
                    raise UsageError(answer["usage"])
                raise RuntimeError(f"{self.settings[index].label}: {answer['error']}")
            if "failure" in answer:
                raise EngineFailure(answer["failure"])


__all__ = ["ProcessChain", "StageLost"]
