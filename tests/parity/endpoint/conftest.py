"""Checks of stand-in servers, quick enough for the default suite."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from parity.endpoint.check import EndpointOptions, check_and_calibrate
from parity.endpoint.judge import Judgement
from parity.endpoint.noise import Baseline
from tests.parity.endpoint.stand_in import StandIn, running
from tests.parity.serve.conftest import client, served, start, url

__all__ = ["client", "served", "start", "url"]  # the servers of ``serve``

SMALL = {
    "prompts": 14,
    "max_tokens": 8,
    "rounds": 2,
    "concurrency": 8,
    "shrink_runs": 0,
    "disconnects": 2,
}


class Rounded(StandIn):
    """The right server with kernels that round by the width of a batch."""

    noise = 0.01


def check(server: type[StandIn] | StandIn, **options: Any) -> tuple[Judgement, dict[str, Any], Baseline]:
    """A check of a stand-in."""
    with running(server() if isinstance(server, type) else server) as url:
        return check_and_calibrate(url, "toy", EndpointOptions(**{**SMALL, **options}))


@pytest.fixture(scope="package")
def baseline() -> Baseline:
    """Noise of the server that rounds, from two runs with other questions."""
    runs = [check(Rounded, seed=seed)[2] for seed in (100, 101)]
    return runs[0].merged(runs[1])


Checker = Callable[..., tuple[Judgement, dict[str, Any], Baseline]]
