"""The asyncio side of the channel: admits at the door, turns engine events into
text, and cancels who has gone.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from time import monotonic
from uuid import uuid4

from parity.serve.engine_thread import Cancel, EngineThread, Event, Stop, Submit, TokenLogprobs
from parity.serve.requests import Ask, BadRequest
from parity.serve.served_model import ServedModel
from parity.serve.text import TextStream
from scheduler.records import FinishReason

RECENT_REQUESTS = 32  # over which the time to retry is estimated


@dataclass(frozen=True, slots=True)
class GeneratedToken:
    """One token with the bytes that it stands for: none for a token that ends the generation."""

    token: int
    data: bytes
    logprobs: TokenLogprobs | None


@dataclass(frozen=True, slots=True)
class Piece:
    """Part of an answer: newly showable text, the tokens behind it, and at the end why
    it ended (``stop``, ``length``).
    """

    text: str
    tokens: tuple[GeneratedToken, ...]
    finish_reason: str | None = None


class Inflight:
    """One accepted session on the asyncio side: events that nobody has read yet."""

    def __init__(self) -> None:
        self.events: deque[Event] = deque()
        self.arrived = asyncio.Event()
        self.begun_s = monotonic()

    async def take(self) -> list[Event]:
        """All events since the last call, at least one."""
        await self.arrived.wait()
        self.arrived.clear()
        events = list(self.events)
        self.events.clear()
        return events


class Front:
    """Everything the HTTP handlers need. All methods belong to the event loop's thread."""

    def __init__(self, served: ServedModel) -> None:
        self.served = served
        self.engine = EngineThread(served, self._from_engine)
        self.live: dict[str, Inflight] = {}
        self.counts = {"refused": 0, "disconnected": 0, "finished": 0, "failed": 0}
        self.is_draining = False
        self._durations_s: deque[float] = deque(maxlen=RECENT_REQUESTS)
        self._pieces: dict[int, bytes] = {}
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.engine.start()

    async def drain(self) -> None:
        """Refuse what is new, finish what is live, end the engine's thread."""
        self.is_draining = True
        self.engine.send(Stop())
        await asyncio.to_thread(self.engine.join)

    # -- events

    def _from_engine(self, events: Sequence[Event]) -> None:
        """On the engine's thread: one hand-over per step, however many sessions it served."""
        try:
            self._loop.call_soon_threadsafe(self._dispatch, events)
        except RuntimeError:
            pass  # the event loop was closed by force; nobody is left to hear

    def _dispatch(self, events: Sequence[Event]) -> None:
        for event in events:
            inflight = self.live.get(event.request_id)
            if inflight is not None:
                inflight.events.append(event)
                inflight.arrived.set()

    # -- the door

    def check_open(self) -> None:
        """Raises ``BadRequest`` when no request can be taken: 503 for good, 429 when waiting helps."""
        if self.engine.failure is not None:
            raise BadRequest(
                f"the engine has stopped: {self.engine.failure}", status=503, kind="server_error"
            )
        if self.is_draining:
            raise BadRequest("the server is shutting down", status=503, kind="server_error", retry_after_s=1)
        settings = self.served.settings
        most = settings.max_num_seqs + settings.max_waiting
        if len(self.live) >= most:
            self.counts["refused"] += 1
            raise BadRequest(
                f"{len(self.live)} requests are in the queue or running, at most {most} are taken",
                status=429,
                kind="rate_limit_error",
                code="queue_full",
                retry_after_s=self.retry_after_s(),
            )

    def retry_after_s(self) -> int:
        """Whole seconds until a place is likely: recent mean duration times the
        queue's length in rounds, 1 to 60.
        """
        mean_s = sum(self._durations_s) / len(self._durations_s) if self._durations_s else 1.0
        rounds = len(self.live) / self.served.settings.max_num_seqs
        return min(60, max(1, math.ceil(mean_s * rounds)))

    # -- one request

    async def generate(self, ask: Ask) -> AsyncGenerator[Piece]:
        """The answer in pieces, the last with its finish reason. Raises ``BadRequest``.

        Closing the iterator early, as a disconnect does, cancels the session.
        """
        self.check_open()
        request_id = uuid4().hex
        inflight = self.live[request_id] = Inflight()
        ended = False
        self.engine.send(Submit(ask.to_request(request_id, arrival_ms=inflight.begun_s * 1e3), ask.logprobs))
        try:
            text = TextStream(ask.stops)
            while not ended:
                events = await inflight.take()
                ended = events[-1].is_last
                yield self._read(events, ask, text)
                if text.stopped is not None:
                    break
        finally:
            del self.live[request_id]
            if not ended:
                self.engine.send(Cancel(request_id))
                self.counts["disconnected" if text.stopped is None else "finished"] += 1
            self._durations_s.append(monotonic() - inflight.begun_s)

    def _read(self, events: list[Event], ask: Ask, text: TextStream) -> Piece:
        """What a list of events of one session comes to. Raises ``BadRequest``."""
        shown, tokens, reason = "", [], None
        for event in events:
            if event.refusal is not None:
                self.counts["refused"] += 1
                raise _refused(event, self.retry_after_s())
            if event.token is not None:
                data = b"" if event.token in ask.stop_token_ids else self.token_bytes(event.token)
                tokens.append(GeneratedToken(event.token, data, event.logprobs))
                shown += text.feed(data)
            elif event.reason in (FinishReason.LENGTH, FinishReason.STOP):
                shown += text.finish()
                reason = "stop" if text.stopped is not None else event.reason.value
                self.counts["finished"] += 1
            else:
                self.counts["failed"] += 1
                raise _failed(event)
            if text.stopped is not None:
                return Piece(shown, tuple(tokens), "stop")
        return Piece(shown, tuple(tokens), reason)

    def token_bytes(self, token: int) -> bytes:
        data = self._pieces.get(token)
        if data is None:
            data = self._pieces[token] = self.served.model.token_bytes(token)
        return data


def _refused(event: Event, retry_after_s: int) -> BadRequest:
    refusal = event.refusal
    if refusal.retryable:
        return BadRequest(
            f"refused: {refusal.reason}",
            status=429,
            kind="rate_limit_error",
            code="queue_full",
            retry_after_s=retry_after_s,
        )
    return BadRequest(
        f"the request {refusal.reason}: needed {refusal.needed}, available {refusal.available}",
        code="context_length_exceeded",
    )


def _failed(event: Event) -> BadRequest:
    """A session that the scheduler gave up: rejected by its policy (retryable), or the engine failed."""
    if event.error.startswith("rejected:"):
        return BadRequest(event.error, status=429, kind="rate_limit_error", code="rejected", retry_after_s=1)
    return BadRequest(
        event.error or f"the session ended: {event.reason.value}", status=500, kind="server_error"
    )
