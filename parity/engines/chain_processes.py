"""A chain of stages with a process each, as one engine.

A stage that dies is named, and nobody waits for it for ever.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import queue
import resource
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from time import monotonic
from typing import Any, Literal, NamedTuple

import numpy as np

from parity.engines.pool import SamplingEngine, wanted_rows
from parity.engines.stage import HiddenRows, Stage, StageSettings
from parity.errors import UsageError
from parity.processes import (
    STDERR_TAIL_BYTES,
    Wire,
    WireClosed,
    WireSilent,
    calls_from_data,
    calls_to_data,
    end_with,
    engine_message,
    ops_from_data,
    ops_to_data,
)
from parity.store import REPOSITORY
from scheduler.engine import Batch, EngineFailure, MemoryOp, completed_result
from scheduler.limits import PoolLimits
from scheduler.records import IterationPlan, IterationResult

# -- The coordinator's side of one stage's process: its start, its end, and the connection to it.


class StageProcess:
    """The coordinator's side of one stage: its process and the control connection."""

    def __init__(
        self,
        settings: StageSettings,
        upstream: socket.socket | None,
        downstream: socket.socket | None,
        *,
        timeout_s: float,
    ) -> None:
        self.settings = settings
        own, theirs = socket.socketpair()
        self._stderr = tempfile.TemporaryFile()
        ends = [theirs, upstream, downstream]
        fds = [end.fileno() if end is not None else -1 for end in ends]
        environment = {
            **os.environ,
            **dict(settings.profile.environment),
            "GGML_NO_BACKTRACE": "1",
            "PYTHONPATH": os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH", "")])),
        }
        # Neighbours give up first: then the one that does not answer is the one that hangs.
        command = [sys.executable, "-m", "parity.engines.chain_processes", *map(str, fds), str(timeout_s / 2)]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=self._stderr,
            stderr=self._stderr,
            pass_fds=[fd for fd in fds if fd >= 0],
            env=environment,
        )
        for end in ends:
            if end is not None:
                end.close()  # the process's copies are the only ones: when it ends, its neighbours see that
        self.wire = Wire(own, timeout_s=timeout_s)

    def obituary(self) -> str:
        """How the process ended, with the engine's last message; waits for the
        end, which its caller has seen.
        """
        code = self.process.wait()
        self._stderr.seek(0, os.SEEK_END)
        self._stderr.seek(max(0, self._stderr.tell() - STDERR_TAIL_BYTES))
        said = engine_message(self._stderr.read().decode(errors="replace"))
        ended = f"ended by {signal.Signals(-code).name}" if code < 0 else f"exited with {code}"
        return f"{self.settings.label}: its process {ended}{': ' + said if said else ''}"

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self.wire.close()
        self._stderr.close()


ANSWER_TIMEOUT_S = 120.0
START_TIMEOUT_S = 300.0  # a large stage is read from a slow disk


class StageLost(EngineFailure):
    """A stage's process has ended or does not answer; ``stage`` is its index. Its memory is gone."""

    def __init__(self, stage: int, reason: str) -> None:
        self.stage = stage
        super().__init__(reason)


class Launched(NamedTuple):
    """A step on its way through the stages. ``failure`` says why it could not be sent."""

    plan: IterationPlan
    batch: Batch
    now_ms: float
    failure: StageLost | None


class ProcessChain(SamplingEngine):
    """Implements ``scheduler.engine.OverlappingEngine``; the same as ``StageChain``, with one process per
    stage. Stages carry out their orders in turn, so several steps may be on their way at a time. With one
    stage it is an engine in a process of its own.

    After a loss every step fails at once with the same reason, until ``configure`` starts the stages anew;
    with ``restarts`` the next step does, on an empty pool, and its sessions are rebuilt. ``break_next`` is a
    fault: before the first native call of the next step the process of this stage is killed, or is out of
    memory.
    """

    def __init__(
        self,
        settings: Sequence[StageSettings],
        *,
        timeout_s: float = ANSWER_TIMEOUT_S,
        restarts: bool = False,
    ) -> None:
        super().__init__()
        self.settings, self.timeout_s, self.restarts = tuple(settings), timeout_s, restarts
        self._why_lost = ""
        self.break_next: tuple[int, Literal["killed", "out_of_memory"]] | None = None
        self._step = self._given_up = 0
        self._launched: deque[Launched] = deque()
        self.busy_s = [0.0] * len(self.settings)  # of every stage, inside its steps less its waits for rows
        self._stages: list[StageProcess] = []
        atexit.register(self.close)
        self._start()

    # -- processes

    @property
    def pids(self) -> list[int]:
        """Process ids of the stages."""
        return [stage.process.pid for stage in self._stages]

    @property
    def lost(self) -> str:
        """Why no step can run until ``configure``; empty while steps can, or the next one starts anew."""
        return "" if self.restarts else self._why_lost

    def _start(self) -> None:
        links = [socket.socketpair() for _ in self.settings[1:]]
        for index, settings in enumerate(self.settings):
            upstream = links[index - 1][1] if index else None
            downstream = links[index][0] if index < len(links) else None
            self._stages.append(StageProcess(settings, upstream, downstream, timeout_s=self.timeout_s))
        for stage in self._stages:
            stage.wire.send({"settings": stage.settings.to_json()})
        self._why_lost = ""
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
        self.limits, self.break_next = limits, None
        self.give_up_launched()
        if not self._why_lost:
            try:
                self._order([{"do": "clear"}] * len(self._stages))
            except StageLost:
                pass  # it died idle: nobody was harmed
        if self._why_lost:
            self._end()
            self._start()

    @staticmethod
    def _context_cells(settings: StageSettings) -> int:
        return settings.num_cells * (settings.num_sequences if settings.layout.value == "streams" else 1)

    def apply(self, stages: Sequence[Sequence[MemoryOp]]) -> None:
        """Apply operations. With a lost stage there is no memory to apply them to: the next step says so."""
        self.give_up_launched()
        if self._why_lost:
            return
        try:
            self._order([{"do": "apply", "ops": ops_to_data(ops)} if ops else None for ops in stages])
        except StageLost:
            pass

    def leftover_sequences(self) -> list[int]:
        """Logical ids that still hold something in any stage; none when a stage
        is lost, and its memory with it.
        """
        if self._why_lost:
            return []
        try:
            answers = self._order([{"do": "leftovers"}] * len(self._stages))
        except StageLost:
            return []
        return sorted({seq_id for answer in answers for seq_id in answer["leftovers"]})

    def execute(self, plan: IterationPlan, batch: Batch, now_ms: float) -> IterationResult:
        self.launch(plan, batch, now_ms)
        return self.collect()

    def launch(self, plan: IterationPlan, batch: Batch, now_ms: float) -> None:
        """Send a step's orders to every stage. That a stage is lost is told by ``collect``."""
        if self._why_lost and self.restarts:
            self._start()
        failure = StageLost(self._lost_stage, self._why_lost) if self._why_lost else None
        if failure is None:
            self._send(self._orders(batch))
        self._launched.append(Launched(plan, batch, now_ms, failure))

    def collect(self) -> IterationResult:
        """The oldest launched step's result. Raises ``EngineFailure``: those behind it are given up."""
        step = self._launched.popleft()
        tokens: list[int | None] = [None] * len(step.batch.samples)
        try:
            if step.failure is not None:
                raise step.failure
            self._note_busy(self._gather(range(len(self._stages)), self._sampler(step.batch, tokens)))
        except EngineFailure:
            self.give_up_launched()
            raise
        return completed_result(
            step.plan, step.batch, tokens, started_ms=step.now_ms, finished_ms=step.now_ms
        )

    def give_up_launched(self) -> None:
        """Wait for the steps that are on their way, and forget what comes of them."""
        self._given_up += 1
        while self._launched:
            if self._launched.popleft().failure is None and not self._why_lost:
                with contextlib.suppress(EngineFailure):
                    self._note_busy(self._gather(range(len(self._stages)), lambda rows, logits: None))

    def _note_busy(self, answers: Sequence[dict[str, Any]]) -> None:
        for index, answer in enumerate(answers):
            self.busy_s[index] += answer["busy_s"]

    def _orders(self, batch: Batch) -> list[dict[str, Any]]:
        """The order of every stage for one step."""
        self._step += 1
        self._calls_begun = 0
        wanted = wanted_rows(batch)
        orders = []
        for index, calls in enumerate(batch.stages):
            orders.append(
                {
                    "do": "step",
                    "step": self._step,
                    "given_up": self._given_up,
                    "calls": calls_to_data(calls),
                    "tokens": batch.tokens,
                    "positions": batch.positions,
                    "wanted": wanted,
                    "fail_before": self._fail_before(len(calls)),
                    "breaks": self.break_next[1] if self.break_next and self.break_next[0] == index else None,
                }
            )
        self.break_next = None
        return orders

    def _fail_before(self, num_calls: int) -> int | None:
        """Which of a stage's calls an injected failure hits; calls are counted over all stages."""
        begun = self._calls_begun
        self._calls_begun += num_calls
        if self.fail_before_call is None or not begun <= self.fail_before_call < begun + num_calls:
            return None
        at, self.fail_before_call = self.fail_before_call - begun, None
        return at

    # -- orders and answers

    def _order(self, orders: Sequence[dict[str, Any] | None]) -> list[dict[str, Any]]:
        """Send each stage its order (None: none) and gather the answers.

        Raises ``EngineFailure`` or ``StageLost``.
        """
        return self._gather(self._send(orders))

    def _send(self, orders: Sequence[dict[str, Any] | None]) -> list[int]:
        """Send each stage its order; the stages that got one."""
        asked = []
        for index, order in enumerate(orders):
            if order is not None:
                asked.append(index)
                try:
                    self._stages[index].wire.send(order)
                except (WireClosed, WireSilent):
                    pass  # gathering finds out how it ended
        return asked

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
        self._why_lost, self._lost_stage = reason, index
        self._end()
        raise StageLost(index, reason)

    def _raise_failures(self, answers: dict[int, dict[str, Any]]) -> None:
        """The failure of the first stage that has one: those behind it only starve."""
        for index, answer in sorted(answers.items()):
            if "usage" in answer or "error" in answer:
                self._end()
                self._why_lost, self._lost_stage = answer.get("error", "it was not loaded"), index
                if "usage" in answer:
                    raise UsageError(answer["usage"])
                reason = f"{self.settings[index].label}: {answer['error']}"
                raise StageLost(index, reason) if self.restarts else RuntimeError(reason)
            if "failure" in answer:
                raise EngineFailure(answer["failure"])


__all__ = ["ProcessChain", "StageLost"]


# -- One stage as a process:
# ``python -m parity.engines.chain_processes CONTROL UPSTREAM DOWNSTREAM TIMEOUT_S``.
#
# The first three are file descriptors of sockets (-1: none). Orders come over the control connection;
# hidden states come from the stage before and go to the stage behind, one frame per native call, so
# that stages overlap inside a step.


class HandedRows:
    """Hidden states of one step's rows, waited for as they are needed. ``upstream`` is the stage before; the
    first stage has none, and is handed nothing.
    """

    def __init__(self, upstream: Wire | None, number: int, num_rows: int, n_embd: int) -> None:
        self._upstream, self._number = upstream, number
        self._rows = HiddenRows(num_rows, n_embd)
        self._is_over = upstream is None
        self.waited_s = 0.0

    def take(self, rows: Sequence[int]) -> np.ndarray:
        """float32 [rows, n_embd]. Raises ``EngineFailure`` when the stage before broke off."""
        while not self._rows.has(rows):
            self._receive()
        return self._rows.take(rows)

    def drain(self) -> None:
        """Take what the stage before still sends of this step: it may not go on until somebody does."""
        with contextlib.suppress(EngineFailure, WireClosed, WireSilent):
            while self._rows.missing.any():
                self._receive()

    def _receive(self) -> None:
        if self._is_over:
            raise EngineFailure("the stage before it broke off")
        begun_s = monotonic()
        header, states = self._upstream.receive()
        self.waited_s += monotonic() - begun_s
        if header["step"] != self._number:
            return  # left over from a step that broke off here
        self._is_over = bool(header.get("lost"))
        if not self._is_over:
            self._rows.give(header["rows"], states.reshape(len(header["rows"]), -1))


class StageServer:
    """Carries out the coordinator's orders on one stage.

    An order is answered by one frame, logits come before it.
    """

    def __init__(self, stage: Stage, control: Wire, upstream: Wire | None, downstream: Wire | None) -> None:
        self.stage, self.control, self.upstream, self.downstream = stage, control, upstream, downstream
        self._broke_off: int | None = None  # how often the coordinator had given up then

    def carry_out(self, order: dict[str, Any]) -> dict[str, Any]:
        """Do one order; the answer. Raises ``EngineFailure``."""
        kind = order["do"]
        if kind == "clear":
            self.stage.pool.context.clear()
        elif kind == "apply":
            self.stage.pool.apply(ops_from_data(order["ops"]))
        elif kind == "leftovers":
            return {"leftovers": self.stage.pool.leftover_sequences()}
        else:
            begun_s = monotonic()
            waited_s = self._step(order)
            return {"done": kind, "busy_s": monotonic() - begun_s - waited_s}
        return {"done": kind}

    def _step(self, order: dict[str, Any]) -> float:
        """Run a step; the seconds in it that were spent waiting for rows. Raises ``EngineFailure``.

        Steps that were launched behind one that broke off here are refused: memory is not what they need.
        """
        number, tokens = order["step"], tuple(order["tokens"])
        batch = Batch(tokens, tuple(order["positions"]), (), (), (), (), (), ())
        handed = HandedRows(self.upstream, number, len(tokens), self.stage.model.n_embd)
        begun = 0

        def before_call() -> None:
            nonlocal begun
            if self._broke_off == order["given_up"]:
                raise EngineFailure("a step before this one broke off")
            if begun == 0 and order["breaks"] == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if begun == 0 and order["breaks"] == "out_of_memory":
                _exhaust_memory()
            if begun == order["fail_before"]:
                raise EngineFailure(f"injected failure before its native call {begun}")
            begun += 1

        try:
            self.stage.run(
                calls_from_data(order["calls"]),
                batch,
                order["wanted"],
                before_call=before_call,
                take=handed.take if self.upstream else None,
                give=self._sink(number),
            )
        except (EngineFailure, WireClosed, WireSilent):
            self._broke_off = order["given_up"]
            self._tell_downstream(number)
            handed.drain()
            raise
        return handed.waited_s

    def _tell_downstream(self, number: int) -> None:
        """Whoever waits for this step's hidden states must not wait longer."""
        if self.downstream:
            try:
                self.downstream.send({"step": number, "lost": True})
            except (WireClosed, WireSilent):
                pass  # it has gone, and waits no more

    def _sink(self, number: int) -> Callable[[Sequence[int], np.ndarray], None]:
        wire = self.downstream or self.control

        def give(rows: Sequence[int], values: np.ndarray) -> None:
            wire.send({"step": number, "rows": list(rows)}, values)

        return give


def serve(control: Wire, upstream: Wire | None, downstream: Wire | None) -> None:
    """Answer orders until the coordinator has gone."""
    control.connection.settimeout(None)  # an idle stage waits as long as its coordinator lives
    header, _ = control.receive()
    try:
        server = StageServer(
            Stage(StageSettings.from_json(header["settings"])), control, upstream, downstream
        )
    except (UsageError, RuntimeError) as error:
        control.send({"usage" if isinstance(error, UsageError) else "error": str(error)})
        return
    control.send({"loaded": os.getpid(), "n_embd": server.stage.model.n_embd})
    orders: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
    threading.Thread(target=_take_orders, args=(control, orders), name="orders", daemon=True).start()
    while (order := orders.get()) is not None:
        try:
            answer = server.carry_out(order)
        except (EngineFailure, WireClosed, WireSilent) as failure:
            answer = {"failure": str(failure) or f"a neighbour: {type(failure).__name__}"}
        except Exception as error:  # the process boundary: a bug must reach the coordinator as its error
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        control.send(answer)


def _take_orders(control: Wire, orders: queue.SimpleQueue[dict[str, Any] | None]) -> None:
    """Take orders while others are carried out, so that the coordinator never waits to send one; None when it
    has gone.
    """
    try:
        while True:
            orders.put(control.receive()[0])
    except (WireClosed, WireSilent):
        orders.put(None)


def main(arguments: list[str]) -> None:
    """Entry point of the process."""
    end_with(int(arguments[0]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's is for the coordinator, which may drain first
    timeout_s = float(arguments[3])
    control, upstream, downstream = (
        Wire(socket.socket(fileno=int(fd)), timeout_s=timeout_s) if int(fd) >= 0 else None
        for fd in arguments[:3]
    )
    try:
        serve(control, upstream, downstream)
    except WireClosed:
        pass  # the coordinator has gone, and with it everybody who could want an answer


HUGE_BYTES = 1 << 32  # more than a process whose address space is full can get


def _exhaust_memory() -> None:
    """Bound the address space to what is in use, and ask for more. Raises MemoryError."""
    used_pages = int(Path("/proc/self/statm").read_text().split()[0])
    used_bytes = used_pages * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used_bytes, used_bytes))
    np.ones(HUGE_BYTES, np.uint8)


if __name__ == "__main__":
    main(sys.argv[1:])
