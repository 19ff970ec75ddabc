"""What a bench run says beyond latencies: how every offered request ended, who got the service, what may be
claimed of it, and the rate up to which objectives are met.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

from parity.bench.bench_run import BenchRun, RequestRecord
from parity.checkers.claims import Observed, judge_vtc_bound
from parity.checkers.outcomes import End, Served, ledger_of
from parity.checkers.service import ServiceEvent, ServiceLedger, starved_clients
from scheduler.policy.goodput import Goodput, sweep_goodput

INPUT_WEIGHT, OUTPUT_WEIGHT = 1, 2  # of the service that is reported; a policy may weigh otherwise


def served_requests(run: BenchRun) -> tuple[Served, ...]:
    """Every offered request with its clocks in ms from the run's start and its own objectives."""
    return tuple(
        Served(
            session=record.number,
            client_id=record.client_id,
            arrival_ms=record.due_s * 1e3,
            slo=record.slo,
            emissions_ms=tuple(at * 1e3 for at in record.token_times_s),
            end=_end_of(record),
            ended_ms=max(record.end_s, *record.token_times_s, record.due_s) * 1e3,
        )
        for record in sorted(run.requests, key=lambda record: record.number)
    )


def _end_of(record: RequestRecord) -> End:
    if record.rejected:
        return End.REJECTED
    return End.COMPLETED if record.is_complete else End.FAILED


def service_ledger(run: BenchRun) -> ServiceLedger:
    """Service by client. Where no engine of ours reported it, a prompt counts with its first token."""
    events = run.service or tuple(
        ServiceEvent(
            at_ms=at * 1e3,
            session=record.number,
            client_id=record.client_id,
            input_rows=0 if position else record.prompt_tokens,
            outputs=1,
        )
        for record in run.requests
        for position, at in enumerate(record.token_times_s)
    )
    return ServiceLedger(events, served_requests(run), INPUT_WEIGHT, OUTPUT_WEIGHT)


def outcome_columns(run: BenchRun) -> dict[str, Any]:
    """Columns of a row: the closed partition of what was offered, each client's part of it, the claims."""
    window_ms = max(run.duration_s * 1e3, 1e-9)
    ledger = service_ledger(run)
    whole = ledger_of(ledger.served, window_ms=window_ms)
    starved = starved_clients(ledger, start_ms=0.0, stop_ms=window_ms)
    attainment = whole.figure("offered_attainment").value
    clients = []
    for client_id, service in ledger.totals().items():
        part = ledger_of((s for s in ledger.served if s.client_id == client_id), window_ms=window_ms)
        clients.append(
            {
                "client": client_id,
                "service": service,
                "largest_gap": max(
                    (ledger.gap(client_id, other) for other in ledger.totals() if other != client_id),
                    default=0,
                ),
                "starved": client_id in starved,
                **{name: getattr(part, name) for name in ("offered", "valid", "missed", "rejected", "open")},
            }
        )
    return {
        "offered": whole.offered,
        "valid": whole.valid,
        "late": whole.late,
        "broken": whole.failed,
        "rejected": whole.rejected,
        "open": whole.open,
        "offered_attainment": None if attainment is None else float(attainment),
        "clients": clients,
        "claims": dict(run.claims),
    }


def outcome_lines(row: Mapping[str, Any]) -> list[str]:
    """The columns as lines to read."""
    lines = [
        "outcomes: offered {offered} = valid {valid} + late {late} + failed {broken} "
        "+ rejected {rejected} + open {open}".format(**row)
    ]
    if len(row["clients"]) > 1:
        lines += [
            "client {client}: service {service}, largest gap {largest_gap}, offered {offered} = "
            "valid {valid} + missed {missed} + rejected {rejected} + open {open}".format(**client)
            + (", starved" if client["starved"] else "")
            for client in row["clients"]
        ]
    return [*lines, *(f"claim, {name}: {said}" for name, said in row["claims"].items())]


def claims_of(observed: Observed, *, input_weight: int, output_weight: int) -> dict[str, str]:
    """VTC's bound for every pair of clients over the longest time in which both had requests waiting."""
    clients = dict.fromkeys(item.client_id for item in observed.ledger.served)
    said = {}
    for first, second in combinations(clients, 2):
        start_ms, stop_ms = observed.longest_joint_wait(first, second)
        claim = judge_vtc_bound(
            observed,
            first,
            second,
            start_ms=start_ms,
            stop_ms=stop_ms,
            max_input_tokens=max(prompt for prompt, _ in observed.lengths),
            max_running_tokens=observed.most_running_tokens(),
            input_weight=input_weight,
            output_weight=output_weight,
        )
        said[f"VTC bound for {first} and {second}"] = claim.line
    return said


def goodput_by_rate(rows: Sequence[Mapping[str, Any]], *, alpha: float) -> dict[str, Goodput]:
    """``dist_goodput`` of every workload that was measured at several rates: the largest one up to which
    offered attainment is at least ``alpha``.
    """
    points: dict[str, dict[float, float]] = {}
    for row in rows:
        if row.get("request_rate") is not None and row.get("offered_attainment") is not None:
            points.setdefault(f"{row['mix']} {row['prefix']}", {})[row["request_rate"]] = row[
                "offered_attainment"
            ]
    return {
        name: sweep_goodput(found.__getitem__, sorted(found), alpha=alpha)
        for name, found in points.items()
        if len(found) > 1
    }
