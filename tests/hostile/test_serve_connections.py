"""Clients that send nothing, read nothing or ask what no template survives, beside one that behaves."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from parity.errors import ExitCode
from parity.serve.app import AppSettings
from parity.serve.connections import ConnectionBounds
from parity.serve.requests import BadRequest
from parity.serve.served_model import EngineSettings, ServedModel, open_served
from parity.serve.server import ServerSettings, serving
from parity.serve.templates import TemplateRenderer
from parity.store import REPOSITORY
from scheduler.loop import Scheduler

LONG_S = 60.0
ASK = {"prompt": "the river", "max_tokens": 4, "temperature": 0}
# A bound that a test does not want to reach.
NEVER_S = 3600.0


@pytest.fixture(scope="module")
def served() -> Iterator[ServedModel]:
    model = open_served(EngineSettings(model="llama", n_threads=1, max_num_seqs=8, pool_cells=8000))
    yield model
    model.close()


@contextmanager
def server(served: ServedModel, **bounds: Any) -> Iterator[str]:
    limits = ConnectionBounds(**{"head_timeout_s": NEVER_S, "write_timeout_s": NEVER_S, **bounds})
    settings = ServerSettings(port=0, connections=limits, drain_timeout_s=5)
    with serving(served, AppSettings(model_name="llama"), settings) as url:
        yield url


def connect(url: str) -> socket.socket:
    where = urlsplit(url)
    return socket.create_connection((where.hostname, where.port), timeout=LONG_S)


def served_answer(url: str) -> int:
    return httpx.post(f"{url}/v1/completions", json=ASK, timeout=LONG_S).status_code


def test_silent_connections_never_keep_anybody_out(served: ServedModel) -> None:
    with server(served, max_connections=20) as url, ExitStack() as stack:
        silent = []
        for number in range(60):
            silent.append(stack.enter_context(connect(url)))
            if number % 10 == 9:
                assert served_answer(url) == 200
        assert silent[0].recv(1) == b""  # it had been silent longest


def test_head_that_does_not_come_ends_its_connection(served: ServedModel) -> None:
    with server(served, head_timeout_s=0.1) as url:
        for begun in (b"", b"GET /health HT", b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n"):
            with connect(url) as client:
                client.sendall(begun)
                assert client.recv(100) == b""
        with connect(url) as client:  # the head of a second request is bounded too
            client.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
            assert client.recv(10_000).startswith(b"HTTP/1.1 200")
            client.sendall(b"GET /hea")
            assert client.recv(10_000) in (b"", b'{"status":"ok"}')
        assert served_answer(url) == 200


def stream_that_nobody_reads(url: str) -> socket.socket:
    """A connection whose client asked for a megabyte and reads none of it."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect((urlsplit(url).hostname, urlsplit(url).port))
    body = json.dumps(
        {**ASK, "max_tokens": 1500, "stream": True, "logprobs": 20, "ignore_eos": True}
    ).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n".encode()
    client.sendall(head + body)
    return client


def test_client_that_never_reads_is_cancelled(served: ServedModel) -> None:
    with server(served, write_timeout_s=0.3) as url, stream_that_nobody_reads(url):
        while "samebytes_requests_disconnected_total 1.0" not in (said := httpx.get(f"{url}/metrics").text):
            assert "samebytes_requests_finished_total 1.0" not in said, "it read everything"
        assert served_answer(url) == 200


def test_client_that_never_reads_does_not_keep_the_server_alive(served: ServedModel) -> None:
    with server(served) as url, stream_that_nobody_reads(url) as client:
        assert served_answer(url) == 200
        del client  # the server's drain limit ends it, while the client is still connected


def test_bad_policy_is_exit_64_before_a_port_is_opened() -> None:
    for options in (("--policy", "nope"), ("--policy-option", "nope=1")):
        done = subprocess.run(
            [sys.executable, "-m", "parity.cli", "serve", "llama", "--port", "0", *options],
            cwd=REPOSITORY,
            capture_output=True,
            text=True,
            check=False,
            timeout=LONG_S,
        )
        assert done.returncode == ExitCode.USAGE
        assert done.stdout == "" and done.stderr.count("\n") == 1


def test_policy_that_raises_costs_its_requests_and_not_the_server(
    served: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin, calls = Scheduler.begin, []

    def raises_once(self: Any, now_ms: float) -> Any:
        calls.append(now_ms)
        if len(calls) == 1:
            raise ZeroDivisionError("planted")
        return begin(self, now_ms)

    monkeypatch.setattr(Scheduler, "begin", raises_once)
    with server(served) as url:
        first = httpx.post(f"{url}/v1/completions", json=ASK, timeout=LONG_S)
        assert first.status_code == 500 and "planted" in first.json()["error"]["message"]
        assert served_answer(url) == 200
        assert httpx.get(f"{url}/health").status_code == 200


@pytest.fixture
def renderer() -> Iterator[Callable[[str], str]]:
    with ExitStack() as stack:

        def render(template: str, content: str = "x") -> str:
            made = TemplateRenderer(template, timeout_s=2.0)
            stack.callback(made.close)
            return made.render([{"role": "user", "content": content}], {"bos_token": "", "eos_token": ""})

        yield render


@pytest.mark.parametrize(
    "template",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{{ 'x' * 99999999999 }}",
        "{{ messages[0].content.__class__.__mro__ }}{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ nobody.knows.this }}",
        "{{ 1 / 0 }}",
        "{% if %}",
        "{{ raise_exception('no system role') }}",
        "{{ messages[7].content + 1 }}",
    ],
)
def test_template_that_goes_wrong_is_a_refused_request(template: str, renderer: Callable[[str], str]) -> None:
    with pytest.raises(BadRequest, match="chat template"):
        renderer(template)


def test_template_of_a_model_renders_as_it_did(renderer: Callable[[str], str]) -> None:
    assert renderer("{{ messages[0].role }}: {{ messages[0].content }}", "h\u00e9") == "user: h\u00e9"
