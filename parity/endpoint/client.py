"""An OpenAI-compatible server as a black box: one question, one answer, with the
user's timeouts, retries and rate.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Any

import httpx
import tenacity

from parity.errors import UsageError

# -- One answer of an OpenAI-compatible server, read from any of its forms: whole
# or streamed, chat or completion.


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointAnswer:
    """What came back. ``tokens`` are ids or token texts, ``logprobs`` one per token, ``margins`` top-1 minus
    top-2 log probability; each is empty where the server gives none. ``error`` is set instead of a text.
    """

    text: str = ""
    finish_reason: str = ""
    tokens: tuple[Any, ...] = ()
    logprobs: tuple[float, ...] = ()
    margins: tuple[float, ...] = ()
    error: str = ""

    @staticmethod
    def from_data(data: dict[str, Any]) -> EndpointAnswer:
        """The reverse of ``dataclasses.asdict`` after JSON."""
        lists = {name: tuple(data[name]) for name in ("tokens", "logprobs", "margins")}
        return EndpointAnswer(**{**data, **lists})


def read_answer(data: dict[str, Any], *, chat: bool) -> EndpointAnswer:
    """An answer of either form. Raises KeyError, IndexError, TypeError or ValueError for another form."""
    choice = data["choices"][0]
    text = (choice["message"].get("content") or "") if chat else choice["text"]
    if not isinstance(text, str):
        raise ValueError(f"the text is {json.dumps(text)}")
    names, logprobs, margins = _read_logprobs(choice.get("logprobs"), chat=chat)
    tokens = choice.get("token_ids") or names
    return EndpointAnswer(
        text=text,
        finish_reason=str(choice.get("finish_reason")),
        tokens=tuple(tokens),
        logprobs=tuple(logprobs),
        margins=tuple(margins),
    )


def _read_logprobs(data: Any, *, chat: bool) -> tuple[list[str], list[float], list[float]]:
    """Token texts, log probabilities, and margins where at least two alternatives are given."""
    if not data:
        return [], [], []
    if chat or "content" in data:  # llama-server gives the chat form for completions too
        content = data.get("content") or []
        tops = [[entry["logprob"] for entry in item.get("top_logprobs") or []] for item in content]
        names, values = [item["token"] for item in content], [item["logprob"] for item in content]
    else:
        names, values = data.get("tokens") or [], data.get("token_logprobs") or []
        tops = [list((top or {}).values()) for top in data.get("top_logprobs") or [None] * len(names)]
    margins = [
        ordered[0] - ordered[1] if len(ordered) > 1 else float("nan")
        for ordered in (sorted(top, reverse=True) for top in tops)
    ]
    return names, values, margins


def merge_chunks(chunks: Sequence[dict[str, Any]], *, chat: bool) -> EndpointAnswer:
    """The answer that streamed chunks come to. Raises like ``read_answer``, and ValueError for a stream that
    broke off: without a finish reason, or with an error in it.
    """
    parts: list[EndpointAnswer] = []
    reason = None
    for chunk in chunks:
        if "error" in chunk:
            raise ValueError(f"the stream holds an error: {json.dumps(chunk['error'])}")
        for choice in chunk.get("choices") or ():
            if chat:
                choice = {**choice, "message": choice["delta"]}
            parts.append(read_answer({"choices": [choice]}, chat=chat))
            reason = choice.get("finish_reason") or reason
    if reason is None:
        raise ValueError("the stream ended without a finish reason")
    return EndpointAnswer(
        text="".join(part.text for part in parts),
        finish_reason=str(reason),
        tokens=tuple(token for part in parts for token in part.tokens),
        logprobs=tuple(value for part in parts for value in part.logprobs),
        margins=tuple(value for part in parts for value in part.margins),
    )


MAX_RETRY_WAIT_S = 60.0
RETRYABLE_STATUS = frozenset({408, 425, 429, 500, 502, 503, 504})
# Extensions to ask for, richest first; a server that refuses one is asked for less.
EXTRAS: tuple[dict[str, Any], ...] = (
    {"logprobs": 2, "return_token_ids": True},
    {"logprobs": 2},
    {"return_token_ids": True},
    {},
)


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointAccess:
    """How a server is reached. ``requests_per_s`` None sets no rate; ``retries`` are
    further attempts, not attempts.
    """

    url: str
    model: str
    api_key: str = ""
    timeout_s: float = 120.0
    retries: int = 2
    requests_per_s: float | None = None
    chat: bool = False
    stream: bool = False


class Retryable(Exception):
    """An attempt that may succeed later; ``wait_s`` is the server's wish, if it said one."""

    def __init__(self, message: str, wait_s: float | None = None) -> None:
        super().__init__(message)
        self.wait_s = wait_s


class Refused(Exception):
    """The server understood and said no."""


class EndpointClient:
    """Asks one server. Use as an async context manager."""

    def __init__(self, access: EndpointAccess) -> None:
        self.access = access
        base = access.url.rstrip("/").removesuffix("/v1")
        if not base.startswith(("http://", "https://")):
            raise UsageError(f"{access.url!r} is no URL", why="it starts with neither http:// nor https://")
        headers = {"authorization": f"Bearer {access.api_key}"} if access.api_key else {}
        self._http = httpx.AsyncClient(
            base_url=base,
            headers=headers,
            timeout=access.timeout_s,
            trust_env=False,
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=64),
        )
        self._path = "/v1/chat/completions" if access.chat else "/v1/completions"
        self.extras: dict[str, Any] = {}
        self._next_slot_s = 0.0
        self._in_flight = 0
        self.most_in_flight = 0

    async def __aenter__(self) -> EndpointClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def find_extras(self, question: dict[str, Any]) -> None:
        """Learn what the server gives besides text. Raises ``UsageError`` when it cannot be asked at all."""
        error: Exception | None = None
        for extras in EXTRAS:
            self.extras = self._for_chat(extras)
            try:
                await self._attempt({**question, "max_tokens": 1})
                return
            except Refused as refused:
                error = refused
            except Retryable as failure:
                raise UsageError(
                    "the server does not answer", where=self.access.url, why=str(failure)
                ) from failure
        raise UsageError("the server refuses a plain request", where=self.access.url, why=str(error))

    def _for_chat(self, extras: dict[str, Any]) -> dict[str, Any]:
        if self.access.chat and "logprobs" in extras:
            return {**extras, "logprobs": True, "top_logprobs": extras["logprobs"]}
        return extras

    async def ask(self, question: dict[str, Any]) -> EndpointAnswer:
        """The answer, after the retries that it needed; what went wrong for good is in its ``error``."""
        try:
            async for attempt in tenacity.AsyncRetrying(
                stop=tenacity.stop_after_attempt(self.access.retries + 1),
                wait=_retry_wait,
                retry=tenacity.retry_if_exception_type(Retryable),
                reraise=True,
            ):
                with attempt:
                    return await self._attempt(question)
        except (Retryable, Refused) as error:
            return EndpointAnswer(error=str(error))
        raise AssertionError("tenacity ended without a result")

    async def leave_early(self, question: dict[str, Any]) -> bool:
        """Stream an answer and disconnect at its first chunk; False when none came."""
        await self._wait_for_slot()
        body = self._body(question, stream=True)
        try:
            with self._counted():
                async with self._http.stream("POST", self._path, json=body) as response:
                    async for _ in response.aiter_raw():
                        return response.status_code == 200
        except httpx.HTTPError:
            return False
        return False

    # -- one attempt

    def _body(self, question: dict[str, Any], *, stream: bool) -> dict[str, Any]:
        question = dict(question)
        if self.access.chat:
            question["messages"] = [{"role": "user", "content": question.pop("prompt")}]
        return {"model": self.access.model, "stream": stream, **question, **self.extras}

    async def _attempt(self, question: dict[str, Any]) -> EndpointAnswer:
        await self._wait_for_slot()
        body = self._body(question, stream=self.access.stream)
        try:
            with self._counted():
                async with self._http.stream("POST", self._path, json=body) as response:
                    text = (await response.aread()).decode(errors="replace")
        except httpx.HTTPError as error:
            raise Retryable(f"{type(error).__name__}: {error}") from error
        if response.status_code in RETRYABLE_STATUS:
            raise Retryable(f"HTTP {response.status_code}: {text[:200]}", _seconds(response))
        if response.status_code != 200:
            raise Refused(f"HTTP {response.status_code}: {text[:200]}")
        try:
            if not self.access.stream:
                return read_answer(json.loads(text), chat=self.access.chat)
            lines = (
                line.removeprefix("data:").strip() for line in text.split("\n") if line.startswith("data:")
            )
            chunks = [json.loads(line) for line in lines if line != "[DONE]"]
            return merge_chunks(chunks, chat=self.access.chat)
        except (ValueError, KeyError, IndexError, TypeError) as error:
            raise Refused(f"no answer in OpenAI's form: {error!r} in {text[:200]!r}") from error

    def _counted(self) -> EndpointClient._Count:
        return EndpointClient._Count(self)

    class _Count:
        """How many requests are under way: what shows that a server was under load at all."""

        def __init__(self, client: EndpointClient) -> None:
            self._client = client

        def __enter__(self) -> None:
            client = self._client
            client._in_flight += 1
            client.most_in_flight = max(client.most_in_flight, client._in_flight)

        def __exit__(self, *_: object) -> None:
            self._client._in_flight -= 1

    async def _wait_for_slot(self) -> None:
        if self.access.requests_per_s is None:
            return
        slot_s = max(monotonic(), self._next_slot_s)
        self._next_slot_s = slot_s + 1 / self.access.requests_per_s
        await asyncio.sleep(slot_s - monotonic())


def _retry_wait(state: tenacity.RetryCallState) -> float:
    wished_s = getattr(state.outcome.exception(), "wait_s", None)
    return min(MAX_RETRY_WAIT_S, 0.25 * 2**state.attempt_number if wished_s is None else wished_s)


def _seconds(response: httpx.Response) -> float | None:
    try:
        return max(0.0, float(response.headers["retry-after"]))
    except (KeyError, ValueError):
        return None
