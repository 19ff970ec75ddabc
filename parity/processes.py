"""Containment: a worker process that runs one call after another and may die; a hang is ended after a bound.

Nothing outlives its parent: every process of ours watches a connection that only its parent holds; a
program that is not ours runs below one that does (``parity.systems.guard``). Calls and answers are JSON
lines; a call names a function ``module:function`` that takes and returns JSON-able data. Run as
``python -m parity.processes`` it is the worker itself.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib
import json
import multiprocessing
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import IO, Any

import numpy as np

from parity.errors import UsageError
from parity.store import REPOSITORY
from scheduler.engine import Call, MemoryOp, OpKind

DEFAULT_TIMEOUT_S = 300.0
# Without the first an abort would attach a debugger to print a trace; without the second, threads that wait
# for each other spin, which starves the other workers of a small machine.
WORKER_DEFAULTS = {"GGML_NO_BACKTRACE": "1", "OMP_WAIT_POLICY": "PASSIVE"}
STDERR_TAIL_BYTES = 4000


# -- Ends that follow each other.


def end_with(descriptor: int) -> None:
    """End this process, at once and without a word, when the other end of a pipe or socket is closed.

    A thread watches, so it also happens in the middle of a call. The keyboard's interrupt reaches every
    process of a terminal; this one leaves it to its parent.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    poll = select.poll()
    poll.register(descriptor, 0)  # a hang-up is reported whatever is asked for

    def watch() -> None:
        poll.poll()
        os._exit(1)

    threading.Thread(target=watch, name="parent", daemon=True).start()


def end_with_parent() -> None:
    """``end_with`` for a process that ``multiprocessing`` started."""
    parent = multiprocessing.parent_process()
    assert parent is not None  # so it was started
    end_with(parent.sentinel)


@contextlib.contextmanager
def process_pool(jobs: int) -> Iterator[ProcessPoolExecutor]:
    """Processes that end with this one, and at once when the block is left by an exception.

    They are spawned: a fork would share the caller's threads.
    """
    context, others = multiprocessing.get_context("spawn"), set(multiprocessing.active_children())
    pool = ProcessPoolExecutor(jobs, mp_context=context, initializer=end_with_parent)
    try:
        yield pool
    except BaseException:
        for process in multiprocessing.active_children():
            if process not in others:
                process.kill()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def pid_here(arguments: dict[str, Any]) -> int:
    """The process id of the worker."""
    return os.getpid()


class WorkerDied(Exception):
    """The worker ended or was ended during a call; ``reason`` is one line, ``stderr`` what it said last."""

    def __init__(self, reason: str, stderr: str) -> None:
        self.reason, self.stderr = reason, stderr
        super().__init__(reason)


class CallFailed(RuntimeError):
    """The call raised, not for bad input: a bug of what was called. ``stderr`` has the traceback."""

    def __init__(self, line: str, stderr: str) -> None:
        self.stderr = stderr
        super().__init__(line)


@dataclass(frozen=True, slots=True)
class _WorkerProcess:
    """A worker's process and its three streams."""

    process: subprocess.Popen[bytes]
    stdin: IO[bytes]
    stdout: IO[bytes]
    stderr: IO[bytes]  # a file, so that nothing blocks on it

    def said_since(self, begin: int) -> str:
        """What it wrote to standard error from offset ``begin`` on; of much, the end."""
        end = self.stderr.seek(0, os.SEEK_END)
        self.stderr.seek(max(begin, end - STDERR_TAIL_BYTES))
        return self.stderr.read().decode(errors="replace")

    def close(self) -> None:
        self.stdin.close()
        self.stdout.close()
        self.process.kill()
        self.process.wait()
        self.stderr.close()


class Worker:
    """A process with its own environment, started at the first call and again after a death."""

    def __init__(self, environment: tuple[tuple[str, str], ...] = ()) -> None:
        self._environment = environment
        self._process: _WorkerProcess | None = None

    def call(self, function: str, arguments: dict[str, Any], *, timeout_s: float = DEFAULT_TIMEOUT_S) -> Any:
        """Answer of ``function(arguments)``. Raises ``WorkerDied``, ``UsageError`` or ``CallFailed``."""
        running = self._running()
        begin = running.stderr.seek(0, os.SEEK_END)
        try:
            running.stdin.write(json.dumps({"function": function, "arguments": arguments}).encode() + b"\n")
            running.stdin.flush()
            line = self._read_line(running, timeout_s)
        except (BrokenPipeError, TimeoutError) as error:
            timed_out = isinstance(error, TimeoutError)
            raise self._died(running, begin, timed_out=timed_out, timeout_s=timeout_s) from error
        if not line:
            raise self._died(running, begin, timed_out=False, timeout_s=timeout_s)
        answer = json.loads(line)
        if "usage" in answer:
            raise UsageError(answer["usage"])
        if "error" in answer:
            raise CallFailed(answer["error"], running.said_since(begin))
        return answer["answer"]

    def _running(self) -> _WorkerProcess:
        if self._process is not None and self._process.process.poll() is None:
            return self._process
        self.close()
        environment = {**WORKER_DEFAULTS, **os.environ, **dict(self._environment)}
        environment["PYTHONPATH"] = os.pathsep.join(
            filter(None, [str(REPOSITORY), environment.get("PYTHONPATH", "")])
        )
        stderr = tempfile.TemporaryFile()
        process = subprocess.Popen(
            [sys.executable, "-m", "parity.processes"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            env=environment,
        )
        assert process.stdin is not None and process.stdout is not None  # they were asked for
        self._process = _WorkerProcess(process, process.stdin, process.stdout, stderr)
        return self._process

    @staticmethod
    def _read_line(running: _WorkerProcess, timeout_s: float) -> bytes:
        ready, _, _ = select.select([running.stdout], [], [], timeout_s)
        if not ready:
            raise TimeoutError
        return running.stdout.readline()

    def _died(self, running: _WorkerProcess, begin: int, *, timed_out: bool, timeout_s: float) -> WorkerDied:
        if timed_out:
            running.process.kill()
        code = running.process.wait()
        stderr = running.said_since(begin)
        self.close()
        if timed_out:
            return WorkerDied(f"no answer within {timeout_s:g} s, ended", stderr)
        said = engine_message(stderr)
        ended = f"ended by {signal.Signals(-code).name}" if code < 0 else f"exited with {code}"
        return WorkerDied(f"{ended}{': ' + said if said else ''}", stderr)

    @property
    def pid(self) -> int | None:
        """Process id of the running worker, or None."""
        return None if self._process is None else self._process.process.pid

    def close(self) -> None:
        """End the process, if there is one."""
        if self._process is not None:
            self._process.close()
            self._process = None


def engine_message(stderr: str) -> str:
    """The line in which llama.cpp says why it gave up, else the last line that says anything."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    for line in lines:
        if "GGML_ASSERT" in line or "GGML_ABORT" in line or "error:" in line.lower():
            return line
    return lines[-1] if lines else ""


@functools.cache
def shared_worker(environment: tuple[tuple[str, str], ...]) -> Worker:
    """This process's worker for an environment; reused between calls, ended at exit."""
    worker = Worker(environment)
    atexit.register(worker.close)
    return worker


def serve() -> None:
    """The worker's loop. Standard output is kept for answers; whatever prints goes to standard error."""
    end_with(sys.stdin.fileno())
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    for line in sys.stdin.buffer:
        message = json.loads(line)
        try:
            module, _, name = message["function"].partition(":")
            answer = getattr(importlib.import_module(module), name)(message["arguments"])
            reply = json.dumps({"answer": answer})
        except UsageError as error:
            reply = json.dumps({"usage": error.line})
        except Exception as error:  # the boundary of the process: a bug in a call must reach the caller
            traceback.print_exc()
            reply = json.dumps({"error": " ".join(f"{type(error).__name__}: {error}".split())})
        answers.write(reply.encode() + b"\n")
        answers.flush()


# -- Frames between the processes of a chain: a JSON header and raw bytes over a
# local socket, every wait bounded.

LENGTHS = struct.Struct("<IQ")  # bytes of the header, bytes of the payload
MAX_HEADER_BYTES = 64 << 20  # a longer one is not ours


class WireClosed(Exception):
    """The other end has gone."""


class WireSilent(Exception):
    """Nothing came within the bound."""


class Wire:
    """One end of a connection; ``timeout_s`` bounds every wait for the other end to send or to take bytes."""

    def __init__(self, connection: socket.socket, *, timeout_s: float) -> None:
        self.connection = connection
        connection.settimeout(timeout_s)

    def send(self, header: dict[str, Any], payload: np.ndarray | None = None) -> None:
        """Send a frame. Raises ``WireClosed`` or ``WireSilent``."""
        text = json.dumps(header).encode()
        data = b"" if payload is None else np.ascontiguousarray(payload).data.cast("B")
        try:
            self.connection.sendall(LENGTHS.pack(len(text), len(data)) + text)
            if len(data):
                self.connection.sendall(data)
        except TimeoutError as error:
            raise WireSilent from error
        except OSError as error:
            raise WireClosed from error

    def receive(self) -> tuple[dict[str, Any], np.ndarray]:
        """The next frame: its header, and its payload as float32 values.

        Raises ``WireClosed`` or ``WireSilent``.
        """
        header_bytes, payload_bytes = LENGTHS.unpack(self._exactly(LENGTHS.size))
        if header_bytes > MAX_HEADER_BYTES:
            raise WireClosed(f"a header of {header_bytes} bytes")
        header = json.loads(bytes(self._exactly(header_bytes)))
        return header, np.frombuffer(self._exactly(payload_bytes), np.float32)

    def _exactly(self, count: int) -> bytearray:
        data, filled = bytearray(count), 0
        view = memoryview(data)
        while filled < count:
            try:
                got = self.connection.recv_into(view[filled:])
            except TimeoutError as error:
                raise WireSilent from error
            except OSError as error:
                raise WireClosed from error
            if got == 0:
                raise WireClosed
            filled += got
        return data

    def close(self) -> None:
        self.connection.close()


def calls_to_data(calls: Sequence[Call]) -> list:
    """Calls as nested lists of integers and names."""
    return [[ops_to_data(call.ops), call.rows, call.seq_ids, call.cells] for call in calls]


def calls_from_data(data: list) -> list[Call]:
    """What ``calls_to_data`` wrote."""
    return [
        Call(tuple(ops_from_data(ops)), tuple(rows), tuple(seq_ids), tuple(cells))
        for ops, rows, seq_ids, cells in data
    ]


def ops_to_data(ops: Sequence[MemoryOp]) -> list:
    """Memory operations as nested lists."""
    return [[op.kind.value, op.seq_id, op.start, op.stop, op.source] for op in ops]


def ops_from_data(data: list) -> list[MemoryOp]:
    """What ``ops_to_data`` wrote."""
    return [MemoryOp(OpKind(kind), *numbers) for kind, *numbers in data]


if __name__ == "__main__":
    serve()
