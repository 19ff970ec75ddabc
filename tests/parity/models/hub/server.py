"""A Hub on loopback: model API, resolve with redirects to a storage host, Range, and faults on request.

Two ports are two origins, as on the real Hub: the Hub answers ``/api/models`` and redirects ``/resolve`` to
storage; storage serves bytes and must never see a token.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

API = re.compile(r"/api/models/(?P<repo>[^/]+/[^/]+?)(/revision/(?P<revision>[^/]+))?")
RESOLVE = re.compile(r"/(?P<repo>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<file>.+)")
STORED = re.compile(r"/stored/(?P<digest>[0-9a-f]{64})")


@dataclass
class Repository:
    """``commits``: revision (40 hexadecimal digits) -> file name -> content; the last is ``main``."""

    commits: dict[str, dict[str, bytes]]
    token: str | None = None  # who may read; None is everybody
    gated: bool = False
    small: frozenset[str] = frozenset()  # files that are kept in git itself: no SHA-256 is published
    announced_digest: dict[str, str] = field(
        default_factory=dict
    )  # file -> digest announced instead of the true one

    @property
    def head(self) -> str:
        return list(self.commits)[-1]


@dataclass(frozen=True)
class Seen:
    """One answered request; ``sent`` counts body bytes that were written to the socket."""

    host: str
    method: str
    path: str
    range: str | None
    authorised: bool
    status: int
    sent: int


@dataclass
class Fault:
    """What goes wrong on the next ``times`` requests that match ``method`` and ``host``."""

    method: str = "GET"
    host: str = "storage"
    status: int | None = None
    headers: dict[str, str] = field(default_factory=dict)
    cut_after_bytes: int | None = None
    ignores_range: bool = False
    body: bytes | None = None
    wait_for: Callable[[], None] | None = None  # called before the answer
    stall: Callable[[], None] | None = None  # called after the body's last sent byte
    times: int = 1


class HubServer:
    """Use as ``with HubServer({...}) as hub``; ``hub.endpoint`` is what HF_ENDPOINT should be."""

    def __init__(self, repositories: dict[str, Repository]) -> None:
        self.repositories = repositories
        self.names_commits = True  # a mirror that only serves files does not
        self.faults: list[Fault] = []
        self.seen: list[Seen] = []
        self.changed = threading.Condition()
        self._stack = ExitStack()

    def __enter__(self) -> HubServer:
        self.storage = self._stack.enter_context(_serving(self, "storage"))
        self.endpoint = self._stack.enter_context(_serving(self, "hub"))
        return self

    def __exit__(self, *raised: object) -> None:
        self._stack.close()

    def take_fault(self, host: str, method: str) -> Fault:
        with self.changed:
            for fault in self.faults:
                if fault.times > 0 and (fault.host, fault.method) == (host, method):
                    fault.times -= 1
                    return fault
        return Fault()

    def note(self, seen: Seen) -> None:
        with self.changed:
            self.seen.append(seen)
            self.changed.notify_all()

    def wait_until_seen(self, host: str, method: str, count: int) -> None:
        """Block until ``count`` requests of this kind were answered; a deadlock fails after a minute."""
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.requests(host, method)) >= count, timeout=60)

    def requests(self, host: str, method: str) -> list[Seen]:
        return [seen for seen in self.seen if (seen.host, seen.method) == (host, method)]

    def content(self, digest: str) -> bytes | None:
        for repository in self.repositories.values():
            for files in repository.commits.values():
                for body in files.values():
                    if hashlib.sha256(body).hexdigest() == digest:
                        return body
        return None


@contextmanager
def _serving(hub: HubServer, host: str) -> Iterator[Any]:
    handler = type("Handler", (_Handler,), {"hub": hub, "host": host})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: HubServer
    host: str

    def log_message(self, *arguments: object) -> None:
        """Quiet: tests read ``HubServer.seen``."""

    def do_HEAD(self) -> None:
        self._serve()

    def do_GET(self) -> None:
        self._serve()

    def _serve(self) -> None:
        fault = self.hub.take_fault(self.host, self.command)
        if fault.wait_for is not None:
            fault.wait_for()
        path = unquote(urlsplit(self.path).path)
        if fault.status is not None:
            self._answer(fault.status, fault.headers, b"")
        elif self.host == "storage":
            self._serve_stored(path, fault)
        elif found := API.fullmatch(path):
            self._serve_model_info(found, fault)
        elif found := RESOLVE.fullmatch(path):
            self._serve_resolve(found)
        else:
            self._answer(404, {}, b"")

    def _refusal(self, repo: str, revision: str | None) -> tuple[Repository, str] | None:
        """The repository and commit, or None after the refusal has been answered the way the Hub does."""
        repository = self.hub.repositories.get(repo)
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if repository is None:
            return self._answer(401 if not token else 404, {"X-Error-Code": "RepoNotFound"}, b"")
        if repository.token is not None and token != repository.token:
            code = {"X-Error-Code": "GatedRepo"} if repository.gated else {}
            return self._answer(403 if token else 401, code, b"")
        commit = repository.head if revision in (None, "main") else revision
        if commit not in repository.commits:
            return self._answer(404, {"X-Error-Code": "RevisionNotFound"}, b"")
        return repository, commit

    def _serve_model_info(self, found: re.Match[str], fault: Fault) -> None:
        if (target := self._refusal(found["repo"], found["revision"])) is None:
            return
        repository, commit = target
        siblings = []
        for name, body in repository.commits[commit].items():
            entry = {"rfilename": name, "size": len(body), "blobId": hashlib.sha1(body).hexdigest()}
            if name not in repository.small:
                entry["lfs"] = {
                    "sha256": hashlib.sha256(body).hexdigest(),
                    "size": len(body),
                    "pointerSize": 135,
                }
            siblings.append(entry)
        answer = {
            "id": found["repo"],
            "modelId": found["repo"],
            "sha": commit,
            "private": False,
            "siblings": siblings,
        }
        self._answer(200, {"Content-Type": "application/json"}, json.dumps(answer).encode())

    def _serve_resolve(self, found: re.Match[str]) -> None:
        if (target := self._refusal(found["repo"], found["revision"])) is None:
            return
        repository, commit = target
        body = repository.commits[commit].get(found["file"])
        if body is None:
            self._answer(404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit}, b"")
            return
        digest = hashlib.sha256(body).hexdigest()
        announced = repository.announced_digest.get(found["file"], digest)
        location = {"Location": f"{self.hub.storage}/stored/{digest}"}
        of_a_hub = {
            "X-Repo-Commit": commit,
            "X-Linked-Size": str(len(body)),
            "X-Linked-Etag": f'"{announced}"',
            "ETag": f'"{announced}"',
        }
        self._answer(302, {**location, **(of_a_hub if self.hub.names_commits else {})}, b"")

    def _serve_stored(self, path: str, fault: Fault) -> None:
        found = STORED.fullmatch(path)
        body = fault.body if fault.body is not None else self.hub.content(found["digest"]) if found else None
        if body is None:
            self._answer(404, {}, b"")
            return
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if asked is None or fault.ignores_range:
            self._answer(200, {}, body, fault)
        elif int(asked[1]) >= len(body):
            self._answer(416, {"Content-Range": f"bytes */{len(body)}"}, b"")
        else:
            start, last = int(asked[1]), min(int(asked[2] or len(body)), len(body) - 1)
            place = {"Content-Range": f"bytes {start}-{last}/{len(body)}"}
            self._answer(206, place, body[start : last + 1], fault)

    def _answer(self, status: int, headers: dict[str, str], body: bytes, fault: Fault | None = None) -> None:
        cut_after_bytes = fault.cut_after_bytes if fault else None
        sent = b"" if self.command == "HEAD" else body if cut_after_bytes is None else body[:cut_after_bytes]
        # Noted first: a client that has its answer must find it in ``seen``.
        self.hub.note(
            Seen(
                host=self.host,
                method=self.command,
                path=self.path,
                range=self.headers.get("Range"),
                authorised="Authorization" in self.headers,
                status=status,
                sent=len(sent),
            )
        )
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        try:
            self.wfile.write(sent)
            self.wfile.flush()
        except ConnectionError:  # the client had enough, which some tests are about
            self.close_connection = True
            return
        if fault and fault.stall is not None:
            fault.stall()
        self.close_connection = cut_after_bytes is not None
