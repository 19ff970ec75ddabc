"""Servers that are wrong on purpose, each in one way. The first five are those that a check of texts alone
passes.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import Counter
from typing import Any

from starlette.responses import JSONResponse, Response

from tests.parity.endpoint.stand_in import ALPHABET, Row, Session, StandIn, logprobs_of


class FailsWhileBusy(StandIn):
    """Of two attempts while another request runs the first gets HTTP 500: retries hide it."""

    def __init__(self) -> None:
        super().__init__()
        self.attempts: Counter[str] = Counter()

    def refusal(self, body: dict[str, Any]) -> Response | None:
        if not self.running:
            return None
        self.attempts[str(body)] += 1
        return (
            JSONResponse({"error": {"message": "context size exceeded"}}, 500)
            if self.attempts[str(body)] % 2
            else None
        )


class OneAtATime(StandIn):
    """A lock around everything: nothing is ever batched."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = asyncio.Lock()

    async def tokens(self, session: Session) -> Any:
        async with self.lock:
            async for item in super().tokens(session):
                yield item


class RandomReasoning(StandIn):
    """No content, and reasoning that is another one each time; no log probabilities."""

    reasoning = True
    shows_logprobs = False

    def choose(self, session: Session, row: Row) -> int:
        return random.SystemRandom().randrange(len(ALPHABET))


class ZeroLogprobs(StandIn):
    """Every log probability is 0, as with a draft model in front."""

    def shown(self, session: Session, row: Row) -> Row:
        return [0.0] * len(row)


class RandomWhenLong(StandIn):
    """While others run, prompts of 256 words and more are answered at random."""

    shows_logprobs = False

    def choose(self, session: Session, row: Row) -> int:
        long = bytes(session.prompt).count(b" ") >= 256
        return (
            random.SystemRandom().randrange(32)
            if long and len(self.running) > 1
            else super().choose(session, row)
        )


class SwapsNeighbours(StandIn):
    """Of two sessions in a step each gets the other's token."""

    def step_rows(self) -> Any:
        rows = super().step_rows()
        if len(rows) < 2:
            return rows
        (one, a, row_a), (other, b, row_b), *rest = rows
        return [(one, b, row_b), (other, a, row_a), *rest]


class PrefixOneLong(StandIn):
    """A reused prefix is one token longer than what is equal: the new token there is never read."""

    def seen_prompt(self, prompt: tuple[int, ...]) -> tuple[int, ...]:
        def shared(known: tuple[int, ...]) -> int:
            return next((i for i, (a, b) in enumerate(zip(known, prompt, strict=False)) if a != b), 0)

        best = max(self.cache, key=shared, default=())
        count = shared(best)
        self.cache.append(prompt)
        if count < 8:
            return prompt
        return (*prompt[:count], best[count], *prompt[count + 1 :])


class FirstTokenLost(StandIn):
    """While others run a stream begins with its second token."""

    def step_rows(self) -> Any:
        if len(self.running) > 1:
            for session in self.running:
                if not session.context and not session.text:
                    session.prompt = (*session.prompt, self.choose(session, self.row(session)))
        return super().step_rows()


class OneAnswerForAll(StandIn):
    """The prompt is not read."""

    def seen_prompt(self, prompt: tuple[int, ...]) -> tuple[int, ...]:
        return (1, 2, 3)


class Empty(StandIn):
    """Every answer ends before it begins."""

    shows_logprobs = False

    def should_stop(self, session: Session) -> str:
        session.text = ""
        return "stop"


class ConstantLogprobs(StandIn):
    """Every log probability is -1."""

    def shown(self, session: Session, row: Row) -> Row:
        return [-1.0] * len(row)


class NeighboursLogprobs(StandIn):
    """The token is right, what is shown of it is another session's."""

    def shown(self, session: Session, row: Row) -> Row:
        return self.row(self.running[self.running.index(session) - 1])


class SamplerGoesOn(StandIn):
    """Seeded sampling goes on where the last request with that seed stopped."""

    def __init__(self) -> None:
        super().__init__()
        self.generators: dict[int, random.Random] = {}

    def seed(self, body: dict[str, Any]) -> random.Random:
        return self.generators.setdefault(body.get("seed", 0), random.Random(body.get("seed", 0)))


class StopKeptWhileBusy(StandIn):
    """While others run an answer keeps its stop string."""

    def should_stop(self, session: Session) -> str:
        whole = session.text
        reason = super().should_stop(session)
        if len(self.running) > 1:
            session.text = whole
        return reason


class OneShortWhileBusy(StandIn):
    """While others run an answer ends one token before its limit."""

    def should_stop(self, session: Session) -> str:
        busy = len(self.running) > 1 and len(session.context) == session.max_tokens - 1
        return super().should_stop(session) or ("length" if busy else "")


class SecondChoiceDiffers(StandIn):
    """The second completion of a prompt lacks the prompt's middle."""

    async def stream(self, sessions: list[Session], body: dict[str, Any]) -> Any:
        for session in sessions[1:]:
            session.prompt = session.prompt[: len(session.prompt) // 2]
        async for part in super().stream(sessions, body):
            yield part


class KeepsWhatALeaverHad(StandIn):
    """After a client has left, the next request has its last tokens in front."""

    def __init__(self) -> None:
        super().__init__()
        self.rest: tuple[int, ...] = ()

    def left(self, session: Session) -> None:
        self.rest = tuple(session.context[-2:])

    def seen_prompt(self, prompt: tuple[int, ...]) -> tuple[int, ...]:
        rest, self.rest = self.rest, ()
        return (*rest, *prompt)


class DropsStreams(StandIn):
    """While others run, every fifth stream ends without its end."""

    def __init__(self) -> None:
        super().__init__()
        self.count = itertools.count()

    async def stream(self, sessions: list[Session], body: dict[str, Any]) -> Any:
        drops = bool(self.running) and next(self.count) % 5 == 4
        async for part in super().stream(sessions, body):
            if drops and '"finish_reason": "' in part:
                return
            yield part


class RemembersByBeginning(StandIn):
    """Prompts with the same first 30 bytes are taken for the same, as long as one of them runs."""

    def seen_prompt(self, prompt: tuple[int, ...]) -> tuple[int, ...]:
        return next((s.prompt for s in self.running if s.prompt[:30] == prompt[:30]), prompt)


class MovesTooFar(StandIn):
    """A batch moves log probabilities by some tenths: more than rounding, less than a mix-up."""

    noise = 0.35


class RareNeighbour(StandIn):
    """Every 40th token under load is sampled from a neighbour's row, which is shown as well."""

    def __init__(self) -> None:
        super().__init__()
        self.count = itertools.count(1)

    def row(self, session: Session) -> Row:
        others = [other for other in self.running if other is not session]
        if others and next(self.count) % 40 == 0:
            return logprobs_of((*others[0].prompt, *others[0].context))
        return super().row(session)


class JoinsChoices(StandIn):
    """Chunks of two choices carry one index."""

    def choice(self, session: Session, index: int, *rest: Any) -> dict[str, Any]:
        return super().choice(session, 0, *rest)


WRONG: tuple[type[StandIn], ...] = (
    FailsWhileBusy,
    OneAtATime,
    RandomReasoning,
    ZeroLogprobs,
    RandomWhenLong,
    SwapsNeighbours,
    PrefixOneLong,
    FirstTokenLost,
    OneAnswerForAll,
    Empty,
    ConstantLogprobs,
    NeighboursLogprobs,
    SamplerGoesOn,
    StopKeptWhileBusy,
    OneShortWhileBusy,
    SecondChoiceDiffers,
    KeepsWhatALeaverHad,
    DropsStreams,
    RemembersByBeginning,
    MovesTooFar,
    RareNeighbour,
    JoinsChoices,
)
