"""A small OpenAI-compatible server for tests: a toy language model behind an honest batching engine.

A token's log probabilities are a hash of everything before it, so that any wrong token in the past shows. All
running sessions get one token a step, and a step waits until its tokens are written: streams interleave
without a clock.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import random
import struct
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from parity.serve.server import ServerSettings, bind_socket, socket_url

ALPHABET = "abcdefghijklmnopqrstuvwxyz012345"
Row = list[float]
WORK = bytes(1 << 21)


@dataclass(eq=False)
class Session:
    """One running completion; ``context`` is the prompt and what was generated."""

    prompt: tuple[int, ...]
    max_tokens: int
    temperature: float
    random: random.Random
    stops: tuple[str, ...]
    context: list[int] = field(default_factory=list)
    text: str = ""
    rows: list[tuple[int, Row]] = field(default_factory=list)
    finish: str = ""
    queue: asyncio.Queue = field(default_factory=asyncio.Queue)


def logprobs_of(context: tuple[int, ...]) -> Row:
    """Log probabilities of the 32 tokens, from -4 to 4 before they are normalised."""
    data = hashlib.blake2b(struct.pack(f"{len(context)}i", *context), digest_size=64).digest()
    logits = [(value - 32768) / 8192 for value in struct.unpack("32H", data)]
    return normalised(logits)


def normalised(logits: Row) -> Row:
    total = math.log(sum(map(math.exp, logits)))
    return [value - total for value in logits]


class StandIn:
    """The right server; wrong ones override one method. ``noise`` is how far, in nats, a batch moves a
    row.
    """

    reasoning = False
    shows_logprobs = True
    noise = 0.0

    def __init__(self) -> None:
        self.running: list[Session] = []
        self.stepping: asyncio.Task | None = None
        self.cache: list[tuple[int, ...]] = []

    # -- what wrong servers override

    def row(self, session: Session) -> Row:
        """Log probabilities of the next token."""
        row = logprobs_of((*session.prompt, *session.context))
        if self.noise and len(self.running) > 1:
            rng = random.Random(f"{session.prompt}{len(session.context)}{len(self.running)}")
            row = normalised([value + self.noise * rng.uniform(-1, 1) for value in row])
        return row

    def choose(self, session: Session, row: Row) -> int:
        """The next token."""
        if session.temperature == 0:
            return max(range(len(row)), key=row.__getitem__)
        weights = [math.exp(value / session.temperature) for value in row]
        return session.random.choices(range(len(row)), weights)[0]

    def shown(self, session: Session, row: Row) -> Row:
        """The log probabilities that the client is told."""
        return row

    def seen_prompt(self, prompt: tuple[int, ...]) -> tuple[int, ...]:
        """The prompt as the engine reads it."""
        return prompt

    def step_rows(self) -> list[tuple[Session, int, Row]]:
        """One step: a token for every running session."""
        rows = [(session, self.row(session)) for session in self.running]
        return [(session, self.choose(session, row), self.shown(session, row)) for session, row in rows]

    def should_stop(self, session: Session) -> str:
        """Why the session ends here; empty if it goes on."""
        for stop in session.stops:
            if stop in session.text:
                session.text = session.text[: session.text.index(stop)]
                return "stop"
        return "length" if len(session.context) >= session.max_tokens else ""

    def left(self, session: Session) -> None:
        """A client went."""

    def refusal(self, body: dict[str, Any]) -> Response | None:
        """An answer in place of one."""
        return None

    def seed(self, body: dict[str, Any]) -> random.Random:
        return random.Random(body.get("seed", 0))

    # -- the engine

    async def steps(self) -> None:
        while self.running:
            for session, token, row in self.step_rows():
                session.context.append(token)
                session.rows.append((token, row))
                session.text += ALPHABET[token]
                session.finish = self.should_stop(session)
                session.queue.put_nowait((token, row, session.finish))
            took_part, self.running = self.running, [s for s in self.running if not s.finish]
            for session in took_part:
                await session.queue.join()
            # A step costs something, and the client has the processor meanwhile: hashing lets go of the lock.
            hashlib.blake2b(WORK)
        self.stepping = None

    async def tokens(self, session: Session) -> AsyncIterator[tuple[int, Row, str]]:
        """The session's tokens as they come; leaving it takes the session out."""
        self.running.append(session)
        if self.stepping is None:
            self.stepping = asyncio.create_task(self.steps())
        try:
            while True:
                item = await session.queue.get()
                try:
                    yield item
                finally:
                    session.queue.task_done()
                if item[2]:
                    return
        finally:
            if session in self.running:
                self.running.remove(session)
                self.left(session)
            with suppress(asyncio.QueueEmpty):
                while True:
                    session.queue.get_nowait()
                    session.queue.task_done()

    # -- HTTP

    async def completions(self, request: Request) -> Response:
        body = json.loads(await request.body())
        if (refused := self.refusal(body)) is not None:
            return refused
        text = body["prompt"] if "prompt" in body else body["messages"][-1]["content"]
        prompt = tuple(text.encode()) if isinstance(text, str) else tuple(text)
        prompt = self.seen_prompt(prompt)
        stops = body.get("stop") or ()
        sessions = [
            Session(
                prompt=prompt,
                max_tokens=body["max_tokens"],
                temperature=body.get("temperature", 1.0),
                random=self.seed(body),
                stops=tuple(stops),
            )
            for _ in range(body.get("n", 1))
        ]
        if body.get("stream"):
            return StreamingResponse(self.stream(sessions, body), media_type="text/event-stream")
        choices = []
        for index, session in enumerate(sessions):
            async for _ in self.tokens(session):
                pass
            choices.append(self.choice(session, index, session.rows, session.text, body, session.finish))
        return JSONResponse({"choices": choices, "usage": self.usage(sessions)})

    async def stream(self, sessions: list[Session], body: dict[str, Any]) -> AsyncIterator[str]:
        for index, session in enumerate(sessions):
            shown = 0
            async for token, row, finish in self.tokens(session):
                # A stop string's first character may be the end of what is there: show it when that is
                # decided.
                hold = 0 if finish or not session.stops else max(map(len, session.stops)) - 1
                text = session.text[shown : len(session.text) - hold]
                shown += len(text)
                yield self.event([self.choice(session, index, [(token, row)], text, body, finish)])
        yield f"data: {json.dumps({'choices': [], 'usage': self.usage(sessions)})}\n\n"
        yield "data: [DONE]\n\n"

    @staticmethod
    def event(choices: list[dict[str, Any]]) -> str:
        return f"data: {json.dumps({'choices': choices})}\n\n"

    def choice(
        self,
        session: Session,
        index: int,
        rows: list[tuple[int, Row]],
        text: str,
        body: dict[str, Any],
        finish: str,
    ) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": index, "finish_reason": finish or None, "logprobs": None}
        if "messages" in body:
            name = "delta" if body.get("stream") else "message"
            choice[name] = {"reasoning_content": text} if self.reasoning else {"content": text}
        else:
            choice["text"] = text
        if self.shows_logprobs and body.get("logprobs"):
            choice["logprobs"] = {"content": [self.entry(token, row) for token, row in rows]}
        return choice

    @staticmethod
    def entry(token: int, row: Row) -> dict[str, Any]:
        best = sorted(range(len(row)), key=lambda index: -row[index])[:5]

        def named(index: int) -> dict[str, Any]:
            return {"token": ALPHABET[index], "bytes": [ord(ALPHABET[index])], "logprob": row[index]}

        return {**named(token), "top_logprobs": [named(index) for index in best]}

    @staticmethod
    def usage(sessions: list[Session]) -> dict[str, Any]:
        output = sum(len(session.context) for session in sessions)
        return {"prompt_tokens": len(sessions[0].prompt), "completion_tokens": output}

    def app(self) -> Starlette:
        paths = ("/v1/completions", "/v1/chat/completions")
        return Starlette(routes=[Route(path, self.completions, methods=["POST"]) for path in paths])


@contextmanager
def running(server: StandIn) -> Iterator[str]:
    """The server on a thread; gives its URL."""
    settings = ServerSettings(port=0)
    bound = bind_socket(settings)
    bound.listen(128)
    config = uvicorn.Config(server.app(), lifespan="off", log_level="critical", access_log=False)
    uvicorn_server = uvicorn.Server(config)
    thread = threading.Thread(target=uvicorn_server.run, kwargs={"sockets": [bound]}, daemon=True)
    thread.start()
    try:
        yield socket_url(bound)
    finally:
        uvicorn_server.should_exit = True
        thread.join()
        bound.close()
