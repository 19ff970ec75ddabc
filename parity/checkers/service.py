"""Service by client: what was completed, the gap while both were backlogged, who
starved; with the SLO beside it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from parity.checkers.outcomes import OutcomeLedger, Served, ledger_of, served_sessions
from parity.history import Run, session_index
from scheduler.flight import Flight
from scheduler.policy.plan import NOT_READY
from scheduler.records import IntentKind, IterationResult, Phase


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceEvent:
    """Completed work at one moment: ``input_rows`` prefilled and ``outputs`` emitted.

    Rebuilt rows are neither.
    """

    at_ms: float
    session: int
    client_id: str
    input_rows: int
    outputs: int


@dataclass(frozen=True, slots=True)
class ServiceLedger:
    """Weighted service ``w_p * input rows + w_q * outputs`` from completed results alone.

    ``blocked`` has the intervals (start, stop) in ms in which a session, by index, was not ready: it waited
    for a foreign owner, not for the scheduler.
    """

    events: tuple[ServiceEvent, ...]
    served: tuple[Served, ...]
    input_weight: int
    output_weight: int
    blocked: Mapping[int, tuple[tuple[float, float], ...]] = field(default_factory=dict)

    def cost(self, event: ServiceEvent) -> int:
        return self.input_weight * event.input_rows + self.output_weight * event.outputs

    def totals(self) -> dict[str, int]:
        """Service by client; clients that got nothing are listed."""
        totals = {item.client_id: 0 for item in self.served}
        for event in self.events:
            totals[event.client_id] += self.cost(event)
        return totals

    def backlog(self, client_id: str) -> list[tuple[float, float]]:
        """Intervals (start, stop) in ms in which the client had a live request, merged and in order."""
        return merged_spans(
            (item.arrival_ms, float("inf") if item.ended_ms is None else item.ended_ms)
            for item in self.served
            if item.client_id == client_id
        )

    def eligible(self, client_id: str) -> list[tuple[float, float]]:
        """Intervals (start, stop) in ms in which the client had a live request that was ready."""
        spans: list[tuple[float, float]] = []
        for item in self.served:
            if item.client_id == client_id:
                start, stop = item.arrival_ms, float("inf") if item.ended_ms is None else item.ended_ms
                for low, high in self.blocked.get(item.session, ()):
                    spans.append((start, min(low, stop)))
                    start = max(start, high)
                spans.append((start, stop))
        return merged_spans((start, stop) for start, stop in spans if start < stop)

    def joint_backlog(self, first: str, second: str) -> list[tuple[float, float]]:
        """Intervals in which both clients were continuously backlogged."""
        pairs = ((max(a, c), min(b, d)) for a, b in self.backlog(first) for c, d in self.backlog(second))
        return [(start, stop) for start, stop in pairs if start < stop]

    def gap(self, first: str, second: str) -> int:
        """Largest ``|W_first - W_second|`` over any part of an interval in which both were backlogged."""
        return max(
            (
                self.gap_between(first, second, start_ms=start, stop_ms=stop)
                for start, stop in self.joint_backlog(first, second)
            ),
            default=0,
        )

    def gap_between(self, first: str, second: str, *, start_ms: float, stop_ms: float) -> int:
        """Largest ``|W_first - W_second|`` over any part of ``(start_ms, stop_ms]``."""
        difference = low = high = 0
        steps: dict[float, int] = {}
        for event in self.events:
            if start_ms < event.at_ms <= stop_ms and event.client_id in (first, second):
                signed = self.cost(event) if event.client_id == first else -self.cost(event)
                steps[event.at_ms] = steps.get(event.at_ms, 0) + signed
        for _, amount in sorted(steps.items()):
            difference += amount
            low, high = min(low, difference), max(high, difference)
        return high - low


def merged_spans(spans: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Intervals (start, stop) in order, those that touch as one; empty ones are dropped."""
    merged: list[tuple[float, float]] = []
    for start, stop in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        elif start < stop:
            merged.append((start, stop))
    return merged


def service_events(flight: Flight, result: IterationResult, *, at_ms: float) -> Iterator[ServiceEvent]:
    """Completed service of one step."""
    for item in result.chunks:
        view = flight.views[item.request_id]
        prefilled = item.after - item.before if view.phase_at(item.before) is Phase.PREFILL else 0
        outputs = int(item.token is not None)
        if prefilled or outputs:
            yield ServiceEvent(
                at_ms=at_ms,
                session=session_index(item.request_id),
                client_id=view.request.client_id,
                input_rows=prefilled,
                outputs=outputs,
            )


def service_of(
    run: Run, *, input_weight: int = 1, output_weight: int = 2, until_ms: float = float("inf")
) -> ServiceLedger:
    """Read the completed service off a run's results; planned and failed work never appears."""
    events: list[ServiceEvent] = []
    for traced in run.trace:
        result = traced.result
        if result is not None and result.finished_ms <= until_ms:
            events += service_events(traced.flight, result, at_ms=result.finished_ms)
    return ServiceLedger(
        tuple(events),
        tuple(served_sessions(run, until_ms=until_ms)),
        input_weight,
        output_weight,
        _blocked(run),
    )


def _blocked(run: Run) -> dict[int, tuple[tuple[float, float], ...]]:
    """When each session was passed over because it was not ready, in order."""
    spans: dict[int, list[tuple[float, float]]] = {}
    for traced in run.trace:
        start = traced.flight.started_ms
        for intent in traced.flight.plan.intents:
            if intent.kind is IntentKind.DEFER and intent.reason.startswith(NOT_READY):
                index = session_index(intent.request_id)
                spans.setdefault(index, []).append((start, start + run.case.ms_per_step))
    return {index: tuple(merged_spans(found)) for index, found in spans.items()}


def starved_clients(ledger: ServiceLedger, *, start_ms: float, stop_ms: float) -> list[str]:
    """Clients that could have been served all the time from ``start_ms`` to ``stop_ms``, and completed
    nothing in between. How their requests ended later, or that they were cancelled then, changes nothing.
    """
    starved = []
    for client_id in dict.fromkeys(item.client_id for item in ledger.served):
        eligible = any(start <= start_ms and stop_ms <= stop for start, stop in ledger.eligible(client_id))
        served = any(
            event.client_id == client_id and start_ms < event.at_ms <= stop_ms for event in ledger.events
        )
        if eligible and not served:
            starved.append(client_id)
    return starved


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientReport:
    """Fairness and SLO of one client together: either alone hides what the other shows."""

    client_id: str
    service: int
    largest_gap: int
    starved: bool
    outcomes: OutcomeLedger


def client_reports(
    run: Run, *, window_ms: float, input_weight: int = 1, output_weight: int = 2
) -> Mapping[str, ClientReport]:
    """One report per client over ``[0, window_ms]``."""
    ledger = service_of(run, input_weight=input_weight, output_weight=output_weight, until_ms=window_ms)
    totals = ledger.totals()
    starved = starved_clients(ledger, start_ms=0.0, stop_ms=window_ms)
    return {
        client_id: ClientReport(
            client_id=client_id,
            service=totals[client_id],
            starved=client_id in starved,
            largest_gap=max(
                (ledger.gap(client_id, other) for other in totals if other != client_id), default=0
            ),
            outcomes=ledger_of(
                (item for item in ledger.served if item.client_id == client_id), window_ms=window_ms
            ),
        )
        for client_id in totals
    }
