"""Cut connections, rate limits and outages: huggingface_hub's patience is bounded, its end is one line."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from parity.errors import ExitCode
from parity.models.hub import HubSettings
from tests.parity.models.hub.desk import FILE, FIRST, REPO, Desk, leftovers, pinned, refused, weights
from tests.parity.models.hub.server import Fault, HubServer, Repository


@given(cuts=st.lists(st.integers(1, 200_000), min_size=1, max_size=4), seed=st.integers(0, 2**32))
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_fetch_survives_cuts_at_any_byte(
    tmp_path_factory: pytest.TempPathFactory, cuts: list[int], seed: int
) -> None:
    body = weights(seed)
    with HubServer({REPO: Repository(commits={FIRST: {FILE: body}})}) as hub:
        desk = Desk(
            hub=hub, settings=HubSettings(endpoint=hub.endpoint, cache=tmp_path_factory.mktemp("cache"))
        )
        hub.faults.extend(Fault(cut_after_bytes=count) for count in cuts)
        assert desk.fetch(pinned(body)).path.read_bytes() == body
    assert leftovers(desk) == []


@pytest.mark.parametrize("fault", [Fault(ignores_range=True), Fault(status=429)])
def test_fetch_is_whole_when_the_server_does_not_resume(desk: Desk, body: bytes, fault: Fault) -> None:
    desk.hub.faults.extend([Fault(cut_after_bytes=1000), replace(fault)])
    assert desk.fetch(pinned(body)).path.read_bytes() == body


@pytest.mark.parametrize("short", [0, 1000])
def test_an_answer_that_ends_early_in_good_order_is_no_file(desk: Desk, body: bytes, short: int) -> None:
    desk.hub.faults.append(Fault(body=body[:short]))
    refused(desk, pinned(body), ExitCode.UNKNOWN, "not served whole", "parity fetch again")
    assert leftovers(desk) == []
    assert desk.fetch(pinned(body)).path.read_bytes() == body


@pytest.mark.parametrize("fault", [Fault(cut_after_bytes=0, times=100), Fault(status=500, times=100)])
def test_fetch_gives_up_on_a_storage_host_that_brings_no_byte(
    desk: Desk, body: bytes, fault: Fault, slept_s: list[float]
) -> None:
    desk.hub.faults.append(replace(fault))
    refused(desk, pinned(body), ExitCode.UNKNOWN, REPO, "again")
    assert len(desk.hub.requests("storage", "GET")) < 10 and sum(slept_s) < 60
    assert leftovers(desk) == []


@pytest.mark.parametrize("host, method", [("hub", "HEAD"), ("storage", "GET")])
def test_fetch_waits_as_long_as_a_429_asks(
    desk: Desk, body: bytes, host: str, method: str, slept_s: list[float]
) -> None:
    desk.hub.faults.append(
        Fault(host=host, method=method, status=429, headers={"Retry-After": "17"}, times=2)
    )
    assert desk.fetch(pinned(body)).path.read_bytes() == body
    assert len(slept_s) == 2 and all(17 <= wait <= 18 for wait in slept_s)


@pytest.mark.parametrize("status", [500, 502, 503, 504])
def test_fetch_outlasts_a_short_outage(desk: Desk, body: bytes, status: int) -> None:
    desk.hub.faults.append(Fault(host="hub", method="HEAD", status=status, times=2))
    assert desk.fetch(pinned(body)).path.read_bytes() == body


def test_fetch_ends_when_the_hub_stays_down(desk: Desk, body: bytes, slept_s: list[float]) -> None:
    desk.hub.faults.append(Fault(host="hub", method="HEAD", status=503, times=1000))
    refused(desk, pinned(body), ExitCode.UNKNOWN, "503", "try again later")
    assert len(desk.hub.seen) < 20 and sum(slept_s) < 120


def test_fetch_from_a_dead_endpoint_is_one_line_after_bounded_patience(
    desk: Desk, body: bytes, slept_s: list[float]
) -> None:
    with HubServer({}) as gone:
        settings = replace(desk.settings, endpoint=gone.endpoint)
    refused(desk, pinned(body), ExitCode.UNKNOWN, settings.endpoint, "HF_ENDPOINT", settings=settings)
    assert sum(slept_s) < 120
