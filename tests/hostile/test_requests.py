"""Hostile requests over HTTP: a status below 500 and a sentence, whatever is sent; and the server goes on."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parity.serve.app import AppSettings
from parity.serve.requests import NEUTRAL, WITHOUT_EFFECT, ChatFields, CompletionFields
from parity.serve.served_model import EngineSettings, open_served
from parity.serve.server import ServerSettings, serving
from tests.hostile.cases import ODD

LONG_S = 60.0
GOOD = {
    "/v1/completions": {"prompt": "the river", "max_tokens": 2, "temperature": 0},
    "/v1/chat/completions": {
        "messages": [{"role": "user", "content": "hello"}],
        "max_tokens": 2,
        "temperature": 0,
    },
}
NAMES = sorted(
    {
        *ChatFields.model_fields,
        *CompletionFields.model_fields,
        *NEUTRAL,
        *WITHOUT_EFFECT,
        "grammar",
        "",
        "\ud800",
    }
)
MESSAGES = ([], [{}], [None], [{"role": "user"}], [{"role": "user", "content": [{"type": "image"}]}], "hi")
VALUES: tuple[Any, ...] = (*ODD, *MESSAGES, [5, 6, 7], [[5]], ["a", "b"], [2**70], {"type": "json_object"})
HEADS = (
    b"\x00\xff\x00\xff\r\n\r\n",
    b"GET / HTTP/9.9\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: -1\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 99999999999999999999\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
    b"GET /%ff%00/../../etc HTTP/1.1\r\nhost: x\r\n\r\n",
    b"GET /health HTTP/1.1\r\nhost: x\r\nx: " + b"y" * 100_000 + b"\r\n\r\n",
    b"GET /health HTTP/1.1\r\nhost: x\r\n" + b"a: b\r\n" * 5000 + b"\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"GET /v1/models HTTP/1.1\r\nhost: x\r\nupgrade: websocket\r\nconnection: upgrade\r\n\r\n",
    b"GET /health HTTP/1.1\r\n\r\n",
)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    served = open_served(EngineSettings(model="llama", n_threads=1, max_num_seqs=8, pool_cells=2000))
    with serving(
        served, AppSettings(model_name="llama"), ServerSettings(port=0, drain_timeout_s=5)
    ) as address:
        yield address
    served.close()


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url, timeout=LONG_S) as made:
        yield made


@st.composite
def hostile_bodies(draw: st.DrawFn) -> tuple[str, bytes]:
    """A path and a body: a good one with one to three fields changed or added, or with its bytes cut."""
    path = draw(st.sampled_from(sorted(GOOD)))
    data = dict(GOOD[path])
    for name in draw(st.lists(st.sampled_from(NAMES), min_size=1, max_size=3)):
        data[name] = draw(st.sampled_from(VALUES))
    body = json.dumps(data).encode()
    if draw(st.integers(0, 4)) == 0:
        body = body[: draw(st.integers(0, len(body)))] + draw(st.sampled_from([b"", b"\xff", b"[" * 9999]))
    return path, body


def ask_and_check(client: httpx.Client, path: str, body: bytes) -> None:
    answer = client.post(path, content=body, headers={"content-type": "application/json"})

    assert answer.status_code < 500, (answer.status_code, answer.text[:500], body[:500])
    assert len(answer.content) < 100_000
    if answer.status_code != 200:
        error = answer.json()["error"]
        assert error["message"] and len(error["message"]) < 500 and "Traceback" not in error["message"]


@settings(max_examples=300, deadline=None)
@given(asked=hostile_bodies())
def test_hostile_body_is_refused_or_served(client: httpx.Client, asked: tuple[str, bytes]) -> None:
    ask_and_check(client, *asked)


@pytest.mark.nightly
@settings(max_examples=10_000, deadline=None)
@given(asked=hostile_bodies())
def test_ten_thousand_hostile_bodies(client: httpx.Client, asked: tuple[str, bytes]) -> None:
    ask_and_check(client, *asked)


@pytest.mark.parametrize("head", HEADS, ids=range(len(HEADS)))
def test_hostile_head_is_refused_and_the_server_goes_on(url: str, client: httpx.Client, head: bytes) -> None:
    where = urlsplit(url)
    with socket.create_connection((where.hostname, where.port), timeout=LONG_S) as sent:
        sent.sendall(head)
        sent.shutdown(socket.SHUT_WR)
        status = sent.recv(100).split(b" ")

    assert status == [b""] or status[1][:1] in (b"2", b"4")
    assert client.post("/v1/completions", json=GOOD["/v1/completions"]).status_code == 200
