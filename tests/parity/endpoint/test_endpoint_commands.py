"""Both doors to the black-box check, ``parity check --endpoint`` and ``parity check-endpoint``: defaults,
exit codes, duration, and a server that gives nothing but text.
"""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from parity.commands.check import command as check
from parity.commands.check_endpoint import command as check_endpoint
from parity.endpoint.check import make_prompts
from parity.errors import ExitCode
from tests.parity.endpoint.test_endpoint_check import forget_seed, swap_neighbours

SMALL = ("--prompts", "6", "--max-tokens", "6", "--rounds", "1", "--concurrency", "6", "--disconnects", "0")
NIGHTLY_S, NIGHTLY_CLIENTS = 60, 64  # what issue 8 asks for


class TextOnly(BaseHTTPRequestHandler):
    """A server that ignores what it does not know: no token ids, no log probabilities."""

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        choice = {"text": asked["prompt"][::-1], "finish_reason": "length"}
        data = json.dumps({"choices": [choice]}).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        """Nothing on stderr."""


@pytest.fixture
def text_only() -> Iterator[str]:
    """The address of a server that gives text alone."""
    with ThreadingHTTPServer(("127.0.0.1", 0), TextOnly) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield "http://{}:{}".format(*server.server_address)
        server.shutdown()
        thread.join()


def by_check(url: str, *more: str) -> ExitCode:
    """This door has no options for the size of the check."""
    return check.main(["--endpoint", url, "--model", "llama", *more], standalone_mode=False)


def by_check_endpoint(url: str, *more: str) -> ExitCode:
    return check_endpoint.main([url, "--model", "llama", *SMALL, *more], standalone_mode=False)


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """At most six prompts, whatever the defaults are."""
    monkeypatch.setattr("parity.endpoint.check.make_prompts", lambda count, seed: make_prompts(6, seed))


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("door", [by_check, by_check_endpoint])
def test_default_is_what_the_server_gives(door, url: str, text_only: str, tmp_path: Path):
    report = tmp_path / "report.json"
    for address, tier in ((url, "bits"), (text_only, "bytes")):
        assert door(address, "--json", str(report)) is ExitCode.PASS
        found = json.loads(report.read_text())
        assert (found["tier"], found["has_logprobs"]) == (tier, tier == "bits")
        assert found["compared"] == found["prompts"] and found["differ_under_load"] == 0


@pytest.mark.parametrize("door", [by_check, by_check_endpoint])
def test_tier_that_is_asked_for_is_never_lowered(door, text_only: str):
    assert door(text_only, "--tier", "bits") is ExitCode.UNKNOWN
    assert door(text_only, "--tier", "bytes") is ExitCode.PASS


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("door", [by_check, by_check_endpoint])
@pytest.mark.parametrize("fault", [swap_neighbours, forget_seed])
def test_server_that_mixes_up_is_exit_1(door, fault, start):
    assert door(start(change=fault)) is ExitCode.FAIL


def test_rounds_go_on_for_the_duration(text_only: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """By a clock that adds a second at every look: one round is asked for, and three seconds of them."""
    ticks = itertools.count()
    monkeypatch.setattr("parity.endpoint.check.monotonic", lambda: float(next(ticks)))
    report = tmp_path / "report.json"
    assert by_check_endpoint(text_only, "--duration", "3", "--json", str(report)) is ExitCode.PASS
    found = json.loads(report.read_text())
    assert found["load_rounds"] == 3 and found["answers"] == (2 + 3) * 6


@pytest.mark.nightly
def test_streaming_clients_for_a_minute_lose_nothing_and_get_their_solo_texts(url: str, tmp_path: Path):
    report, clients = tmp_path / "report.json", str(NIGHTLY_CLIENTS)
    load = ["--prompts", clients, "--concurrency", clients, "--stream", "--duration", str(NIGHTLY_S)]
    code = check_endpoint.main(
        [url, "--model", "llama", "--tier", "bits", *load, "--json", str(report)], standalone_mode=False
    )
    found = json.loads(report.read_text())
    assert code is ExitCode.PASS, found
    assert found["failed"] == 0 and found["compared"] == NIGHTLY_CLIENTS == found["most_in_flight"]
