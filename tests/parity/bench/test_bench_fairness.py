"""Outcomes, service by client, claims and goodput of a bench run, by hand."""

from __future__ import annotations

from typing import Any

import pytest

from parity.bench.bench_run import BenchRun, RequestRecord
from parity.bench.fairness import goodput_by_rate, outcome_columns, outcome_lines, served_requests
from parity.bench.over_http import policy_fields
from parity.bench.sweep import csv_text
from parity.bench.workload import Job, Lengths, Workload
from parity.checkers.outcomes import End
from scheduler.records import ServiceLevel


def record(number: int, client: str, *times_s: float, **fields: Any) -> RequestRecord:
    values = {"due_s": 0.0, "end_s": (times_s or (0.0,))[-1], "slo": ServiceLevel(ttft_ms=200.0), **fields}
    return RequestRecord(
        index=number,
        number=number,
        prompt_tokens=10,
        token_times_s=times_s,
        client_id=client,
        **values,
    )


RUN = BenchRun(
    duration_s=2.0,
    requests=(
        record(0, "a", 0.1, 0.2),
        record(1, "a", 0.5),
        record(3, "b", error="HTTP 503: full", rejected=True),
        record(2, "b", 0.2, error="length is not as asked"),
    ),
)


def test_every_offered_request_ends_in_one_way() -> None:
    assert [(s.session, s.end, s.is_valid) for s in served_requests(RUN)] == [
        (0, End.COMPLETED, True),
        (1, End.COMPLETED, False),
        (2, End.FAILED, False),
        (3, End.REJECTED, False),
    ]
    row = outcome_columns(RUN)
    assert (row["offered"], row["valid"], row["late"], row["broken"], row["rejected"], row["open"]) == (
        4,
        1,
        1,
        1,
        1,
        0,
    )
    assert row["offered_attainment"] == 0.25


def test_outcomes_count_from_the_arrival_and_not_from_a_late_send() -> None:
    """Due at 1 s, sent at 1.5 s, answered at 1.6 s: 600 ms, and the objective is 200."""
    run = BenchRun(duration_s=2.0, requests=(record(0, "a", 1.6, due_s=1.0, sent_s=1.5),))
    (served,) = served_requests(run)
    assert (served.arrival_ms, served.is_valid) == (1000.0, False)
    assert served.ttft_ms == pytest.approx(600.0)


def test_service_by_client_counts_prompts_with_their_first_token_and_outputs_twice() -> None:
    clients = {item["client"]: item for item in outcome_columns(RUN)["clients"]}
    assert clients["a"]["service"] == 10 + 2 * 2 + 10 + 2
    assert clients["b"]["service"] == 10 + 2
    # Both are backlogged until 0.2 s: a gets 12 and 2 more, b 12.
    assert clients["a"]["largest_gap"] == 12
    assert (clients["b"]["offered"], clients["b"]["missed"], clients["b"]["rejected"]) == (2, 1, 1)
    assert outcome_lines({**outcome_columns(RUN), "claims": {"bound": "not claimed"}}) == [
        "outcomes: offered 4 = valid 1 + late 1 + failed 1 + rejected 1 + open 0",
        "client a: service 26, largest gap 12, offered 2 = valid 1 + missed 1 + rejected 0 + open 0",
        "client b: service 12, largest gap 12, offered 2 = valid 0 + missed 1 + rejected 1 + open 0",
        "claim, bound: not claimed",
    ]


def test_a_csv_has_single_values_only() -> None:
    assert csv_text([{"mix": "m", **outcome_columns(RUN)}]).splitlines()[0] == (
        "mix,offered,valid,late,broken,rejected,open,offered_attainment"
    )


def row(rate: float, attainment: float, mix: str = "m") -> dict:
    return {"mix": mix, "prefix": "unique", "request_rate": rate, "offered_attainment": attainment}


def test_goodput_is_the_rate_before_the_first_that_fails_by_workload() -> None:
    rows = [row(4.0, 0.95), row(1.0, 1.0), row(2.0, 0.9), row(8.0, 0.5), row(3.0, 1.0, "other")]
    assert {name: found.rate for name, found in goodput_by_rate(rows, alpha=0.9).items()} == {"m unique": 4.0}
    assert goodput_by_rate(rows, alpha=0.91)["m unique"].rate == 1.0  # 2 fails, whatever comes after it


def test_clients_and_priorities_take_turns_and_stay_with_their_conversation() -> None:
    lengths = Lengths(input_len=4, output_len=2)
    slo = ServiceLevel(ttft_ms=5.0)
    jobs = Workload(name="w", lengths=lengths, num_prompts=5, clients=2, priorities=3, slo=slo).jobs()
    assert [(job.client_id, job.priority) for job in jobs] == [
        ("client-0", 0),
        ("client-1", 1),
        ("client-0", 2),
        ("client-1", 0),
        ("client-0", 1),
    ]
    first = Job(index=0, prompt=(1,), max_tokens=1, later_turns=((2,),), client_id="c", priority=2, slo=slo)
    following = first.following([9])
    assert (following.prompt, following.client_id, following.priority, following.slo) == (
        (1, 9, 2),
        "c",
        2,
        slo,
    )


@pytest.mark.parametrize(
    ("fields", "sent"),
    [
        ({}, {}),
        ({"client_id": "c", "priority": 2}, {"user": "c", "priority": 2}),
        ({"slo": ServiceLevel(tbt_ms=5.0)}, {"slo": {"tbt_ms": 5.0}}),
    ],
)
def test_a_server_is_told_what_is_not_the_default(
    fields: dict[str, int | ServiceLevel | str], sent: dict[str, dict[str, float] | int | str]
) -> None:
    assert policy_fields(Job(index=0, prompt=(1,), max_tokens=1, **fields)) == sent
