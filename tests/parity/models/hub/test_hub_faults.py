"""Cut connections, rate limits and outages: bounded patience, resumed at the byte."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from huggingface_hub.utils import httpx
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from parity.errors import ExitCode
from parity.models.hub_file import HubSettings
from parity.models.transfer import RetryPolicy, asked_wait_s
from tests.parity.models.hub.desk import FILE, FIRST, REPO, Desk, leftovers, pinned, refused, weights
from tests.parity.models.hub.server import Fault, HubServer, Repository


@given(cuts=st.lists(st.integers(1, 200_000), min_size=1, max_size=4), seed=st.integers(0, 2**32))
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_fetch_resumes_after_a_cut_at_any_byte(
    tmp_path_factory: pytest.TempPathFactory, cuts: list[int], seed: int
):
    body = weights(seed)
    with HubServer({REPO: Repository(commits={FIRST: {FILE: body}})}) as hub:
        desk = Desk(
            hub=hub, settings=HubSettings(endpoint=hub.endpoint, cache=tmp_path_factory.mktemp("cache"))
        )
        hub.faults.extend(Fault(cut_after_bytes=count) for count in cuts)
        assert desk.fetch(pinned(body)).path.read_bytes() == body
        transfers = hub.requests("storage", "GET")
    positions = [
        0 if seen.range is None else int(seen.range.removeprefix("bytes=").removesuffix("-"))
        for seen in transfers
    ]
    # Every request starts exactly where the bytes of the last one ended: none twice, none lost.
    expected = [0]
    for count in cuts:
        if expected[-1] + count >= len(body):
            break
        expected.append(expected[-1] + count)
    assert positions == expected
    assert sum(seen.sent for seen in transfers) == len(body)
    assert len(desk.clock.slept_s) == len(expected) - 1


def test_fetch_resumes_what_a_killed_process_left(desk: Desk, body: bytes):
    cut = random.Random(4).randrange(1, len(body))
    desk.hub.faults.append(Fault(cut_after_bytes=cut))
    desk.hub.faults.append(Fault(status=500, times=100))
    refused(desk, pinned(body), ExitCode.UNKNOWN, "500")
    assert [path.stat().st_size for path in leftovers(desk)] == [cut]
    desk.hub.faults.clear()
    assert desk.fetch(pinned(body)).path.read_bytes() == body
    assert desk.hub.requests("storage", "GET")[-1].range == f"bytes={cut}-"
    assert desk.hub.requests("storage", "GET")[-1].sent == len(body) - cut


def test_fetch_starts_over_when_the_server_ignores_range(desk: Desk, body: bytes):
    desk.hub.faults.extend([Fault(cut_after_bytes=1000), Fault(ignores_range=True)])
    assert desk.fetch(pinned(body)).path.read_bytes() == body


def test_fetch_starts_over_when_the_server_refuses_the_range(desk: Desk, body: bytes):
    desk.hub.faults.extend([Fault(cut_after_bytes=1000), Fault(status=416)])
    assert desk.fetch(pinned(body)).path.read_bytes() == body
    assert desk.hub.requests("storage", "GET")[-1].range is None


def test_fetch_stays_patient_as_long_as_bytes_arrive(desk: Desk, body: bytes):
    """Five failures in a row are the end; twelve with new bytes in each are a slow line."""
    desk.hub.faults.append(Fault(cut_after_bytes=20_000, times=12))
    assert desk.fetch(pinned(body)).path.read_bytes() == body
    assert desk.clock.slept_s == [1.0] * 12


def test_fetch_goes_on_after_an_answer_that_ends_early_in_good_order(desk: Desk, body: bytes):
    desk.hub.faults.append(Fault(body=body[:1000]))
    assert desk.fetch(pinned(body)).path.read_bytes() == body
    assert desk.hub.requests("storage", "GET")[-1].range == "bytes=1000-"


def test_fetch_gives_up_after_five_attempts_without_a_byte(desk: Desk, body: bytes):
    desk.hub.faults.append(Fault(cut_after_bytes=0, times=100))
    refused(desk, pinned(body), ExitCode.UNKNOWN, "parity fetch again")
    assert len(desk.hub.requests("storage", "GET")) == 5
    assert desk.clock.slept_s == [1.0, 2.0, 4.0, 8.0]


@pytest.mark.parametrize("host, method", [("hub", "HEAD"), ("hub", "GET"), ("storage", "GET")])
def test_fetch_waits_as_long_as_a_429_asks(desk: Desk, body: bytes, host: str, method: str):
    desk.hub.faults.append(
        Fault(host=host, method=method, status=429, headers={"Retry-After": "17"}, times=2)
    )
    assert desk.fetch(pinned(body)).path.read_bytes() == body
    assert desk.clock.slept_s == [17.0, 17.0]
    assert desk.said == ["HTTP 429; trying again in 17 s"] * 2


def test_fetch_waits_for_the_rate_limit_window_when_no_retry_after_is_given(desk: Desk, body: bytes):
    desk.hub.faults.append(
        Fault(host="hub", method="HEAD", status=429, headers={"RateLimit": '"api";r=0;t=55'})
    )
    assert desk.fetch(pinned(body)).path.read_bytes() == body
    assert desk.clock.slept_s == [55.0]


@pytest.mark.parametrize(
    "headers, seconds",
    [
        ({"retry-after": "120"}, 120.0),
        ({"retry-after": "Wed, 21 Oct 2026 07:30:00 GMT", "date": "Wed, 21 Oct 2026 07:28:00 GMT"}, 120.0),
        ({"retry-after": "Wed, 21 Oct 2026 07:20:00 GMT", "date": "Wed, 21 Oct 2026 07:28:00 GMT"}, 0.0),
        ({"retry-after": "soon"}, None),
        ({"retry-after": "Wed, 21 Oct 2026 07:30:00 GMT"}, None),
        ({"ratelimit": '"api";r=3;t=55'}, None),
        ({}, None),
    ],
)
def test_asked_wait_is_read_from_the_answer_alone(headers: dict[str, str], seconds: float | None):
    assert asked_wait_s(httpx.Response(429, headers=headers)) == seconds


def test_fetch_does_not_wait_a_day_for_a_429(desk: Desk, body: bytes):
    desk.hub.faults.append(
        Fault(host="hub", method="HEAD", status=429, headers={"Retry-After": "86400"}, times=9)
    )
    refused(desk, pinned(body), ExitCode.UNKNOWN, "429", "86400")
    assert desk.clock.slept_s == []


@pytest.mark.parametrize("status", [500, 502, 503, 504, 408])
def test_fetch_outlasts_a_short_outage(desk: Desk, body: bytes, status: int):
    desk.hub.faults.append(Fault(host="hub", method="HEAD", status=status, times=2))
    assert desk.fetch(pinned(body)).path.read_bytes() == body
    assert desk.clock.slept_s == [1.0, 2.0]


def test_fetch_from_a_dead_endpoint_is_one_line_after_bounded_patience(desk: Desk, body: bytes):
    with HubServer({}) as gone:
        endpoint = gone.endpoint
    refused(
        desk,
        pinned(body),
        ExitCode.UNKNOWN,
        endpoint,
        "HF_ENDPOINT",
        settings=replace(desk.settings, endpoint=endpoint),
    )
    assert desk.clock.slept_s == [1.0, 2.0, 4.0, 8.0]


def test_default_patience_is_bounded():
    policy = RetryPolicy()
    assert policy.attempts <= 100 and policy.longest_wait_s < 600
