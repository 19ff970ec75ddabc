"""One stage as a process: ``python -m parity.engines.stages_worker CONTROL UPSTREAM DOWNSTREAM TIMEOUT_S``.

The first three are file descriptors of sockets (-1: none). Orders come over the control connection;
hidden states come from the stage before and go to the stage behind, one frame per native call, so
that stages overlap inside a step.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from parity.engines.stages_stage import HiddenRows, Stage, StageSettings
from parity.engines.stages_wire import Wire, WireClosed, WireSilent, calls_from_data, ops_from_data
from parity.errors import UsageError
from scheduler.engine import Batch, EngineFailure


class StageServer:
    """Carries out the coordinator's orders on one stage.

    An order is answered by one frame, logits come before it.
    """

    def __init__(self, stage: Stage, control: Wire, upstream: Wire | None, downstream: Wire | None) -> None:
        self.stage, self.control, self.upstream, self.downstream = stage, control, upstream, downstream

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
            self._step(order)
        return {"done": kind}

    def _step(self, order: dict[str, Any]) -> None:
        number, tokens = order["step"], tuple(order["tokens"])
        batch = Batch(tokens, tuple(order["positions"]), (), (), (), (), (), ())
        begun = 0

        def before_call() -> None:
            nonlocal begun
            if begun == order["die_before"]:
                os.kill(os.getpid(), signal.SIGKILL)
            if begun == order["fail_before"]:
                raise EngineFailure(f"injected failure before its native call {begun}")
            begun += 1

        try:
            self.stage.run(
                calls_from_data(order["calls"]),
                batch,
                order["wanted"],
                before_call=before_call,
                take=self._source(number, len(tokens)) if self.upstream else None,
                give=self._sink(number),
            )
        except (EngineFailure, WireClosed, WireSilent):
            self._tell_downstream(number)
            raise

    def _tell_downstream(self, number: int) -> None:
        """Whoever waits for this step's hidden states must not wait longer."""
        if self.downstream:
            try:
                self.downstream.send({"step": number, "lost": True})
            except (WireClosed, WireSilent):
                pass  # it has gone, and waits no more

    def _source(self, number: int, num_rows: int) -> Callable[[Sequence[int]], np.ndarray]:
        """Hidden states of this step's rows, waited for as they are needed."""
        handed = HiddenRows(num_rows, self.stage.model.n_embd)

        def take(rows: Sequence[int]) -> np.ndarray:
            while not handed.has(rows):
                header, states = self.upstream.receive()
                if header["step"] != number:
                    continue  # left over from a step that broke off here
                if header.get("lost"):
                    raise EngineFailure("the stage before it broke off")
                handed.give(header["rows"], states.reshape(len(header["rows"]), -1))
            return handed.take(rows)

        return take

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
    while True:
        order, _ = control.receive()
        try:
            answer = server.carry_out(order)
        except (EngineFailure, WireClosed, WireSilent) as failure:
            answer = {"failure": str(failure) or f"a neighbour: {type(failure).__name__}"}
        except Exception as error:  # the process boundary: a bug must reach the coordinator as its error
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        control.send(answer)


def main(arguments: list[str]) -> None:
    """Entry point of the process."""
    timeout_s = float(arguments[3])
    control, upstream, downstream = (
        Wire(socket.socket(fileno=int(fd)), timeout_s=timeout_s) if int(fd) >= 0 else None
        for fd in arguments[:3]
    )
    try:
        serve(control, upstream, downstream)
    except WireClosed:
        pass  # the coordinator has gone, and with it everybody who could want an answer


if __name__ == "__main__":
    main(sys.argv[1:])
