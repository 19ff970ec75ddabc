"""One answer of an OpenAI-compatible server, read from any of its forms: whole
or streamed, chat or completion.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointAnswer:
    """What came back. ``tokens`` are ids or token texts, ``logprobs`` one per token, ``margins`` top-1 minus
    top-2 log probability; each is empty where the server gives none. ``error`` is set instead of a text.
    """

    text: str = ""
    finish_reason: str = ""
    tokens: tuple[Any, ...] = ()
    logprobs: tuple[float, ...] = ()
    margins: tuple[float, ...] = ()
    error: str = ""

    @staticmethod
    def from_data(data: dict[str, Any]) -> EndpointAnswer:
        """The reverse of ``dataclasses.asdict`` after JSON."""
        lists = {name: tuple(data[name]) for name in ("tokens", "logprobs", "margins")}
        return EndpointAnswer(**{**data, **lists})


def read_answer(data: dict[str, Any], *, chat: bool) -> EndpointAnswer:
    """An answer of either form. Raises KeyError, IndexError, TypeError or ValueError for another form."""
    choice = data["choices"][0]
    text = (choice["message"].get("content") or "") if chat else choice["text"]
    if not isinstance(text, str):
        raise ValueError(f"the text is {json.dumps(text)}")
    names, logprobs, margins = _read_logprobs(choice.get("logprobs"), chat=chat)
    tokens = choice.get("token_ids") or names
    return EndpointAnswer(
        text=text,
        finish_reason=str(choice.get("finish_reason")),
        tokens=tuple(tokens),
        logprobs=tuple(logprobs),
        margins=tuple(margins),
    )


def _read_logprobs(data: Any, *, chat: bool) -> tuple[list[str], list[float], list[float]]:
    """Token texts, log probabilities, and margins where at least two alternatives are given."""
    if not data:
        return [], [], []
    if chat or "content" in data:  # llama-server gives the chat form for completions too
        content = data.get("content") or []
        tops = [[entry["logprob"] for entry in item.get("top_logprobs") or []] for item in content]
        names, values = [item["token"] for item in content], [item["logprob"] for item in content]
    else:
        names, values = data.get("tokens") or [], data.get("token_logprobs") or []
        tops = [list((top or {}).values()) for top in data.get("top_logprobs") or [None] * len(names)]
    margins = [
        ordered[0] - ordered[1] if len(ordered) > 1 else float("nan")
        for ordered in (sorted(top, reverse=True) for top in tops)
    ]
    return names, values, margins


def merge_chunks(chunks: Sequence[dict[str, Any]], *, chat: bool) -> EndpointAnswer:
    """The answer that streamed chunks come to. Raises like ``read_answer``, and ValueError for a stream that
    broke off: without a finish reason, or with an error in it.
    """
    parts: list[EndpointAnswer] = []
    reason = None
    for chunk in chunks:
        if "error" in chunk:
            raise ValueError(f"the stream holds an error: {json.dumps(chunk['error'])}")
        for choice in chunk.get("choices") or ():
            if chat:
                choice = {**choice, "message": choice["delta"]}
            parts.append(read_answer({"choices": [choice]}, chat=chat))
            reason = choice.get("finish_reason") or reason
    if reason is None:
        raise ValueError("the stream ended without a finish reason")
    return EndpointAnswer(
        text="".join(part.text for part in parts),
        finish_reason=str(reason),
        tokens=tuple(token for part in parts for token in part.tokens),
        logprobs=tuple(value for part in parts for value in part.logprobs),
        margins=tuple(value for part in parts for value in part.margins),
    )
