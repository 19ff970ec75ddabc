"""Long work is seen to live: on a terminal a bar, elsewhere a line on standard error every five seconds."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sized
from time import monotonic
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

LINE_EVERY_S = 5.0
Item = TypeVar("Item")


class LifeSigns:
    """``with LifeSigns("cases", total=2000) as signs: ... signs.update(17, "2 failures")``.

    The lines come from a thread, so that they also come while one item takes long. ``total`` None: unknown.
    """

    def __init__(self, what: str, *, total: float | None = None, console: Console | None = None) -> None:
        self.what, self.total = what, total
        self.console = Console(stderr=True) if console is None else console
        columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
        shown = self.console.is_terminal
        self._progress = Progress(*columns, console=self.console, disable=not shown, transient=True)
        self._task = self._progress.add_task(what, total=total)
        self._done, self._text = 0.0, ""
        self._over = threading.Event()
        self._thread = None if shown else threading.Thread(target=self._speak, name="life signs", daemon=True)

    def __enter__(self) -> LifeSigns:
        self._started = monotonic()
        self._progress.start()
        if self._thread is not None:
            self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._over.set()
        self._progress.stop()
        if self._thread is not None:
            self._thread.join()

    def update(self, done: float, text: str = "", *, total: float | None = None) -> None:
        """So much is done, of ``total`` where that is known only now; ``text`` says more."""
        self.total = self.total if total is None else total
        self._done, self._text = done, text
        self._progress.update(
            self._task, completed=done, total=self.total, description=f"{self.what} {text}".rstrip()
        )

    def advance(self, text: str = "") -> None:
        """One more is done."""
        self.update(self._done + 1, text)

    def say(self, text: str) -> None:
        """What is being done now."""
        self.update(self._done, text)

    def each(self, items: Iterable[Item]) -> Iterator[Item]:
        """The items, counted as they are taken."""
        if isinstance(items, Sized):
            self.total = len(items)
        for index, item in enumerate(items):
            self.update(index, str(item))
            yield item

    @property
    def line(self) -> str:
        """What a log is told: seconds so far, what is done, and what of it is known."""
        of = "" if self.total is None else f" of {self.total:g}"
        count = f" {self._done:g}{of}" if self._done or self.total is not None else ""
        text = f": {self._text}" if self._text else ""
        return f"{monotonic() - self._started:.0f} s, {self.what}{count}{text}"

    def _speak(self) -> None:
        while not self._over.wait(LINE_EVERY_S):
            self.console.print(self.line, markup=False, highlight=False, soft_wrap=True)
