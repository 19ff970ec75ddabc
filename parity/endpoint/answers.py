"""What a server answered: choices of tokens with what it showed of their log probabilities."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

# What a token is known by: its id, its bytes as latin-1 text with "b:" in front, or its text with "t:" in
# front.
Key = int | str


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    """One generated token as a server shows it.

    ``position`` counts generated tokens from 0: a server that holds tokens back leaves holes. ``id`` None:
    not
    shown. ``key`` is how ``top`` would name this token, None where that is not known for certain (a text with
    U+FFFD). ``data`` are the bytes of this token and of those that were held back before it, None: not shown.
    ``logprob`` is NaN where the server shows none; ``top`` are (key, log probability) pairs, best first,
    ``spelled`` their bytes where a reader needs them.
    """

    position: int
    id: int | None = None
    key: Key | None = None
    data: bytes | None = None
    logprob: float = math.nan
    top: tuple[tuple[Key, float], ...] = ()
    spelled: tuple[tuple[int, bytes], ...] = ()

    @property
    def name(self) -> Key | None:
        """The most exact name that the token has."""
        return self.key if self.id is None else self.id


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One completion. ``text`` has the reasoning in front, where the server shows that apart.
    ``total_tokens`` is how many the server says that it generated, None where it does not.
    """

    text: str = ""
    finish_reason: str = ""
    tokens: tuple[Token, ...] = ()
    total_tokens: int | None = None

    @property
    def length(self) -> int:
        """Generated tokens, as far as they are known."""
        shown = self.tokens[-1].position + 1 if self.tokens else 0
        return shown if self.total_tokens is None else self.total_tokens

    @property
    def shows_every_token(self) -> bool:
        return len(self.tokens) == self.length

    @property
    def has_logprobs(self) -> bool:
        return any(not math.isnan(token.logprob) for token in self.tokens)

    @property
    def is_empty(self) -> bool:
        return not self.text and not self.tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Everything that one request led to.

    ``error`` says why there is no answer. ``statuses`` are the HTTP statuses of attempts that failed (0: no
    status), also where a later one was answered. ``left`` means that the client went before the end.
    """

    choices: tuple[Choice, ...] = ()
    cached_tokens: int | None = None
    prompt_tokens: int | None = None
    error: str = ""
    statuses: tuple[int, ...] = ()
    left: bool = False

    @property
    def is_whole(self) -> bool:
        return not self.error and not self.left and bool(self.choices)


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """One event of a stream, or a whole choice at once: what is new of choice ``index``."""

    index: int = 0
    text: str = ""
    reasoning: str = ""
    tokens: tuple[Token, ...] = ()
    finish_reason: str = ""
    total_tokens: int | None = None
    cached_tokens: int | None = None
    prompt_tokens: int | None = None


def join_pieces(pieces: Iterable[Piece], *, left: bool = False, statuses: tuple[int, ...] = ()) -> Answer:
    """The answer that pieces come to; choices are kept apart by index."""
    by_index: dict[int, list[Piece]] = {}
    cached = prompt = None
    for piece in pieces:
        by_index.setdefault(piece.index, []).append(piece)
        cached = piece.cached_tokens if piece.cached_tokens is not None else cached
        prompt = piece.prompt_tokens if piece.prompt_tokens is not None else prompt
    choices = []
    for _, own in sorted(by_index.items()):
        thought = "".join(piece.reasoning for piece in own)
        text = "".join(piece.text for piece in own)
        choices.append(
            Choice(
                text=f"{thought}\0{text}" if thought else text,
                finish_reason=next((p.finish_reason for p in reversed(own) if p.finish_reason), ""),
                tokens=tuple(token for piece in own for token in piece.tokens),
                total_tokens=max((p.total_tokens for p in own if p.total_tokens is not None), default=None),
            )
        )
    return Answer(
        choices=tuple(choices), cached_tokens=cached, prompt_tokens=prompt, left=left, statuses=statuses
    )


def bytes_key(data: Sequence[int] | bytes) -> str:
    """The name of a token that is known by its bytes."""
    return "b:" + bytes(data).decode("latin-1")


def text_key(text: str) -> str | None:
    """The name of a token that is known by its text; None for a text that hides its bytes."""
    return None if "\ufffd" in text else f"t:{text}"


# -- as JSON


def choice_to_data(choice: Choice) -> dict[str, Any]:
    """Plain data; NaN is None and bytes are latin-1 text."""
    data = asdict(choice)
    for token in data["tokens"]:
        token["logprob"] = None if math.isnan(token["logprob"]) else token["logprob"]
        token["data"] = None if token["data"] is None else token["data"].decode("latin-1")
        del token["spelled"]
    return data


def choice_from_data(data: dict[str, Any]) -> Choice:
    """The reverse of ``choice_to_data`` after JSON. Raises KeyError, TypeError or ValueError for another
    form.
    """
    tokens = tuple(
        Token(
            position=item["position"],
            id=item["id"],
            key=item["key"],
            data=None if item["data"] is None else item["data"].encode("latin-1"),
            logprob=math.nan if item["logprob"] is None else item["logprob"],
            top=tuple((key, value) for key, value in item["top"]),
        )
        for item in data["tokens"]
    )
    return Choice(
        text=data["text"],
        finish_reason=data["finish_reason"],
        tokens=tokens,
        total_tokens=data["total_tokens"],
    )
