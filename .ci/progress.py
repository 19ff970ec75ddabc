"""Runs a long command quietly: its output goes to a log, its progress to the terminal."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

LINES_OF_LOG_SHOWN = 15


class CommandFailed(Exception):
    """A command ended with a non-zero status; ``tail`` is the end of its output, ``log`` holds all of it."""

    def __init__(self, *, title: str, status: int, tail: Sequence[str], log: Path) -> None:
        self.title, self.status, self.tail, self.log = title, status, list(tail), log
        super().__init__(f"{title}: exit status {status}; the lines above say why, all of them are in {log}")


class Progress:
    """Prints ``title: done/total, elapsed``: in place on a terminal, else a line per tenth of the work."""

    def __init__(self, title: str) -> None:
        self._title = title
        self._in_place = sys.stdout.isatty()
        self._start_s = time.monotonic()
        self._shown_tenth = -1
        self._say(f"{title} ...")

    def update(self, *, done: int, total: int) -> None:
        tenth = 10 * done // max(total, 1)
        if self._in_place or tenth > self._shown_tenth:
            self._shown_tenth = tenth
            self._say(f"{self._title}: {done}/{total}, {self._elapsed()}")

    def close(self, outcome: str) -> None:
        self._say(f"{self._title}: {outcome}, {self._elapsed()}")
        if self._in_place:
            sys.stdout.write("\n")
            sys.stdout.flush()

    def _elapsed(self) -> str:
        minutes, seconds = divmod(int(time.monotonic() - self._start_s), 60)
        return f"{minutes}m{seconds:02d}s"

    def _say(self, text: str) -> None:
        line = f"samebytes: {text}"
        sys.stdout.write(f"\r\x1b[K{line}" if self._in_place else f"{line}\n")
        sys.stdout.flush()


def run_logged(
    command: Sequence[str],
    *,
    title: str,
    log: Path,
    step: str,
    total: int = 0,
    environment: Mapping[str, str] | None = None,
) -> None:
    """Run ``command``, append its output to ``log`` and show progress.

    ``step`` is a regular expression for lines that mean progress: with the groups ``done`` and ``total`` it
    carries the counts itself, without them each matching line counts as one of ``total``. Raises
    ``CommandFailed`` when the command's exit status is not zero.
    """
    pattern, done, tail = re.compile(step), 0, []
    progress = Progress(title)
    log.parent.mkdir(parents=True, exist_ok=True)
    with (
        open(log, "a", encoding="utf-8") as file,
        subprocess.Popen(
            list(command),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment,
            text=True,
            errors="replace",
        ) as process,
    ):
        try:
            for line in process.stdout:
                file.write(line)
                tail = [*tail[1 - LINES_OF_LOG_SHOWN :], line.rstrip()]
                if match := pattern.search(line):
                    counts = match.groupdict()
                    done = int(counts.get("done") or done + 1)
                    progress.update(done=done, total=int(counts.get("total") or max(total, done)))
        except BaseException:
            process.terminate()
            raise
    progress.close("done" if process.returncode == 0 else "failed")
    if process.returncode != 0:
        raise CommandFailed(title=title, status=process.returncode, tail=tail, log=log)
