"""Frames between the processes of a chain: a JSON header and raw bytes over a
local socket, every wait bounded.
"""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np

from scheduler.engine import Call, MemoryOp, OpKind

LENGTHS = struct.Struct("<IQ")  # bytes of the header, bytes of the payload
MAX_HEADER_BYTES = 64 << 20  # a longer one is not ours


class WireClosed(Exception):
    """The other end has gone."""


class WireSilent(Exception):
    """Nothing came within the bound."""


class Wire:
    """One end of a connection; ``timeout_s`` bounds every wait for the other end to send or to take bytes."""

    def __init__(self, connection: socket.socket, *, timeout_s: float) -> None:
        self.connection = connection
        connection.settimeout(timeout_s)

    def send(self, header: dict[str, Any], payload: np.ndarray | None = None) -> None:
        """Send a frame. Raises ``WireClosed`` or ``WireSilent``."""
        text = json.dumps(header).encode()
        data = b"" if payload is None else memoryview(np.ascontiguousarray(payload)).cast("B")
        try:
            self.connection.sendall(LENGTHS.pack(len(text), len(data)) + text)
            if len(data):
                self.connection.sendall(data)
        except TimeoutError as error:
            raise WireSilent from error
        except OSError as error:
            raise WireClosed from error

    def receive(self) -> tuple[dict[str, Any], np.ndarray]:
        """The next frame: its header, and its payload as float32 values.

        Raises ``WireClosed`` or ``WireSilent``.
        """
        header_bytes, payload_bytes = LENGTHS.unpack(self._exactly(LENGTHS.size))
        if header_bytes > MAX_HEADER_BYTES:
            raise WireClosed(f"a header of {header_bytes} bytes")
        header = json.loads(bytes(self._exactly(header_bytes)))
        return header, np.frombuffer(self._exactly(payload_bytes), np.float32)

    def _exactly(self, count: int) -> bytearray:
        data, filled = bytearray(count), 0
        view = memoryview(data)
        while filled < count:
            try:
                got = self.connection.recv_into(view[filled:])
            except TimeoutError as error:
                raise WireSilent from error
            except OSError as error:
                raise WireClosed from error
            if got == 0:
                raise WireClosed
            filled += got
        return data

    def close(self) -> None:
        self.connection.close()


def calls_to_data(calls: Sequence[Call]) -> list:
    """Calls as nested lists of integers and names."""
    return [[ops_to_data(call.ops), call.rows, call.seq_ids, call.cells] for call in calls]


def calls_from_data(data: list) -> list[Call]:
    """What ``calls_to_data`` wrote."""
    return [
        Call(tuple(ops_from_data(ops)), tuple(rows), tuple(seq_ids), tuple(cells))
        for ops, rows, seq_ids, cells in data
    ]


def ops_to_data(ops: Sequence[MemoryOp]) -> list:
    """Memory operations as nested lists."""
    return [[op.kind.value, op.seq_id, op.start, op.stop, op.source] for op in ops]


def ops_from_data(data: list) -> list[MemoryOp]:
    """What ``ops_to_data`` wrote."""
    return [MemoryOp(OpKind(kind), *numbers) for kind, *numbers in data]
