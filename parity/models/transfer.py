"""One resumable HTTP transfer into a partial file: passing faults are waited out, others are raised."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from http import HTTPStatus
from pathlib import Path
from typing import TypeVar

from huggingface_hub import get_session
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.utils import hf_raise_for_status, httpx, parse_ratelimit_headers
from tenacity import RetryCallState, Retrying, retry_if_exception, stop_after_attempt

from parity.errors import ExitCode
from parity.models.unavailable import Unavailable

Answer = TypeVar("Answer")
ReportProgress = Callable[[int, int], None]
"""Called with (bytes on disk, bytes in all); cheap, called once per network read."""


class CutShort(Exception):
    """The connection ended in good order before the last byte, or the partial file had to be thrown away."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """How long to be patient.

    Units: ``failures_in_a_row`` counts attempts that brought no new byte; ``attempts`` counts all;
    ``longest_wait_s`` is the longest single wait, a server that asks for more is told no.
    """

    failures_in_a_row: int = 5
    attempts: int = 100
    first_wait_s: float = 1.0
    longest_wait_s: float = 330.0  # the Hub's rate-limit window is five minutes
    sleep: Callable[[float], None] = time.sleep
    say: Callable[[str], None] = lambda line: None  # told of each wait, one line


def asked_wait_s(response: httpx.Response) -> float | None:
    """Seconds that a response asks to wait: ``Retry-After`` (RFC 9110, 10.2.3) or ``RateLimit``; else None.

    A ``Retry-After`` date is taken relative to the response's own ``Date``, so no local clock is read.
    """
    value = response.headers.get("retry-after", "").strip()
    if value.isdigit():
        return float(value)
    try:
        until, now = parsedate_to_datetime(value), parsedate_to_datetime(response.headers.get("date", ""))
        return max(0.0, (_utc(until) - _utc(now)).total_seconds())
    except ValueError:
        pass
    limit = parse_ratelimit_headers(response.headers)
    return float(limit.reset_in_seconds) if limit is not None and limit.remaining == 0 else None


def _utc(moment: datetime) -> datetime:
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)


def is_transient(error: BaseException, *, longest_wait_s: float) -> bool:
    """Whether the same request may succeed later: 408, 429, 5xx, cut or refused connections."""
    if isinstance(error, HfHubHTTPError):
        if error.response.status_code not in (408, 429) and error.response.status_code < 500:
            return False
        return (asked_wait_s(error.response) or 0.0) <= longest_wait_s
    if isinstance(error, httpx.UnsupportedProtocol | httpx.ProxyError | httpx.LocalProtocolError):
        return False
    return isinstance(error, CutShort | httpx.TransportError)


@dataclass(slots=True)
class Patience:
    """Tenacity's stop and wait rules for one transfer; ``has_moved`` clears the row of failures."""

    policy: RetryPolicy
    failures: int = 0

    def has_moved(self) -> None:
        self.failures = 0

    def has_failed(self, state: RetryCallState) -> None:
        self.failures += 1

    def is_over(self, state: RetryCallState) -> bool:
        return self.failures >= self.policy.failures_in_a_row or stop_after_attempt(self.policy.attempts)(
            state
        )

    def wait_s(self, state: RetryCallState) -> float:
        error = state.outcome.exception() if state.outcome else None
        asked = asked_wait_s(error.response) if isinstance(error, HfHubHTTPError) else None
        if asked is not None:
            return asked
        return min(self.policy.longest_wait_s, self.policy.first_wait_s * 2 ** (self.failures - 1))

    def tell(self, state: RetryCallState) -> None:
        error = state.outcome.exception() if state.outcome else None
        if isinstance(error, HfHubHTTPError):
            reason = f"HTTP {error.response.status_code}"
        else:
            reason = str(error) or type(error).__name__
        self.policy.say(f"{' '.join(reason.split())}; trying again in {state.upcoming_sleep:.0f} s")

    def retrying(self) -> Retrying:
        return Retrying(
            retry=retry_if_exception(
                lambda error: is_transient(error, longest_wait_s=self.policy.longest_wait_s)
            ),
            after=self.has_failed,
            before_sleep=self.tell,
            stop=self.is_over,
            wait=self.wait_s,
            sleep=self.policy.sleep,
            reraise=True,
        )


def run_with_patience(request: Callable[[], Answer], policy: RetryPolicy) -> Answer:
    """``request()``, again after transient faults, within ``policy``; the last error is raised as it is."""
    return Patience(policy).retrying()(request)


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """What to get and where the bytes go; a redirect to another host drops the token from ``headers``."""

    url: str
    partial: Path
    size_bytes: int
    headers: dict[str, str] = field(default_factory=dict)
    timeout_s: float = 10.0


def run_transfer(transfer: Transfer, *, policy: RetryPolicy, report: ReportProgress) -> None:
    """Fill ``transfer.partial`` to exactly ``size_bytes``, resuming from what is there already.

    Raises ``HfHubHTTPError`` or ``httpx.TransportError`` when patience ends, ``Unavailable`` when
    the disk is full or the server sends more than ``size_bytes``. A partial file is kept for the
    next run, except an overlong one.
    """
    patience = Patience(policy)

    def attempt() -> None:
        before = _size_bytes(transfer.partial)
        try:
            _stream(transfer, report)
        finally:
            if _size_bytes(transfer.partial) > before:
                patience.has_moved()

    patience.retrying()(attempt)


def _size_bytes(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _stream(transfer: Transfer, report: ReportProgress) -> None:
    """One request: from the end of the partial file to the end of the body."""
    start = _size_bytes(transfer.partial)
    if start > transfer.size_bytes:
        transfer.partial.unlink()
        start = 0
    if start == transfer.size_bytes:
        return
    headers = {**transfer.headers, "Accept-Encoding": "identity"}
    if start:
        headers["Range"] = f"bytes={start}-"
    with get_session().stream(
        "GET", transfer.url, headers=headers, follow_redirects=True, timeout=transfer.timeout_s
    ) as response:
        if response.status_code == HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
            transfer.partial.unlink(missing_ok=True)
            raise CutShort("the server refused to resume; starting over")
        hf_raise_for_status(response)
        if start and not _continues(response, start):
            start = 0
        done = _write_body(response, transfer, start, report)
    if done < transfer.size_bytes:
        raise CutShort(f"the connection ended after {done} of {transfer.size_bytes} bytes")


def _continues(response: httpx.Response, start: int) -> bool:
    """Whether the body begins at byte ``start``; a server may ignore Range and send all (status 200)."""
    return response.status_code == HTTPStatus.PARTIAL_CONTENT and response.headers.get(
        "content-range", ""
    ).replace("=", " ").startswith(f"bytes {start}-")


def _write_body(response: httpx.Response, transfer: Transfer, start: int, report: ReportProgress) -> int:
    """Append the body (or overwrite, from byte 0); returns the number of bytes on disk."""
    done = start
    report(done, transfer.size_bytes)
    try:
        with open(transfer.partial, "ab" if start else "wb") as file:
            for block in response.iter_bytes():
                done += len(block)
                if done > transfer.size_bytes:
                    break
                file.write(block)
                report(done, transfer.size_bytes)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise Unavailable(
            f"disk full while writing {transfer.partial}",
            why=f"{done} of {transfer.size_bytes} bytes",
            todo="free some space or point HF_HOME elsewhere, then run parity fetch again",
        ) from error
    if done > transfer.size_bytes:
        transfer.partial.unlink()
        raise Unavailable(
            f"{transfer.partial.name} is longer than the {transfer.size_bytes} bytes of the manifest",
            todo="run parity lock to compare the manifest with the Hub",
            code=ExitCode.FAIL,
        )
    return done
