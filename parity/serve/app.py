"""The HTTP surface: routes, the key, size limits, streaming, and a client's disconnect as a cancellation."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from parity.serve.front import Front, Piece
from parity.serve.metrics import Metrics
from parity.serve.openapi import openapi_document
from parity.serve.prompts import Prompts
from parity.serve.requests import Ask, AskLimits, BadRequest, parse_json, read_ask
from parity.serve.responses import DONE, Answer, server_sent
from parity.serve.served_model import ServedModel

INLINE_BODY_BYTES = 16 << 10
Handler = Callable[[Request], Awaitable[Response]]


@dataclass(frozen=True, slots=True, kw_only=True)
class AppSettings:
    """What the HTTP surface allows. ``api_key`` empty asks for none; times in seconds, sizes in bytes."""

    model_name: str
    api_key: str = ""
    max_body_bytes: int = 4 << 20
    body_timeout_s: float = 30.0
    default_max_tokens: int = 256
    default_seed: int = 0


class Endpoint:
    """Handlers of one served model."""

    def __init__(self, served: ServedModel, settings: AppSettings) -> None:
        self.settings = settings
        self.front = Front(served)
        self.prompts = Prompts(served)
        self.metrics = Metrics(self.front)
        self.created = int(time.time())
        self.limits = AskLimits(
            model_name=settings.model_name,
            n_vocab=served.model.n_vocab,
            end_tokens=served.model.end_tokens(),
            max_session_tokens=served.max_session_tokens,
            default_max_tokens=settings.default_max_tokens,
            default_seed=settings.default_seed,
        )

    def app(self) -> Starlette:
        """The ASGI application; its lifespan starts and drains the engine's thread."""

        @contextlib.asynccontextmanager
        async def lifespan(_: Starlette) -> AsyncIterator[None]:
            self.front.start()
            yield
            await self.front.drain()
            self.prompts.close()

        keyed, post = self._keyed, ["POST"]
        return Starlette(
            lifespan=lifespan,
            exception_handlers={HTTPException: _http_error},
            routes=[
                Route("/health", self.health),
                Route("/openapi.json", keyed(self.openapi)),
                Route("/metrics", keyed(self.metrics_text)),
                Route("/v1/models", keyed(self.models)),
                Route("/v1/completions", keyed(self.completions), methods=post),
                Route("/v1/chat/completions", keyed(self.chat_completions), methods=post),
            ],
        )

    def _keyed(self, handler: Handler) -> Handler:
        """The handler behind the key, its ``BadRequest`` turned into an answer."""

        async def guarded(request: Request) -> Response:
            try:
                self._check_key(request)
                return await handler(request)
            except BadRequest as bad:
                return bad_response(bad)
            except ClientDisconnect:
                return Response(status_code=499)  # nobody reads it

        return guarded

    def _check_key(self, request: Request) -> None:
        if not self.settings.api_key:
            return
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        right = hmac.compare_digest(given.encode(), self.settings.api_key.encode())
        if scheme.lower() != "bearer" or not right:
            raise BadRequest(
                "the API key is missing or wrong",
                status=401,
                kind="authentication_error",
                code="invalid_api_key",
            )

    # -- small routes

    async def health(self, request: Request) -> Response:
        front = self.front
        if front.engine.failure is not None or front.is_draining:
            reason = front.engine.failure or "draining"
            return JSONResponse({"status": "unavailable", "reason": reason}, 503)
        return JSONResponse({"status": "ok"})

    async def metrics_text(self, request: Request) -> Response:
        return Response(self.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def openapi(self, request: Request) -> Response:
        return JSONResponse(openapi_document())

    async def models(self, request: Request) -> Response:
        return JSONResponse(
            {
                "object": "list",
                "data": [
                    {
                        "id": self.settings.model_name,
                        "object": "model",
                        "created": self.created,
                        "owned_by": "samebytes",
                        "max_model_len": self.limits.max_session_tokens,
                    }
                ],
            }
        )

    # -- generations

    async def completions(self, request: Request) -> Response:
        return await self._generate(request, is_chat=False)

    async def chat_completions(self, request: Request) -> Response:
        return await self._generate(request, is_chat=True)

    async def _generate(self, request: Request, *, is_chat: bool) -> Response:
        self.front.check_open()
        body = await self._body(request)
        foreign = is_chat and self.prompts.has_own_template  # it may take as long as it is allowed to
        if len(body) > INLINE_BODY_BYTES or foreign:  # nor may a long prompt hold up everybody's streams
            ask = await asyncio.to_thread(self._read, body, is_chat)
        else:
            ask = self._read(body, is_chat)
        answer = Answer(
            ask, self.front, answer_id=uuid4().hex, created=int(time.time()), model=self.settings.model_name
        )
        pieces = self._timed(ask)
        if ask.stream:
            # The first piece decides between an error status and a stream.
            first = await _unless_gone(anext(pieces), request.receive, pieces)
            return EventStream(_events(first, pieces, answer, ask), pieces)
        await _unless_gone(_collect(pieces, answer), request.receive, pieces)
        return JSONResponse(answer.whole())

    def _read(self, body: bytes, is_chat: bool) -> Ask:
        """The checked request; touches the vocabulary, never the engine. Raises ``BadRequest``."""
        tokenize = self.prompts.chat if is_chat else self.prompts.completion
        return read_ask(parse_json(body), self.limits, is_chat=is_chat, tokenize=tokenize)

    async def _body(self, request: Request) -> bytes:
        """The whole body. Raises ``BadRequest`` 413 beyond the size limit and 408 beyond the time limit."""
        most = self.settings.max_body_bytes
        body = bytearray()
        try:
            async with asyncio.timeout(self.settings.body_timeout_s):
                async for part in request.stream():
                    body += part
                    if len(body) > most:
                        raise BadRequest(f"the body has more than {most} bytes", status=413)
        except TimeoutError:
            raise BadRequest(
                f"the body did not arrive within {self.settings.body_timeout_s:g} s", status=408
            ) from None
        return bytes(body)

    async def _timed(self, ask: Ask) -> AsyncGenerator[Piece]:
        begin_s, first = time.monotonic(), True
        async with contextlib.aclosing(self.front.generate(ask)) as pieces:
            async for piece in pieces:
                if first:
                    self.metrics.time_to_first_token.observe(time.monotonic() - begin_s)
                    first = False
                yield piece
        self.metrics.e2e_request_latency.observe(time.monotonic() - begin_s)


class EventStream(StreamingResponse):
    """A stream whose generation ends with the response, also when the client goes between two chunks."""

    def __init__(self, events: AsyncIterator[bytes], pieces: AsyncGenerator[Piece]) -> None:
        super().__init__(
            events,
            media_type="text/event-stream",
            headers={"cache-control": "no-cache", "x-accel-buffering": "no"},
        )
        self._events, self._pieces = events, pieces

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._events.aclose()
            await self._pieces.aclose()


async def _collect(pieces: AsyncIterator[Piece], answer: Answer) -> None:
    async for piece in pieces:
        answer.add(piece)


async def _unless_gone(work: Awaitable, receive: Receive, pieces: AsyncGenerator[Piece]) -> Any:
    """The result of ``work``; when the client goes first, the session is cancelled
    and ``ClientDisconnect`` raised.
    """

    async def gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    task, watcher = asyncio.ensure_future(work), asyncio.ensure_future(gone())
    try:
        await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientDisconnect
    finally:
        watcher.cancel()
        if not task.done():
            task.cancel()
            await asyncio.wait((task,))
            await pieces.aclose()


async def _events(
    first: Piece, pieces: AsyncIterator[Piece], answer: Answer, ask: Ask
) -> AsyncIterator[bytes]:
    """Server-sent events of an answer. An error after the first chunk is an event
    too, and the stream then ends.
    """
    if chunk := answer.chunk(first):
        yield chunk
    try:
        async for piece in pieces:
            if chunk := answer.chunk(piece):
                yield chunk
    except BadRequest as bad:
        yield server_sent(bad.body())
        return
    if ask.include_usage:
        yield answer.usage_chunk()
    yield DONE


def bad_response(bad: BadRequest) -> JSONResponse:
    """An error as OpenAI's clients expect it."""
    headers = {} if bad.retry_after_s is None else {"retry-after": str(bad.retry_after_s)}
    if bad.status == 401:
        headers["www-authenticate"] = "Bearer"
    return JSONResponse(bad.body(), bad.status, headers=headers)


async def _http_error(request: Request, error: HTTPException) -> Response:
    return bad_response(
        BadRequest(f"{error.detail}: {request.method} {request.url.path}", status=error.status_code)
    )
