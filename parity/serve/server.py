"""uvicorn around the application: a socket of our own, graceful drain on SIGTERM
and SIGINT, exit code 0 after it.
"""

from __future__ import annotations

import contextlib
import resource
import signal
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace

import uvicorn

from parity.errors import UsageError
from parity.serve.app import AppSettings, Endpoint
from parity.serve.connections import ConnectionBounds, protocol_of
from parity.serve.served_model import ServedModel

DRAIN_TIMEOUT_S = 60
SPARE_FILES = 64  # descriptors that are no connections: the model, logs, the event loop's own


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """Where to listen, and what a connection may cost. ``drain_timeout_s`` bounds the wait
    for running requests at the end.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    drain_timeout_s: int = DRAIN_TIMEOUT_S
    connections: ConnectionBounds = ConnectionBounds()


def bind_socket(settings: ServerSettings) -> socket.socket:
    """A listening address, so that a port that is in use is one line and port 0
    is known. Raises ``UsageError``.
    """
    try:
        family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
        bound = socket.socket(family, socket.SOCK_STREAM)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((settings.host, settings.port))
    except (OSError, OverflowError) as error:
        raise UsageError(
            "cannot listen",
            where=f"{settings.host}:{settings.port}",
            why=str(error),
            todo="choose another --host or --port (0 takes a free one)",
        ) from error
    return bound


def socket_url(bound: socket.socket) -> str:
    """``http://host:port`` of a bound socket."""
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def make_server(endpoint: Endpoint, settings: ServerSettings) -> uvicorn.Server:
    """A uvicorn server of the endpoint; serve it on a bound socket."""
    return uvicorn.Server(
        uvicorn.Config(
            endpoint.app(),
            lifespan="on",
            log_level="warning",
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=settings.drain_timeout_s,
            http=protocol_of(settings.connections),
            h11_max_incomplete_event_size=64 << 10,
        )
    )


def fit_open_files(bounds: ConnectionBounds) -> ConnectionBounds:
    """Raise this process's limit of open files as far as it goes, and the connections below it: past the
    limit a server cannot even refuse.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if hard == resource.RLIM_INFINITY:
        return bounds
    return replace(bounds, max_connections=max(1, min(bounds.max_connections, hard - SPARE_FILES)))


def run_server(endpoint: Endpoint, settings: ServerSettings, bound: socket.socket) -> None:
    """Serve until SIGTERM or SIGINT, then finish what runs. A second SIGINT gives up at once."""
    server = make_server(endpoint, replace(settings, connections=fit_open_files(settings.connections)))
    # uvicorn raises the signal again after its shutdown; a drained server ends as usual instead of dying of
    # it.
    previous = signal.signal(signal.SIGTERM, lambda number, frame: None)
    try:
        with contextlib.suppress(KeyboardInterrupt):
            server.run(sockets=[bound])
    finally:
        signal.signal(signal.SIGTERM, previous)
        bound.close()


@contextlib.contextmanager
def serving(served: ServedModel, app: AppSettings, settings: ServerSettings | None = None) -> Iterator[str]:
    """A server on a thread of this process, for tests and benches; gives its
    URL, and drains it at the end.
    """
    settings = ServerSettings(port=0) if settings is None else settings
    bound = bind_socket(settings)
    endpoint = Endpoint(served, app)
    server = make_server(endpoint, settings)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]}, name="server", daemon=True)
    bound.listen()  # connections wait in the backlog until the server takes them
    thread.start()
    try:
        yield socket_url(bound)
    finally:
        server.should_exit = True
        thread.join()
        bound.close()
