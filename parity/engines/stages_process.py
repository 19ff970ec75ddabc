"""The coordinator's side of one stage's process: its start, its end, and the connection to it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile

from parity.engines.stages_stage import StageSettings
from parity.engines.stages_wire import Wire
from parity.store import REPOSITORY
from parity.worker import STDERR_TAIL_BYTES, engine_message


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
        command = [sys.executable, "-m", "parity.engines.stages_worker", *map(str, fds), str(timeout_s / 2)]
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
