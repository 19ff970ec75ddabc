"""The messages of the JSON-lines protocol, version 1. A line is one of these records as an object, with
``type`` beside its fields; every message to the scheduler has exactly one answer.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any, TypeVar

from pydantic import TypeAdapter

from parity.plain_data import load_json, read_record
from parity.records import plain
from scheduler.engine import Call, MemoryOp
from scheduler.limits import PoolLimits, StepLimits

PROTOCOL = 1
Message = TypeVar("Message")


class Level(Enum):
    """What a scheduler decides: intervals of sessions alone, or cells, calls and memory operations, too."""

    INTERVALS, CELLS = "intervals", "cells"


# -- to the scheduler


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """The first message: one pool for each stage, and the budgets of a step. Answer: ``ready``."""

    protocol: int
    pools: tuple[PoolLimits, ...]
    steps: StepLimits


@dataclass(frozen=True, slots=True, kw_only=True)
class Submit:
    """A new session. Answer: ``answer``; not accepted means refused."""

    session: str
    generation: int
    prompt: tuple[int, ...]
    max_tokens: int
    client_id: str
    priority: int
    now_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Cancel:
    """A session that is in no step in flight ended: forget it and release its rows. Answer: ``answer``."""

    session: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Preempt:
    """A running session loses its rows and is to be computed again later. Answer: ``answer``."""

    session: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Live:
    """A session as it is now: ``computed`` rows are in the pool (for one that would enter: so many would be
    shared), ``committed`` is the furthest that they ever were, ``until`` where its next interval must stop,
    ``num_rows`` what it needs in the end. ``state`` is waiting, running or suspended.
    """

    session: str
    state: str
    computed: int
    committed: int
    emitted: int
    until: int
    num_rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What shall the next step run? Sessions are in order of submission; ``available_rows`` are free now
    (-1 where the scheduler places cells itself). Answer: ``planned``.
    """

    step: int
    now_ms: float
    available_rows: int
    sessions: tuple[Live, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """An interval was computed up to ``stop``, and gave ``token`` if it ended a prompt or was a decode."""

    session: str
    stop: int
    token: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The step ran whole; ``ended`` sessions are over: forget them. Answer: ``answer``."""

    chunks: tuple[Done, ...]
    ended: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """The engine broke off and was cleared: every running session is suspended without a row, ``ended`` ones
    are over. Answer: ``answer``.
    """

    reason: str
    ended: tuple[str, ...]


# -- from the scheduler


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """Who it is and what it can: what is declared as absent is not asked for, and must not be done."""

    protocol: int
    name: str
    level: Level
    prefix_cache: bool = True
    preemption: bool = True
    one_context: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Done, or not accepted and why. ``operations`` are applied at once, a list for each stage."""

    accepted: bool = True
    reason: str = ""
    retryable: bool = False
    operations: tuple[tuple[MemoryOp, ...], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """Half-open interval of one session's tokens."""

    session: str
    start: int
    stop: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """The step: its intervals in batch order; sessions that give way first; and, where the scheduler places
    cells, the native calls of each stage.
    """

    chunks: tuple[Interval, ...] = ()
    preempted: tuple[str, ...] = ()
    calls: tuple[tuple[Call, ...], ...] = field(default=())


TO_SCHEDULER = (Hello, Submit, Cancel, Preempt, Plan, Result, Failed)
FROM_SCHEDULER = (Ready, Answer, Planned)


def line_of(message: Any) -> str:
    """A message as the line that stands for it."""
    data = {"type": type(message).__name__.lower(), **asdict(message, dict_factory=plain)}
    return json.dumps(data, separators=(",", ":")) + "\n"


def read_line(line: str, kind: type[Message]) -> Message:
    """The message in a line. ``ValueError`` says what is wrong, at which key path."""
    data = load_json(line)
    if not isinstance(data, dict):
        raise ValueError("it is not an object")
    said, wanted = data.pop("type", None), kind.__name__.lower()
    if said != wanted:
        raise ValueError(f"its type is {said!r}, due is {wanted!r}")
    return read_record(kind, data)


def protocol_schema() -> dict[str, Any]:
    """The JSON Schema of every message, by type: what ``parity/schemas/protocol.schema.json`` holds."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"samebytes scheduler protocol {PROTOCOL}",
        **{
            side: {kind.__name__.lower(): TypeAdapter(kind).json_schema() for kind in kinds}
            for side, kinds in (("to_scheduler", TO_SCHEDULER), ("from_scheduler", FROM_SCHEDULER))
        },
    }


if __name__ == "__main__":  # python -m parity.protocol.messages > parity/schemas/protocol.schema.json
    print(json.dumps(protocol_schema(), indent=1))
