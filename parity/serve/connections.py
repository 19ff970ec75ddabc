"""Connections under bounds: who sends no request, or reads no answer, loses its place to who does."""

from __future__ import annotations

import asyncio
import socket
from dataclasses import dataclass
from typing import ClassVar

from uvicorn.protocols.http.h11_impl import H11Protocol

SEND_BUFFER_BYTES = 128 << 10  # what the kernel holds for a client that does not read
NO_PLACE = (
    b"HTTP/1.1 503 Service Unavailable\r\nconnection: close\r\nretry-after: 1\r\ncontent-length: 0\r\n\r\n"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionBounds:
    """``head_timeout_s`` bounds the wait for a request's head, ``write_timeout_s`` how long an answer waits
    for its reader. Beyond ``max_connections`` the one that has been silent longest is closed.
    """

    max_connections: int = 1024
    head_timeout_s: float = 10.0
    write_timeout_s: float = 30.0


class BoundedConnection(H11Protocol):
    """uvicorn's HTTP/1.1 connection, which has neither bound; ``protocol_of`` gives it its own."""

    bounds: ClassVar[ConnectionBounds] = ConnectionBounds()

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self._head_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._silent_since_s = self.loop.time()
        transport.set_write_buffer_limits(
            high=0
        )  # whatever the kernel does not take starts the write time-out
        opened = transport.get_extra_info("socket")
        if opened is not None:
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        self._make_room()
        self._bound_the_head()

    @property
    def is_silent(self) -> bool:
        """Whether no request is being answered here."""
        return self.cycle is None or self.cycle.response_complete

    def _make_room(self) -> None:
        others = [
            other for other in self.connections if other is not self and not other.transport.is_closing()
        ]
        if len(others) < self.bounds.max_connections:
            return
        silent = [other for other in others if other.is_silent]
        if silent:
            min(silent, key=lambda other: other._silent_since_s).transport.abort()
        else:
            self.transport.write(NO_PLACE)
            self.transport.close()

    def _bound_the_head(self) -> None:
        """Start the head's time-out, or end it when the head is there."""
        if not self.is_silent:
            self._head_timer = _cancelled(self._head_timer)
        elif self._head_timer is None:
            self._head_timer = self.loop.call_later(self.bounds.head_timeout_s, self._give_up_waiting)

    def _give_up_waiting(self) -> None:
        self._head_timer = None
        if self.is_silent:
            self.transport.abort()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._bound_the_head()

    def on_response_complete(self) -> None:
        self._silent_since_s = self.loop.time()
        super().on_response_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._write_timer is None:
            self._write_timer = self.loop.call_later(self.bounds.write_timeout_s, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._write_timer = _cancelled(self._write_timer)

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_timer, self._write_timer = _cancelled(self._head_timer), _cancelled(self._write_timer)
        super().connection_lost(exc)


def _cancelled(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()


def protocol_of(bounds: ConnectionBounds) -> type[BoundedConnection]:
    """The protocol class of connections under these bounds."""
    return type("BoundedConnection", (BoundedConnection,), {"bounds": bounds})
