"""Runs one command and ends it when the caller is gone, however the caller ended.

Run as a script, in a session of its own, with a pipe as standard input that the caller keeps open and never
writes to. The end of that pipe means: close. The first argument says how many seconds the command has between
SIGTERM and SIGKILL, the others are the command. Needs nothing but the standard library, so that it starts in
some ten milliseconds. Exit code: the command's own, or 128 and its signal, where the command ended by itself;
127 where it could not be started.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading


def end_when_caller_is_gone(
    child: subprocess.Popen[bytes], closing: threading.Event, term_timeout_s: float
) -> None:
    """Wait for the end of standard input, then end the command: SIGTERM first, SIGKILL after a bound."""
    while os.read(0, 4096):
        pass
    closing.set()
    child.terminate()
    try:
        child.wait(term_timeout_s)
    except subprocess.TimeoutExpired:
        child.kill()


def main(term_timeout_s: float, command: list[str]) -> int:
    """Run ``command`` until it ends or the caller is gone."""
    try:
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    except OSError as error:
        print(f"cannot be started: {command[0]}: {error.strerror}", file=sys.stderr)
        return 127
    closing = threading.Event()
    threading.Thread(
        target=end_when_caller_is_gone, args=(child, closing, term_timeout_s), daemon=True
    ).start()
    code = child.wait()
    if closing.is_set():
        # What the command started itself is in this process group and ends with it.
        os.killpg(0, signal.SIGKILL)
    return 128 - code if code < 0 else code


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]), sys.argv[2:]))
