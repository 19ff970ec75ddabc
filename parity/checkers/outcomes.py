"""The outcome of every offered request, and the rates and fractions that follow,
each with its own denominator.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from fractions import Fraction

from parity.errors import UsageError
from parity.history import Run, session_index
from parity.records import FaultKind
from scheduler.records import FinishReason, ServiceLevel


class End(Enum):
    """How a session ended; OPEN ones had not when the window closed."""

    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"
    REJECTED = "rejected"
    OPEN = "open"


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """One offered request with its factual clocks in ms: arrival, emissions, end.

    Nothing restarts a clock.
    """

    session: int
    client_id: str
    arrival_ms: float
    slo: ServiceLevel
    emissions_ms: tuple[float, ...]
    end: End
    ended_ms: float | None

    def __post_init__(self) -> None:
        clocks = (self.arrival_ms, *self.emissions_ms, *(() if self.ended_ms is None else (self.ended_ms,)))
        if list(clocks) != sorted(clocks):
            raise ValueError(f"session {self.session}: clocks run backwards: {clocks}")

    @property
    def ttft_ms(self) -> float | None:
        """First emission minus arrival: queueing is part of it."""
        return self.emissions_ms[0] - self.arrival_ms if self.emissions_ms else None

    @property
    def gaps_ms(self) -> tuple[float, ...]:
        """Times between emissions; none for a single output."""
        return tuple(b - a for a, b in zip(self.emissions_ms, self.emissions_ms[1:], strict=False))

    @property
    def is_valid(self) -> bool:
        """Completed, with every declared objective met."""
        limit = self.slo
        return (
            self.end is End.COMPLETED
            and (limit.ttft_ms is None or self.ttft_ms <= limit.ttft_ms)
            and (limit.tbt_ms is None or all(gap <= limit.tbt_ms for gap in self.gaps_ms))
        )


def served_sessions(run: Run, *, until_ms: float = float("inf")) -> list[Served]:
    """What was offered up to ``until_ms`` and what had become of it by then, in order of sessions.

    Raises ``UsageError`` for a run whose clock was made to jump: arrivals are counted in steps.
    """
    if any(fault.kind in (FaultKind.SLOW_STEP, FaultKind.CLOCK_JUMP) for fault in run.case.faults):
        raise UsageError(
            "a run with clock faults has no ledger", where="case", todo="drop slow_step and clock_jump"
        )
    emissions: dict[int, list[float]] = {}
    for traced in run.trace:
        for item in traced.result.chunks if traced.result is not None else ():
            if item.token is not None:
                index = session_index(item.request_id)
                emissions.setdefault(index, []).append(traced.result.finished_ms)
    made = []
    for index, session in enumerate(run.case.sessions):
        arrival_ms = session.arrival_step * run.case.ms_per_step
        if arrival_ms > until_ms:
            continue
        end, ended_ms = _end_of(run, index), arrival_ms
        if index in run.ended_at:  # a session that completed ended with its last token, any other in a step
            last = emissions.get(index, [arrival_ms])[-1]
            ended_ms = last if end is End.COMPLETED else max(last, run.ended_at[index] * run.case.ms_per_step)
        if ended_ms > until_ms:
            end = End.OPEN
        made.append(
            Served(
                session=index,
                client_id=session.client_id,
                arrival_ms=arrival_ms,
                slo=session.slo,
                emissions_ms=tuple(ms for ms in emissions.get(index, ()) if ms <= until_ms),
                end=end,
                ended_ms=None if end is End.OPEN else ended_ms,
            )
        )
    return made


def _end_of(run: Run, index: int) -> End:
    if index in run.refusals:
        return End.REJECTED
    completion = run.completions.get(index)
    if completion is None:
        return End.OPEN
    if completion.reason is FinishReason.CANCELLED:
        return End.CANCELLED
    if completion.reason is FinishReason.FAILED:
        return End.REJECTED if completion.error.startswith("rejected: ") else End.FAILED
    return End.COMPLETED


# Every published figure and what it is divided by.
DENOMINATORS = {
    "offered_attainment": "offered",
    "accepted_attainment": "accepted",
    "completed_attainment": "completed",
    "offered_rate": "window_s",
    "request_throughput": "window_s",
    "request_goodput": "window_s",
    "token_throughput": "window_s",
    "token_goodput": "window_s",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A published number: what was counted over what. A figure whose denominator is another's is refused."""

    name: str
    count: int
    over: Fraction
    denominator: str

    def __post_init__(self) -> None:
        if DENOMINATORS.get(self.name) != self.denominator:
            raise ValueError(
                f"{self.name} is counted over {DENOMINATORS.get(self.name)}, not {self.denominator}"
            )

    @property
    def value(self) -> Fraction | None:
        """None over nothing: undefined, not zero and not one."""
        return self.count / self.over if self.over else None


@dataclass(frozen=True, slots=True, kw_only=True)
class OutcomeLedger:
    """Counts of one offered cohort in one window of ``window_ms``; raises
    ValueError unless the partition closes.

    ``offered = valid + missed + rejected + open``; missed is late, failed and cancelled together.
    ``emitted_tokens`` include partial streams, ``valid_tokens`` only those of valid requests.
    """

    window_ms: float
    offered: int
    valid: int
    late: int
    failed: int
    cancelled: int
    rejected: int
    open: int
    emitted_tokens: int
    valid_tokens: int

    def __post_init__(self) -> None:
        if self.offered != self.valid + self.missed + self.rejected + self.open:
            raise ValueError(f"outcomes do not close: {self}")
        if not self.window_ms > 0 or self.valid_tokens > self.emitted_tokens:
            raise ValueError(f"window or tokens out of range: {self}")

    @property
    def missed(self) -> int:
        return self.late + self.failed + self.cancelled

    @property
    def completed(self) -> int:
        return self.valid + self.late

    @property
    def accepted(self) -> int:
        return self.offered - self.rejected

    def figure(self, name: str) -> Figure:
        """One published figure by name."""
        counts = {
            "offered_rate": self.offered,
            "request_throughput": self.completed,
            "request_goodput": self.valid,
            "token_throughput": self.emitted_tokens,
            "token_goodput": self.valid_tokens,
        }
        denominator = DENOMINATORS[name]
        over = (
            Fraction(self.window_ms) / 1000
            if denominator == "window_s"
            else Fraction(getattr(self, denominator))
        )
        return Figure(name=name, count=counts.get(name, self.valid), over=over, denominator=denominator)

    def figures(self) -> dict[str, Figure]:
        """All of them: the three attainments, and requests and tokens per second of the window."""
        return {name: self.figure(name) for name in DENOMINATORS}


def ledger_of(served: Iterable[Served], *, window_ms: float) -> OutcomeLedger:
    """Count a cohort."""
    cohort = list(served)

    def count(end: End) -> int:
        return sum(item.end is end for item in cohort)

    valid = [item for item in cohort if item.is_valid]
    return OutcomeLedger(
        window_ms=window_ms,
        offered=len(cohort),
        valid=len(valid),
        late=count(End.COMPLETED) - len(valid),
        failed=count(End.FAILED),
        cancelled=count(End.CANCELLED),
        rejected=count(End.REJECTED),
        open=count(End.OPEN),
        emitted_tokens=sum(len(item.emissions_ms) for item in cohort),
        valid_tokens=sum(len(item.emissions_ms) for item in valid),
    )
