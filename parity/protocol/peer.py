"""The child process at the other end: started, asked, and quoted when it breaks off."""

from __future__ import annotations

import contextlib
import ctypes
import os
import selectors
import shlex
import signal
import subprocess
import sys
import tempfile
import weakref
from typing import Any, TypeVar

from parity.errors import UsageError
from parity.protocol.messages import line_of, read_line
from scheduler.records import SchedulerFailure

Message = TypeVar("Message")
ANSWER_TIMEOUT_S = 20.0
MAX_LINE_BYTES = 16 << 20
SHOWN_CHARS = 200
LIBC = ctypes.CDLL(None)  # loaded before the fork
PR_SET_PDEATHSIG = 1  # <sys/prctl.h>
LAST_WORDS = 12  # lines of its standard error that a finding quotes


class PeerFailure(SchedulerFailure):
    """The process died, said nothing in time, or something that is no answer; the message quotes it."""


class Peer:
    """A scheduler's process. ``ask`` sends one message and waits for its answer."""

    def __init__(self, command: str, *, timeout_s: float = ANSWER_TIMEOUT_S) -> None:
        self.command, self.timeout_s = command, timeout_s
        self._errors = tempfile.TemporaryFile()
        self._buffer = b""
        try:
            self.process = subprocess.Popen(
                shlex.split(command),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                preexec_fn=_end_with_parent if sys.platform == "linux" else None,
            )
        except (OSError, ValueError, IndexError) as error:
            raise UsageError(
                f"scheduler command {command!r} cannot be started",
                where="--scheduler-command",
                why=str(error),
                todo="name a program and its arguments",
            ) from error
        os.set_blocking(self.process.stdout.fileno(), False)
        self._end = weakref.finalize(self, _end_process, self.process)

    def ask(self, message: Any, kind: type[Message]) -> Message:
        """The answer to a message, which must be a ``kind``. Raises ``PeerFailure``."""
        asked = type(message).__name__.lower()
        try:
            self.process.stdin.write(line_of(message).encode())
            self.process.stdin.flush()
        except OSError:
            raise self._failure(f"died before it was sent {asked!r}") from None
        line = self._read_line(asked)
        try:
            return read_line(line.decode(), kind)
        except ValueError as error:  # no UTF-8 is one, too
            shown = line[:SHOWN_CHARS].decode(errors="backslashreplace").strip()
            raise self._failure(f"answered {asked!r} with {shown!r}: {error}") from error

    def close(self) -> None:
        """End the process: its standard input ends, and it may not stay."""
        self._end()
        self._errors.close()

    def _read_line(self, asked: str) -> bytes:
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._buffer:
                if not selector.select(self.timeout_s):
                    self.process.kill()
                    raise self._failure(f"said nothing to {asked!r} for {self.timeout_s:g} s")
                piece = self.process.stdout.read(1 << 16)
                if not piece:
                    raise self._failure(f"died when it was sent {asked!r}")
                self._buffer += piece
                if len(self._buffer) > MAX_LINE_BYTES:
                    raise self._failure(f"answered {asked!r} with more than {MAX_LINE_BYTES} bytes")
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    def _failure(self, what: str) -> PeerFailure:
        """What happened, how the process ended if it did, and its last words."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(0.5)
        ended = "" if self.process.poll() is None else f" (exit code {self.process.returncode})"
        self._errors.seek(0)
        words = self._errors.read().decode(errors="backslashreplace").splitlines()[-LAST_WORDS:]
        said = f"; its last words: {' | '.join(words)}" if words else "; it said nothing on standard error"
        return PeerFailure(f"scheduler {self.command!r} {what}{ended}{said}")


def _end_with_parent() -> None:
    """In the child, before it becomes the program: the kernel ends it with the thread that started it. One
    system call, because a process is started for every case.
    """
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _end_process(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(OSError):
        process.stdin.close()
    try:
        process.wait(1.0)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    process.stdout.close()
