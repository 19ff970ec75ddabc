"""Runs a case on a server: sends, reads, leaves as the case says, and notes what shows that sessions ran
together.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from contextlib import aclosing, suppress
from dataclasses import dataclass, field

import tenacity

from parity.endpoint.answers import Answer, Piece, join_pieces
from parity.endpoint.case import Question, SystemCase, SystemSession
from parity.endpoint.system import Refused, Retryable, SystemUnderTest

MAX_RETRY_WAIT_S = 60.0
# So often must two streams take turns before they count as running together. Of one after the other the
# first's end and the second's begin may be read in any order: a, b, a, b are three.
ALTERNATIONS = 5


@dataclass(slots=True)
class SystemRun:
    """What a server did with a case: an answer a session, in the case's order.

    ``alternations`` is the largest number of turns that two streams took; ``most_running`` what the server
    counted at most at once, ``sessions_per_step`` its own mean, None where it does not say.
    """

    case: SystemCase
    answers: list[Answer] = field(default_factory=list)
    alternations: int = 0
    most_running: float | None = None
    sessions_per_step: float | None = None

    @property
    def ran_together(self) -> str:
        """What proves that sessions ran together; empty if nothing does."""
        if self.sessions_per_step is not None and self.sessions_per_step > 1.02:
            return f"the server counts {self.sessions_per_step:.2f} sessions a step"
        if self.most_running is not None and self.most_running >= 2:
            return f"the server counted {self.most_running:g} running"
        if self.alternations >= ALTERNATIONS:
            return f"two streams took {self.alternations} turns"
        return ""


async def ask(
    system: SystemUnderTest,
    question: Question,
    *,
    stream: bool,
    retries: int,
    cold: bool = False,
    leave_after: int | None = None,
    on_piece: Callable[[Piece], None] = lambda piece: None,
    begun: asyncio.Event | None = None,
) -> Answer:
    """One answer with the attempts that it needed. What went wrong for good is in its ``error``."""
    statuses: list[int] = []
    try:
        async for attempt in tenacity.AsyncRetrying(
            stop=tenacity.stop_after_attempt(retries + 1),
            wait=_retry_wait,
            retry=tenacity.retry_if_exception_type(Retryable),
            reraise=True,
        ):
            with attempt:
                try:
                    pieces, left = await _attempt(
                        system, question, stream, cold, leave_after, on_piece, begun
                    )
                except (Retryable, Refused) as error:
                    statuses.append(error.status)
                    raise
                return join_pieces(pieces, left=left, statuses=tuple(statuses))
    except (Retryable, Refused) as error:
        return Answer(error=str(error), statuses=tuple(statuses), left=leave_after is not None)
    raise AssertionError("tenacity ended without a result")


async def _attempt(
    system: SystemUnderTest,
    question: Question,
    stream: bool,
    cold: bool,
    leave_after: int | None,
    on_piece: Callable[[Piece], None],
    begun: asyncio.Event | None,
) -> tuple[list[Piece], bool]:
    pieces: list[Piece] = []
    async with aclosing(system.generate(question, stream=stream, cold=cold)) as source:
        if leave_after == 0:
            first = asyncio.ensure_future(anext(source, None))
            others = asyncio.ensure_future(begun.wait()) if begun is not None else first
            await asyncio.wait({first, others}, return_when=asyncio.FIRST_COMPLETED)
            for task in (first, others):
                task.cancel()
                with suppress(asyncio.CancelledError, Retryable, Refused):
                    await task
            return pieces, True
        seen = 0
        async for piece in source:
            pieces.append(piece)
            on_piece(piece)
            seen += max(len(piece.tokens), bool(piece.text))
            if leave_after is not None and seen >= leave_after:
                return pieces, True
    return pieces, False


class _Watch:
    """Events of one session: how many tokens it has given, and whether it ended."""

    def __init__(self) -> None:
        self.tokens = 0
        self.ended = False
        self.changed = asyncio.Event()

    def note(self, tokens: int = 0, *, ended: bool = False) -> None:
        self.tokens += tokens
        self.ended = self.ended or ended
        changed, self.changed = self.changed, asyncio.Event()
        changed.set()

    async def reach(self, tokens: int | None) -> None:
        while not self.ended and (tokens is None or self.tokens < tokens):
            await self.changed.wait()


async def run_system_case(
    system: SystemUnderTest,
    case: SystemCase,
    *,
    retries: int = 2,
    on_answer: Callable[[int, Answer], None] = lambda index, answer: None,
) -> SystemRun:
    """Run it once."""
    run = SystemRun(case=case, answers=[Answer(error="never sent")] * len(case.sessions))
    watches = [_Watch() for _ in case.sessions]
    order: list[int] = []  # the session of every piece that came, in the order of coming
    next_piece = [asyncio.Event()]
    running: list[float] = []

    async def look() -> None:
        counted = await system.counters()
        if counted is not None and counted.running is not None:
            running.append(counted.running)

    async def one(index: int, session: SystemSession) -> None:
        if session.after is not None:
            await watches[session.after].reach(session.after_tokens)

        def note(piece: Piece) -> None:
            if session.stream:
                order.append(index)
                watches[index].note(max(len(piece.tokens), bool(piece.text)))
                event, next_piece[0] = next_piece[0], asyncio.Event()
                event.set()

        try:
            answer = await ask(
                system,
                session.question,
                stream=session.stream,
                retries=retries,
                leave_after=session.leave_after,
                on_piece=note,
                begun=next_piece[0],
            )
        finally:
            watches[index].note(ended=True)
        run.answers[index] = answer
        on_answer(index, answer)
        if index % 4 == 0:
            await look()

    before = await system.counters()
    async with asyncio.TaskGroup() as group:
        for index, session in enumerate(case.sessions):
            group.create_task(one(index, session))
    after = await system.counters()
    run.alternations = count_turns(order)
    run.most_running = max(running, default=None)
    if (
        before is not None
        and after is not None
        and None not in (before.steps, after.steps, after.step_sessions)
    ):
        steps = after.steps - before.steps
        run.sessions_per_step = (after.step_sessions - before.step_sessions) / steps if steps else None
    return run


def count_turns(order: list[int]) -> int:
    """How often the two streams that alternated most took turns: 3 for pieces of a, b, a, b."""
    turns: Counter[tuple[int, int]] = Counter()
    last_of: dict[tuple[int, int], int] = {}
    seen: list[int] = []
    for session in order:
        for other in seen:
            if other != session:
                pair = (min(session, other), max(session, other))
                if last_of.get(pair, other) != session:
                    turns[pair] += 1
                last_of[pair] = session
        if session not in seen:
            seen.append(session)
    return max(turns.values(), default=0)


def _retry_wait(state: tenacity.RetryCallState) -> float:
    wished_s = getattr(state.outcome.exception(), "wait_s", None)
    return min(MAX_RETRY_WAIT_S, 0.25 * 2**state.attempt_number if wished_s is None else wished_s)
