"""Answers in OpenAI's shapes: whole objects and server-sent chunks, with usage and log probabilities."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from parity.serve.front import Front, GeneratedToken, Piece
from parity.serve.requests import Ask
from parity.serve.text import token_text

DONE = b"data: [DONE]\n\n"


def server_sent(data: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return f"data: {json.dumps(data, ensure_ascii=False, separators=(',', ':'))}\n\n".encode()


class Answer:
    """Builds the answer to one request. ``created`` is Unix time in seconds."""

    def __init__(self, ask: Ask, front: Front, *, answer_id: str, created: int, model: str) -> None:
        self._ask, self._front = ask, front
        prefix = "chatcmpl" if ask.is_chat else "cmpl"
        self._base = {"id": f"{prefix}-{answer_id}", "created": created, "model": model}
        self._text: list[str] = []
        self._tokens: list[GeneratedToken] = []
        self._reason: str | None = None
        self._offset = 0  # characters of the text that earlier pieces' tokens stand for

    # -- in one piece

    def add(self, piece: Piece) -> None:
        """Collect a piece."""
        self._text.append(piece.text)
        self._tokens += piece.tokens
        self._reason = piece.finish_reason

    def whole(self) -> dict[str, Any]:
        """The object of an answer that was collected."""
        text = "".join(self._text)
        choice: dict[str, Any] = {
            "index": 0,
            "finish_reason": self._reason,
            "logprobs": self._logprobs(self._tokens),
        }
        if self._ask.is_chat:
            choice["message"] = {"role": "assistant", "content": text}
        else:
            choice["text"] = text
        self._add_token_ids(choice, self._tokens, first=True)
        kind = "chat.completion" if self._ask.is_chat else "text_completion"
        return {**self._base, "object": kind, "choices": [choice], "usage": self.usage()}

    def usage(self) -> dict[str, int]:
        prompt, output = len(self._ask.prompt), len(self._tokens)
        return {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}

    # -- in chunks

    def chunk(self, piece: Piece) -> bytes:
        """The chunk of a piece; empty when there is nothing to show for it."""
        first = not self._tokens
        self._tokens += piece.tokens
        ask = self._ask
        wanted = piece.text or piece.finish_reason or (first and ask.is_chat)
        if not wanted and ask.logprobs is None and not ask.return_token_ids:
            return b""
        choice: dict[str, Any] = {
            "index": 0,
            "finish_reason": piece.finish_reason,
            "logprobs": self._logprobs(piece.tokens),
        }
        if ask.is_chat:
            choice["delta"] = (
                {"role": "assistant", "content": piece.text} if first else {"content": piece.text}
            )
        else:
            choice["text"] = piece.text
        self._add_token_ids(choice, piece.tokens, first=first)
        return server_sent(self._chunk_object([choice], None))

    def usage_chunk(self) -> bytes:
        """The last chunk of a client that asked for usage."""
        return server_sent(self._chunk_object([], self.usage()))

    def _chunk_object(self, choices: list[dict[str, Any]], usage: dict[str, int] | None) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self._ask.is_chat else "text_completion"
        data = {**self._base, "object": kind, "choices": choices}
        return {**data, "usage": usage} if self._ask.include_usage else data

    # -- parts

    def _add_token_ids(
        self, choice: dict[str, Any], tokens: Sequence[GeneratedToken], *, first: bool
    ) -> None:
        if self._ask.return_token_ids:
            choice["token_ids"] = [item.token for item in tokens]
            if first:
                choice["prompt_token_ids"] = list(self._ask.prompt)

    def _logprobs(self, tokens: Sequence[GeneratedToken]) -> dict[str, Any] | None:
        if self._ask.logprobs is None:
            return None
        return self._chat_logprobs(tokens) if self._ask.is_chat else self._completion_logprobs(tokens)

    def _chat_logprobs(self, tokens: Sequence[GeneratedToken]) -> dict[str, Any]:
        content = []
        for item in tokens:
            top = [
                self._token_entry(self._front.token_bytes(token), logprob)
                for token, logprob in item.logprobs.top
            ]
            content.append({**self._token_entry(item.data, item.logprobs.logprob), "top_logprobs": top})
        return {"content": content, "refusal": None}

    @staticmethod
    def _token_entry(data: bytes, logprob: float) -> dict[str, Any]:
        return {"token": token_text(data), "logprob": logprob, "bytes": list(data)}

    def _completion_logprobs(self, tokens: Sequence[GeneratedToken]) -> dict[str, Any]:
        top, offsets = [], []
        for item in tokens:
            entries: dict[str, float] = {}
            for token, logprob in item.logprobs.top:
                entries.setdefault(token_text(self._front.token_bytes(token)), logprob)  # best first
            top.append(entries)
            offsets.append(self._offset)
            self._offset += len(item.data.decode(errors="replace"))
        return {
            "tokens": [token_text(item.data) for item in tokens],
            "token_logprobs": [item.logprobs.logprob for item in tokens],
            "top_logprobs": top if self._ask.logprobs else None,
            "text_offset": offsets,
        }
