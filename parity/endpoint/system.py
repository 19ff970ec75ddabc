"""A server under test as an interface: what it is, what it shows, and one question as a stream of pieces."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Protocol

from parity.endpoint.answers import Piece
from parity.endpoint.case import Question


@dataclass(frozen=True, slots=True, kw_only=True)
class SystemFacts:
    """What a server says of itself.

    ``kind`` is the software (``llama-server``), ``version`` its build, empty where it does not say.
    ``slots`` is
    how many sessions it runs at once and ``context_tokens`` what one may hold, None: not said. The rest is
    what
    it shows and takes. ``holds_back``: a stream may leave tokens out, a whole answer does not.
    """

    kind: str
    version: str = ""
    model: str = ""
    slots: int | None = None
    context_tokens: int | None = None
    shows_token_ids: bool = False
    shows_logprobs: bool = False
    shows_top: bool = False
    shows_cached_tokens: bool = False
    shows_counters: bool = False
    holds_back: bool = False
    takes_token_prompts: bool = False
    takes_n: bool = False
    takes_penalties: bool = False
    can_ask_cold: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Counters:
    """What a server counts. ``running`` is how many requests run now; ``steps`` and ``step_sessions`` are
    totals of its steps and of the sessions in them. None: it does not say.
    """

    running: float | None = None
    steps: float | None = None
    step_sessions: float | None = None


class Refused(Exception):
    """The server understood and said no; ``status`` is its HTTP status, 0 for none."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


class Retryable(Exception):
    """An attempt that may succeed later. ``wait_s`` is the server's wish, if it said one."""

    def __init__(self, message: str, status: int = 0, wait_s: float | None = None) -> None:
        super().__init__(message)
        self.status, self.wait_s = status, wait_s


class SystemUnderTest(Protocol):
    """One server. ``package.module:factory`` makes one from a URL and a model's name."""

    async def open(self) -> SystemFacts:
        """Find out what the server is. Raises ``UsageError`` when it cannot be asked at all."""

    def generate(self, question: Question, *, stream: bool, cold: bool = False) -> AsyncIterator[Piece]:
        """Ask. Closing the iterator is leaving. ``cold`` asks for an answer without what is cached, where the
        server can do that. Raises ``Refused`` or ``Retryable``.
        """

    async def tokenize(self, text: str) -> tuple[int, ...] | None:
        """Ids of a prompt as the server would read it; None where it does not say."""

    async def counters(self) -> Counters | None:
        """Its counters now, None where it has none."""

    async def close(self) -> None:
        """Let go of the server."""
