"""A server that closes kept-alive connections, and one that never answers; what was finished survives."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from parity.bench import peers
from parity.bench.over_http import HttpDriver
from parity.bench.peers import PeerRow, make_row, tokens_per_s, workload_of
from parity.bench.summary import summarise
from parity.bench.workload import Workload
from parity.commands.bench import report_failures
from parity.commands.peers import command as peers_command
from parity.errors import UsageError

EVENT = b'data: {"choices": [{"text": "a", "token_ids": [1]}]}\n\ndata: [DONE]\n\n'
ANSWER = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-length: %d\r\n\r\n" % len(EVENT)
) + EVENT


@contextlib.contextmanager
def closing_after(answers: int) -> Iterator[tuple[str, list[int]]]:
    """A server of one connection at a time: it gives so many answers on it, reads the next request and
    closes without a word. Its address, and the requests that it read.
    """
    requests: list[int] = []

    def serve(listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection, connection.makefile("rb") as reader:
                for number in range(answers + 1):
                    length = 0
                    while (line := reader.readline().lower()) not in (b"\r\n", b""):
                        if line.startswith(b"content-length:"):
                            length = int(line.partition(b":")[2])
                    if not line:
                        break
                    reader.read(length)
                    requests.append(number)
                    if number < answers:
                        connection.sendall(ANSWER)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, args=(listener,), daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", requests
        listener.shutdown(socket.SHUT_RDWR)
    thread.join()


def test_request_on_a_closed_kept_alive_connection_is_sent_once_more_and_said(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with closing_after(1) as (url, requests):
        run = HttpDriver(url, "toy").run_closed(workload_of(4, 1, 3, 0).jobs(), concurrency=1)
    assert [(record.error, record.is_resent) for record in run.requests] == [
        ("", False),
        ("", True),
        ("", True),
    ]
    assert requests == [0, 1, 0, 1, 0]
    row = {**summarise(run), "mix": "4/1", "prefix": "unique", "concurrency": 1, "request_rate": None}
    assert row["resent"] == 2 and not report_failures([row])
    assert "2 requests were sent again" in capsys.readouterr().out


def test_request_on_a_new_connection_is_not_sent_again() -> None:
    with closing_after(0) as (url, requests):
        run = HttpDriver(url, "toy").run_closed(workload_of(4, 1, 2, 0).jobs(), concurrency=1)
        with pytest.raises(UsageError, match="2 of 2 requests failed in other, 4/1"):
            tokens_per_s(run, of="other, 4/1")
    assert requests == [0, 0] and not any(record.is_resent for record in run.requests)


def test_rows_that_were_finished_survive_a_server_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def row(settings: Any, workload: Workload, n: int, pairs: int, **servers: str) -> PeerRow:
        if workload.lengths.input_len == 16:
            raise UsageError("1 of 2 requests failed", where=servers["peer_name"])
        return make_row("llama", servers["peer_name"], workload, n, [(2.0, 1.0)])

    monkeypatch.setattr(peers, "server_row", row)
    monkeypatch.setattr(peers, "running_server", lambda command, url: contextlib.nullcontext(url))
    out = tmp_path / "rows.json"
    given = ["llama", "--against", "server", "--peer-url", "http://127.0.0.1:9", "--input-lens", "8,16"]
    with pytest.raises(UsageError, match=r"failed in http://127\.0\.0\.1:9"):
        peers_command.main([*given, "--concurrency", "2", "--json", str(out)], standalone_mode=False)
    assert [kept["input_len"] for kept in json.loads(out.read_text())] == [8]
    assert "http://127.0.0.1:9" in capsys.readouterr().out
