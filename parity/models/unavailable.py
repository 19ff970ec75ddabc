"""A model file that cannot be had, as one line and a verdict."""

from __future__ import annotations

from parity.errors import ExitCode


class Unavailable(Exception):
    """A file that cannot be had: one line, and the verdict that it costs.

    ``code`` is UNKNOWN when nothing was proved wrong (offline, gated, gone, unlocked, no room), FAIL when a
    digest contradicts the manifest.
    """

    def __init__(
        self, what: str, *, why: str = "", todo: str = "", code: ExitCode = ExitCode.UNKNOWN
    ) -> None:
        self.code = code
        self.line = " ".join((what + (f": {why}" if why else "") + (f"; {todo}" if todo else "")).split())
        super().__init__(self.line)
