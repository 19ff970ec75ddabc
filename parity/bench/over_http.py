"""Drives any OpenAI-compatible server over HTTP with streaming completions, as ``vllm bench serve`` does."""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import httpx

from parity.bench.bench_run import BenchRun, RequestRecord
from parity.bench.workload import Job
from parity.errors import UsageError

TURNED_AWAY = (429, 503)  # overload, as a server that is not ours says it


def policy_fields(job: Job) -> dict[str, Any]:
    """What a policy is told of a request, as fields of its body; only what is not the default, so that
    servers that do not know them are not asked.
    """
    fields: dict[str, Any] = {}
    if job.client_id != "default":
        fields["user"] = job.client_id
    if job.priority:
        fields["priority"] = job.priority
    limits = {"ttft_ms": job.slo.ttft_ms, "tbt_ms": job.slo.tbt_ms}
    if any(limit is not None for limit in limits.values()):
        fields["slo"] = {name: limit for name, limit in limits.items() if limit is not None}
    return fields


class HttpDriver:
    """Sends jobs to ``url`` as token prompts. A server that gives no token ids counts chunks as tokens,
    unless its usage says otherwise; the turns of a conversation then go on without the output.
    """

    def __init__(self, url: str, model: str, *, api_key: str = "", timeout_s: float = 600.0) -> None:
        self._url = url.rstrip("/").removesuffix("/v1")
        self._model, self._timeout_s = model, timeout_s
        self._headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        self._records: list[RequestRecord] = []
        self._sent = 0

    def run_closed(self, jobs: list[Job], *, concurrency: int) -> BenchRun:
        """``concurrency`` requests at any time."""
        waiting = deque(jobs)

        async def lane() -> None:
            while waiting:
                job: Job | None = waiting.popleft()
                while job is not None:
                    job = await self._send(job, due_s=self._now())

        return asyncio.run(self._run([lane for _ in range(concurrency)]))

    def run_open(
        self, jobs: list[Job], *, times_s: list[float], max_concurrency: int | None = None
    ) -> BenchRun:
        """Jobs at their times; with ``max_concurrency`` the rest waits here."""
        gate = asyncio.Semaphore(max_concurrency or len(jobs) or 1)

        def arrival(due_s: float, job: Job) -> Callable[[], Coroutine[Any, Any, None]]:
            async def run() -> None:
                await asyncio.sleep(due_s - self._now())
                async with gate:
                    following = await self._send(job, due_s=due_s)
                    while following is not None:  # a later turn arrives when the answer before it is there
                        following = await self._send(following, due_s=self._now())

            return run

        return asyncio.run(self._run([arrival(due_s, job) for due_s, job in zip(times_s, jobs, strict=True)]))

    async def _run(self, tasks: list) -> BenchRun:
        self._records, self._sent = [], 0
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=256)
        async with httpx.AsyncClient(
            base_url=self._url, headers=self._headers, timeout=self._timeout_s, limits=limits, trust_env=False
        ) as self._http:
            self._started_s = perf_counter()
            async with asyncio.TaskGroup() as group:
                for task in tasks:
                    group.create_task(task())
            return BenchRun(duration_s=self._now(), requests=tuple(self._records))

    def _now(self) -> float:
        return perf_counter() - self._started_s

    async def _send(self, job: Job, *, due_s: float) -> Job | None:
        body = {
            "model": self._model,
            "prompt": list(job.prompt),
            "max_tokens": job.max_tokens,
            "temperature": 0.0,
            "stream": True,
            "ignore_eos": True,
            "return_token_ids": True,
            "stream_options": {"include_usage": True},
            **policy_fields(job),
        }
        number, sent_s = self._sent, self._now()
        self._sent += 1
        times_s: list[float] = []
        tokens: list[int] = []
        attempt = await self._attempt(body, times_s, tokens)
        if is_resent := attempt.may_be_resent:
            attempt = await self._attempt(body, times_s, tokens)
        error, usage = attempt.error, attempt.usage
        if not error and usage is not None and usage != len(times_s) and times_s:
            times_s = _spread(times_s, usage)
        if not error and not times_s:
            error = "no token came"
        self._records.append(
            RequestRecord(
                index=job.index,
                number=number,
                prompt_tokens=len(job.prompt),
                turn=job.turn,
                due_s=due_s,
                sent_s=sent_s,
                token_times_s=tuple(times_s),
                end_s=self._now(),
                error=error,
                rejected=attempt.status in TURNED_AWAY,
                client_id=job.client_id,
                slo=job.slo,
                is_resent=is_resent,
            )
        )
        return None if error else job.following(tokens)

    async def _attempt(self, body: dict[str, Any], times_s: list[float], tokens: list[int]) -> _Attempt:
        """Send the request and note the tokens that come back."""
        found = _Attempt()

        async def note(event: str, _: Any) -> None:
            found.is_new_connection |= event.startswith("connection.connect_tcp.")

        try:
            async with self._http.stream(
                "POST", "/v1/completions", json=body, extensions={"trace": note}
            ) as response:
                found.status = response.status_code
                if found.status != 200:
                    text = (await response.aread()).decode(errors="replace")
                    found.error = f"HTTP {found.status}: {text[:200]}"
                async for line in response.aiter_lines() if not found.error else _nothing():
                    if line.startswith("data: ") and line != "data: [DONE]":
                        found.usage = self._read_chunk(json.loads(line[6:]), times_s, tokens) or found.usage
        except (httpx.HTTPError, ValueError, KeyError, TypeError, AttributeError) as failure:
            found.error = f"{type(failure).__name__}: {failure}"
            found.is_closed = isinstance(failure, httpx.NetworkError | httpx.RemoteProtocolError)
        return found

    def _read_chunk(self, data: dict[str, Any], times_s: list[float], tokens: list[int]) -> int | None:
        """Note the tokens of a chunk; returns the output's length when the chunk states it."""
        if "error" in data:
            raise ValueError(str(data["error"]))
        for choice in data.get("choices") or ():
            ids = choice.get("token_ids")
            count = len(ids) if ids is not None else bool(choice.get("text"))
            times_s += [self._now()] * count
            tokens += ids or ()
        return (data.get("usage") or {}).get("completion_tokens")


@dataclass(slots=True)
class _Attempt:
    """What came of a request that was sent once. ``is_closed``: the connection ended in the midst of it."""

    error: str = ""
    usage: int | None = None
    status: int = 0
    is_closed: bool = False
    is_new_connection: bool = False

    @property
    def may_be_resent(self) -> bool:
        """Did the server close a kept-alive connection, as it may at any time, before any answer? (RFC 9112,
        section 9.3.1.)
        """
        return self.is_closed and self.status == 0 and not self.is_new_connection


def _spread(times_s: list[float], count: int) -> list[float]:
    """Arrival times for ``count`` tokens where only chunks were seen: tokens
    without a chunk came with the last.
    """
    return times_s[:count] if count <= len(times_s) else times_s + times_s[-1:] * (count - len(times_s))


async def _nothing() -> AsyncIterator[Any]:
    return
    yield


def check_reachable(url: str) -> None:
    """Raises ``UsageError`` when nothing answers at ``url``."""
    try:
        httpx.get(url.rstrip("/").removesuffix("/v1") + "/v1/models", timeout=10.0, trust_env=False)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise UsageError("no server answers", where=url, why=str(error)) from error
