"""What one benchmark run measured: a record per request, and what the engine counted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from parity.checkers.service import ServiceEvent
from scheduler.records import ServiceLevel


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
    """Times of one request in seconds from the run's start; one time per arrival of tokens at the client.

    ``due_s`` is its arrival: when the schedule, or in a closed loop a free place, wanted it sent. Latencies
    count from there, however late ``sent_s`` was: what waits at the client waits too. Where a server sends
    several tokens in one chunk, they arrive together: ``token_times_s`` then repeats a time. ``error`` is set
    for a request that did not end as asked. ``turn`` counts within a conversation, from 0; ``rejected`` is an
    error that was an answer: the server turned it away. ``is_resent``: it was sent a second time, because the
    server had closed the kept-alive connection of the first.
    """

    index: int
    prompt_tokens: int
    number: int = 0  # in the order of sending
    turn: int = 0
    due_s: float = 0.0
    sent_s: float = 0.0
    token_times_s: tuple[float, ...] = ()
    end_s: float = 0.0
    error: str = ""
    rejected: bool = False
    client_id: str = "default"
    slo: ServiceLevel = ServiceLevel()
    is_resent: bool = False

    @property
    def is_complete(self) -> bool:
        return not self.error and bool(self.token_times_s)

    @property
    def output_tokens(self) -> int:
        return len(self.token_times_s)

    @property
    def ttft_s(self) -> float:
        """Time to first token from the arrival."""
        return self.token_times_s[0] - self.due_s

    @property
    def e2el_s(self) -> float:
        """End-to-end latency from the arrival."""
        return self.end_s - self.due_s

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first; undefined for an output of one token."""
        count = self.output_tokens
        return (self.token_times_s[-1] - self.token_times_s[0]) / (count - 1) if count > 1 else None

    @property
    def itl_s(self) -> list[float]:
        """Inter-token latencies."""
        times = self.token_times_s
        return [later - earlier for earlier, later in zip(times, times[1:], strict=False)]


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchRun:
    """One point of a benchmark. ``engine`` holds numbers that only an engine in this process can give, and
    ``claims`` what may be said of the run's fairness, a line for each pair of clients.
    """

    duration_s: float
    requests: tuple[RequestRecord, ...]
    engine: Mapping[str, float] = field(default_factory=dict)
    service: tuple[ServiceEvent, ...] = ()
    claims: Mapping[str, str] = field(default_factory=dict)

    @property
    def completed(self) -> list[RequestRecord]:
        return [record for record in self.requests if record.is_complete]
