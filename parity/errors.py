"""Errors that cost one line, bad input and output that cannot be written, and the exit codes of commands."""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """Exit codes of the ``parity`` command and of the gate."""

    PASS = 0
    FAIL = 1
    UNKNOWN = 2
    USAGE = 64  # EX_USAGE of sysexits.h
    INTERNAL = 70  # EX_SOFTWARE of sysexits.h
    OUTPUT = 74  # EX_IOERR of sysexits.h


class OneLine(Exception):
    """An error that is told in one line: what, where, why, what to do."""

    def __init__(self, what: str, *, where: str = "", why: str = "", todo: str = "") -> None:
        self.what, self.where, self.why, self.todo = what, where, why, todo
        super().__init__(self.line)

    @property
    def line(self) -> str:
        text = self.what
        if self.where:
            text += f" in {self.where}"
        if self.why:
            text += f": {self.why}"
        if self.todo:
            text += f"; {self.todo}"
        return " ".join(text.split())


class OutputError(OneLine):
    """A result that cannot be written where it was wanted: exit code 74, whatever the verdict was."""


class UsageError(OneLine):
    """Bad input: printed as one line (what, where, why, what to do), exit code 64.

    ``what`` names the thing that is wrong, ``where`` the file, flag or variable, ``why``
    the reason, ``todo`` the remedy.
    """
