"""A case for a whole server: who asks what, and after which event. No clock is in it.

A question is literal, so that a case file needs nothing but a server; a session starts when an earlier one
has given its j-th token, or has ended, and may leave after j tokens or before the first.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from parity.cases.files import MAX_FILE_BYTES
from parity.errors import UsageError
from parity.store import save_text

SYSTEM_CASE_FORMAT = "system-1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One request. ``prompt`` is a text or token ids. ``kind`` says what it is there for and is not sent.

    ``repeat_penalty`` 1.0 and an empty ``logit_bias`` ((token id, bias) pairs) change nothing. A
    ``temperature``
    above 0 needs the ``seed``.
    """

    prompt: str | tuple[int, ...]
    max_tokens: int
    kind: str = "plain"
    temperature: float = 0.0
    seed: int = 0
    stop: tuple[str, ...] = ()
    n: int = 1
    repeat_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()

    @property
    def chooses(self) -> str:
        """By what tokens are chosen: ``greedy``, ``sampled``, or ``penalised`` (the best one after a
        penalty).
        """
        if self.temperature > 0:
            return "sampled"
        return "penalised" if self.repeat_penalty != 1.0 or self.logit_bias else "greedy"


@dataclass(frozen=True, slots=True, kw_only=True)
class SystemSession:
    """One client. It starts at once, or when session ``after`` (an earlier index) has given ``after_tokens``
    tokens (None: has ended; an end before that counts too). It leaves when it has ``leave_after`` tokens,
    with 0 as soon as the request is sent and the server has begun to answer or another session got a token;
    None stays.
    """

    question: Question
    after: int | None = None
    after_tokens: int | None = None
    leave_after: int | None = None
    stream: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class SystemCase:
    """Sessions in the order in which they may start. ``limits`` are what the judgement went by, in nats:
    (distance, margin), so that a replay needs no baseline; None: none was known.
    """

    sessions: tuple[SystemSession, ...]
    chat: bool = False
    limits: tuple[float, float] | None = None

    def to_json(self) -> str:
        return json.dumps({"format": SYSTEM_CASE_FORMAT, **asdict(self)}, indent=1) + "\n"

    @staticmethod
    def from_json(text: str, *, where: str) -> SystemCase:
        """Read what ``to_json`` wrote. Raises ``UsageError``."""
        try:
            data = json.loads(text)
            if data.pop("format") != SYSTEM_CASE_FORMAT:
                raise ValueError(f"its format is not {SYSTEM_CASE_FORMAT}")
            sessions = tuple(_session(item) for item in data["sessions"])
            limits = data["limits"]
            case = SystemCase(
                sessions=sessions, chat=data["chat"], limits=None if limits is None else tuple(limits)
            )
            if not sessions:
                raise ValueError("it has no sessions")
            for index, session in enumerate(sessions):
                if session.after is not None and not 0 <= session.after < index:
                    raise ValueError(f"session {index} starts after {session.after}, which is no earlier one")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UsageError(
                "no case for a system", where=where, why=str(error), todo="name a file that a check wrote"
            ) from error
        return case


def _session(data: dict[str, Any]) -> SystemSession:
    asked = data["question"]
    question = Question(
        **{
            **asked,
            "prompt": asked["prompt"] if isinstance(asked["prompt"], str) else tuple(asked["prompt"]),
            "stop": tuple(asked["stop"]),
            "logit_bias": tuple((token, bias) for token, bias in asked["logit_bias"]),
        }
    )
    return SystemSession(**{**data, "question": question})


def is_system_case(path: Path) -> bool:
    """Does the file say that it holds a case for a system? False for what cannot be read."""
    try:
        if not path.is_file() or path.stat().st_size > MAX_FILE_BYTES:
            return False
        return json.loads(path.read_text(encoding="utf-8")).get("format") == SYSTEM_CASE_FORMAT
    except (OSError, ValueError, AttributeError, RecursionError):
        return False


def load_system_case(path: Path) -> SystemCase:
    """The case in a file. Raises ``UsageError``."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError("case file cannot be read", where=str(path), why=str(error)) from error
    return SystemCase.from_json(text, where=str(path))


def save_system_case(case: SystemCase, folder: Path) -> Path:
    """Write the case under a name made of its content; returns the path."""
    text = case.to_json()
    path = folder / f"system-{hashlib.blake2b(text.encode(), digest_size=4).hexdigest()}.json"
    save_text(path, text)
    return path
