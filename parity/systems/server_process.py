"""A server as a child process: opened until it answers, its output drained to a
file, ended with all it started.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

import httpx

from parity.errors import UsageError
from parity.systems import guard

START_TIMEOUT_S = 120.0
TERM_TIMEOUT_S = 10.0
# The guard's own time to notice and to end, beyond that of the server.
GUARD_TIMEOUT_S = 5.0
POLL_S = 0.02
TAIL_BYTES = 4000
# What llama-server writes once its model is loaded; with --port 0 the only way to learn the port.
ADDRESS = re.compile(rb"listening on (http://127\.0\.0\.1:[1-9][0-9]*)\b")
# An abort would attach a debugger to print a trace; threads that wait for each other would spin.
SERVER_ENVIRONMENT = {"GGML_NO_BACKTRACE": "1", "OMP_WAIT_POLICY": "PASSIVE"}


class ServerDied(Exception):
    """The server ended by itself; ``code`` is its exit code, 128 and the signal's number for a signal."""

    def __init__(self, program: str, code: int, tail: str) -> None:
        self.code, self.tail = code, tail
        how = f"ended by {signal.Signals(code - 128).name}" if code > 128 else f"exited with {code}"
        last = tail.strip().splitlines()[-1:]
        super().__init__(f"{program} {how}{': ' + last[0].strip() if last else ''}")


class ServerProcess:
    """A running server. Use as a context manager, or call ``close``.

    The command runs below ``guard``, in a session and process group of its own: it is ended when this object
    is closed, and also when this process ends, even by SIGKILL. Everything that it writes goes to ``log``, a
    file, so it never waits for a reader.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        url: str | None = None,
        log: Path | None = None,
        environment: Mapping[str, str] | None = None,
        start_timeout_s: float = START_TIMEOUT_S,
        term_timeout_s: float = TERM_TIMEOUT_S,
    ) -> None:
        """Start ``command`` and wait until ``/health`` answers 200.

        ``url`` None takes the address that the command writes, as ``listening on http://127.0.0.1:PORT``:
        the safe way, for a free port may be taken until the server binds it. ``log`` None takes a
        temporary file that is removed on close. ``environment`` is added to this process's.
        ``term_timeout_s`` after SIGTERM the server is killed. Raises ``ServerDied`` when the command
        cannot be started (code 127) or ends before it answers, ``UsageError`` when it does not answer in
        ``start_timeout_s`` seconds; nothing is left running then.
        """
        self.command = tuple(command)
        self._is_ended = False
        self._close_timeout_s = term_timeout_s + GUARD_TIMEOUT_S
        self._keeps_log = log is not None
        if log is None:
            handle, name = tempfile.mkstemp(prefix="server-", suffix=".log")
            os.close(handle)
            log = Path(name)
        self.log = log
        with open(log, "wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", guard.__file__, str(term_timeout_s), *command],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**SERVER_ENVIRONMENT, **os.environ, **(environment or {})},
                start_new_session=True,
            )
        try:
            self.url = self._wait_until_healthy(url, start_timeout_s)
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        """Process id of the guard, which is the id of the group that the server and its children are in."""
        return self._process.pid

    def check_alive(self) -> None:
        """Raises ``ServerDied`` when the server has ended by itself."""
        code = self._process.poll()
        if code is not None:
            self._end_group()
            # The guard itself was killed: its code is negative.
            raise ServerDied(self.command[0], 128 - code if code < 0 else code, self.tail())

    def tail(self) -> str:
        """The end of what the server wrote, at most ``TAIL_BYTES`` bytes."""
        with open(self.log, "rb") as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(max(0, end - TAIL_BYTES))
            return file.read().decode(errors="replace")

    def close(self) -> None:
        """End the server and everything in its process group; may be called again."""
        self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(self._close_timeout_s)
        self._end_group()
        self._process.wait()
        if not self._keeps_log:
            self.log.unlink(missing_ok=True)

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _wait_until_healthy(self, url: str | None, timeout_s: float) -> str:
        deadline_s = time.monotonic() + timeout_s
        while time.monotonic() < deadline_s:
            self.check_alive()
            url = url or self._announced()
            if url and _is_healthy(url):
                return url
            time.sleep(POLL_S)
        raise UsageError(
            "server did not start",
            where=self.command[0],
            why=f"not healthy in {timeout_s:g} s; it said last: {self.tail().strip().splitlines()[-1:]}",
        )

    def _end_group(self) -> None:
        """Kill what is left in the process group; once, because its id may be given to others later."""
        if not self._is_ended:
            self._is_ended = True
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def _announced(self) -> str | None:
        """The address that the server has written, or None."""
        address = ADDRESS.search(self.log.read_bytes())
        return address[1].decode() if address else None


def _is_healthy(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=5.0, trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False
