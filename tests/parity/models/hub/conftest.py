"""A Hub on loopback with one repository, a guard against every other host, and a clock that only counts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from huggingface_hub import constants, file_download, set_client_factory
from huggingface_hub.utils import _http, httpx
from huggingface_hub.utils._http import default_client_factory

from parity.models.hub import HubSettings
from tests.parity.models.hub.desk import FILE, FIRST, REPO, Desk, weights
from tests.parity.models.hub.server import HubServer, Repository


@pytest.fixture(autouse=True)
def loopback_only(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Any request of huggingface_hub to another machine is an error, not a wait."""

    def refuse(request: httpx.Request) -> None:
        assert request.url.host == "127.0.0.1", f"a test asked for {request.url}"

    def client() -> httpx.Client:
        made = default_client_factory()
        made.event_hooks = {**made.event_hooks, "request": [refuse, *made.event_hooks["request"]]}
        return made

    monkeypatch.setattr(constants, "HF_HUB_DISABLE_TELEMETRY", True)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    set_client_factory(client)
    yield
    set_client_factory(default_client_factory)


@pytest.fixture(autouse=True)
def slept_s(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """huggingface_hub's waits in seconds: counted, never waited."""
    waits: list[float] = []
    for module in (_http, file_download):
        monkeypatch.setattr(module, "time", SimpleNamespace(sleep=waits.append))
    return waits


@pytest.fixture
def body() -> bytes:
    return weights(1)


@pytest.fixture
def hub(body: bytes) -> Iterator[HubServer]:
    with HubServer(
        {
            REPO: Repository(
                commits={FIRST: {FILE: body, "README.md": b"hello"}}, small=frozenset({"README.md"})
            )
        }
    ) as server:
        yield server


@pytest.fixture
def desk(hub: HubServer, tmp_path: Path) -> Desk:
    return Desk(hub=hub, settings=HubSettings(endpoint=hub.endpoint, cache=tmp_path / "cache"))
