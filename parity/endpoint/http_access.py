"""HTTP as every adapter needs it: one client, a user's key, timeout and rate, streams of JSON, errors told
apart.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

import httpx
from httpx_sse import EventSource, SSEError

from parity.endpoint.system import Refused, Retryable
from parity.errors import UsageError

RETRYABLE_STATUS = frozenset({408, 425, 429, 500, 502, 503, 504})


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointAccess:
    """How a server is reached. ``requests_per_s`` None sets no rate; ``extra_body`` is added to every
    request.
    """

    url: str
    model: str
    api_key: str = ""
    timeout_s: float = 120.0
    requests_per_s: float | None = None
    chat: bool = False
    extra_body: Mapping[str, Any] = field(default_factory=dict)


class HttpAccess:
    """One server over HTTP. Every request has a connection of its own: a kept one may be closed by the server
    in the moment of the next request, and that would look like a failure under load.
    """

    def __init__(self, access: EndpointAccess) -> None:
        base = access.url.rstrip("/").removesuffix("/v1")
        if not base.startswith(("http://", "https://")):
            raise UsageError(f"{access.url!r} is no URL", why="it starts with neither http:// nor https://")
        self.access = access
        self._http = httpx.AsyncClient(
            base_url=base,
            headers={"authorization": f"Bearer {access.api_key}"} if access.api_key else {},
            timeout=access.timeout_s,
            trust_env=False,
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
        )
        self._next_slot_s = 0.0

    async def close(self) -> None:
        await self._http.aclose()

    async def look(self, path: str) -> httpx.Response | None:
        """The answer of a GET with status 200, or None. A look is no question: it has no rate and no
        retries.
        """
        try:
            response = await self._http.get(path)
        except httpx.HTTPError:
            return None
        return response if response.status_code == 200 else None

    async def look_json(self, path: str) -> dict[str, Any]:
        """The object at a path; empty when there is none."""
        response = await self.look(path)
        try:
            data = None if response is None else response.json()
        except ValueError:
            return {}
        return data if isinstance(data, dict) else {}

    async def post_json(self, path: str, body: Mapping[str, Any]) -> Any:
        """The JSON of an answer with status 200. Raises ``Refused`` or ``Retryable``."""
        async with self._open(path, body) as response:
            try:
                return json.loads(await response.aread())
            except ValueError as error:
                raise Refused(f"no JSON: {response.text[:200]!r}", 200) from error

    async def stream_json(self, path: str, body: Mapping[str, Any]) -> AsyncGenerator[Any, None]:
        """The JSON of every event of a stream up to ``[DONE]``; the one object of a server that does not
        stream.

        Raises ``Refused`` or ``Retryable``.
        """
        async with self._open(path, body) as response:
            try:
                if "text/event-stream" not in response.headers.get("content-type", ""):
                    yield json.loads(await response.aread())
                    return
                async for event in EventSource(response).aiter_sse():
                    if event.data == "[DONE]":
                        return
                    yield json.loads(event.data)
            except ValueError as error:
                raise Refused(f"no JSON in the stream: {error}", 200) from error
            except SSEError as error:
                raise Refused(f"no stream of events: {error}", 200) from error

    @asynccontextmanager
    async def _open(self, path: str, body: Mapping[str, Any]) -> AsyncGenerator[httpx.Response, None]:
        await self._wait_for_slot()
        try:
            async with self._http.stream("POST", path, json={**body, **self.access.extra_body}) as response:
                if response.status_code != 200:
                    text = (await response.aread()).decode(errors="replace")[:200]
                    message = f"HTTP {response.status_code}: {text}"
                    if response.status_code in RETRYABLE_STATUS:
                        raise Retryable(message, response.status_code, _seconds(response))
                    raise Refused(message, response.status_code)
                yield response
        except httpx.HTTPError as error:
            raise Retryable(f"{type(error).__name__}: {error}") from error

    async def _wait_for_slot(self) -> None:
        if self.access.requests_per_s is None:
            return
        slot_s = max(monotonic(), self._next_slot_s)
        self._next_slot_s = slot_s + 1 / self.access.requests_per_s
        await asyncio.sleep(slot_s - monotonic())


def _seconds(response: httpx.Response) -> float | None:
    try:
        return max(0.0, float(response.headers["retry-after"]))
    except (KeyError, ValueError):
        return None


def prometheus_values(text: str) -> dict[str, float]:
    """Sums over labels of every sample of a Prometheus text, by name. Raises ValueError for another text."""
    from prometheus_client.parser import text_string_to_metric_families

    values: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            values[sample.name] = values.get(sample.name, 0.0) + sample.value
    return values
