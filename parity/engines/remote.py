"""An engine in a process of its own: when that dies, the step fails and the sessions are rebuilt elsewhere.

The scheduler stays alive in the caller's process, so nothing that was accepted is lost.
"""

from __future__ import annotations

import base64
import os
import resource
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from parity.engines.llama import LlamaModel
from parity.engines.pool import PoolContext, SamplingEngine
from parity.engines.stages_wire import calls_from_data, calls_to_data, ops_from_data, ops_to_data
from parity.numerics import NumericsProfile
from parity.worker import DEFAULT_TIMEOUT_S, Worker, WorkerDied
from scheduler.engine import PAD_ROW, Batch, EngineFailure, MemoryOp
from scheduler.limits import Layout, PoolLimits

HUGE_BYTES = 1 << 32  # more than a process whose address space is full can get


class RemoteEngine(SamplingEngine):
    """Implements ``scheduler.engine.Engine`` on a context in a worker process.

    ``die_before_call`` and ``exhaust_before_call`` are faults of the next step: the process is killed, or out
    of memory, before that native call. ``settings`` are the arguments of ``PoolContext``.
    """

    def __init__(self, model_path: Path, *, use_extra_bufts: bool, settings: dict[str, Any]) -> None:
        super().__init__()
        profile: NumericsProfile = settings["profile"]
        self._opening = {
            "path": str(model_path),
            "use_extra_bufts": use_extra_bufts,
            "settings": {**settings, "layout": settings["layout"].value, "profile": profile.to_json()},
        }
        self._worker = Worker(profile.environment)
        self._is_open = False
        self.timeout_s = DEFAULT_TIMEOUT_S
        self.die_before_call: int | None = None
        self.exhaust_before_call: int | None = None

    @property
    def pid(self) -> int | None:
        """Process id of the engine's process, None when there is none."""
        return self._worker.pid

    def configure(self, limits: PoolLimits) -> None:
        """Use ``limits`` from now on; the pool must be idle."""
        self.limits = (limits,)
        self.die_before_call = self.exhaust_before_call = None
        if self._is_open:
            self._ask("clear_here", {})

    def apply(self, stages: Sequence[Sequence[MemoryOp]]) -> None:
        """Apply operations; a process that has died holds nothing that they could apply to."""
        if self._is_open:
            self._ask("apply_here", {"ops": ops_to_data(stages[0])})

    def leftover_sequences(self) -> list[int]:
        """Logical ids that still hold something."""
        return self._ask("leftovers_here", {}) if self._is_open else []

    def close(self) -> None:
        """End the process."""
        self._worker.close()
        self._is_open = False

    def _run(
        self, batch: Batch, wanted: Sequence[int], give: Callable[[Sequence[int], np.ndarray], None]
    ) -> None:
        if not self._is_open:
            self._ask("open_here", self._opening)
            self._is_open = True
        order = {
            "calls": calls_to_data(batch.stages[0]),
            "tokens": batch.tokens,
            "positions": batch.positions,
            "wanted": list(wanted),
            "fail_before": self.fail_before_call,
            "die_before": self.die_before_call,
            "exhaust_before": self.exhaust_before_call,
        }
        self.fail_before_call = self.die_before_call = self.exhaust_before_call = None
        answer = self._ask("run_here", order)
        if "failure" in answer:
            raise EngineFailure(answer["failure"])
        for rows, text in answer["logits"]:
            give(rows, np.frombuffer(base64.b64decode(text), np.float32).reshape(len(rows), -1))

    def _ask(self, function: str, arguments: dict[str, Any]) -> Any:
        """Call a function of this module in the process. Raises ``EngineFailure`` when it dies or fails."""
        try:
            return self._worker.call(f"{__name__}:{function}", arguments, timeout_s=self.timeout_s)
        except WorkerDied as death:
            self._is_open = False
            raise EngineFailure(f"the engine's process {death.reason}") from death
        except RuntimeError as error:
            self.close()  # its memory is in doubt
            raise EngineFailure(f"the engine's process gave up: {error}") from error


# -- in the engine's process

_open: list[PoolContext] = []


class _Rows:
    """The fields of a batch that a context's ``fill`` reads."""

    def __init__(self, order: dict[str, Any]) -> None:
        self.tokens, self.positions = order["tokens"], order["positions"]


def open_here(arguments: dict[str, Any]) -> None:
    """Load the model and make the context."""
    settings = dict(arguments["settings"])
    settings["layout"] = Layout(settings["layout"])
    settings["profile"] = NumericsProfile.from_json(settings["profile"])
    model = LlamaModel(Path(arguments["path"]), use_extra_bufts=arguments["use_extra_bufts"])
    _open.append(PoolContext(model, **settings))


def clear_here(arguments: dict[str, Any]) -> None:
    """Empty the pool."""
    _open[-1].context.clear()


def apply_here(arguments: dict[str, Any]) -> None:
    """Apply memory operations."""
    _open[-1].apply(ops_from_data(arguments["ops"]))


def leftovers_here(arguments: dict[str, Any]) -> list[int]:
    """Logical ids that still hold something."""
    return _open[-1].leftover_sequences()


def run_here(order: dict[str, Any]) -> dict[str, Any]:
    """Run a batch's calls; logits of the wanted rows as base64 of float32."""
    pool, wanted, logits = _open[-1], order["wanted"], []
    try:
        for index, call in enumerate(calls_from_data(order["calls"])):
            if index == order["die_before"]:
                os.kill(os.getpid(), signal.SIGKILL)
            if index == order["exhaust_before"]:
                _exhaust_memory()
            if index == order["fail_before"]:
                raise EngineFailure(f"injected failure before native call {index}")
            pool.apply(call.ops)
            pool.decode(pool.fill(call, _Rows(order), wanted))
            rows = [row for row in call.rows if row != PAD_ROW and wanted[row]]
            if rows:
                logits.append((rows, base64.b64encode(pool.context.logits(len(rows)).tobytes()).decode()))
    except EngineFailure as failure:
        return {"failure": str(failure)}
    return {"logits": logits}


def _exhaust_memory() -> None:
    """Bound the address space to what is in use, and ask for more. Raises MemoryError."""
    used_pages = int(Path("/proc/self/statm").read_text().split()[0])
    used_bytes = used_pages * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used_bytes, used_bytes))
    np.ones(HUGE_BYTES, np.uint8)
