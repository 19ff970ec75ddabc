"""SGLang by its own ``/generate``: ids, log probabilities by id, cached tokens, how many requests run."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from parity.endpoint.answers import Piece, Token
from parity.endpoint.case import Question
from parity.endpoint.http_access import EndpointAccess, HttpAccess, prometheus_values
from parity.endpoint.system import Counters, Refused, SystemFacts
from parity.errors import UsageError

TOP = 5


class SglangSystem:
    """One SGLang server. Its stream repeats the whole text, and what is new of the log probabilities, in each
    event.
    """

    def __init__(self, access: EndpointAccess) -> None:
        self.access = access
        self._http = HttpAccess(access)

    async def open(self) -> SystemFacts:
        """Read ``/get_model_info`` and ``/get_server_info``. Raises ``UsageError``."""
        model = await self._http.look_json("/get_model_info")
        if "is_generation" not in model:
            raise UsageError(
                "not an SGLang server", where=self.access.url, why="/get_model_info says nothing"
            )
        server = await self._http.look_json("/get_server_info")
        return SystemFacts(
            kind="sglang",
            version=str(server.get("version", "")),
            model=str(model.get("model_path", "")),
            slots=server.get("max_running_requests"),
            context_tokens=server.get("context_length"),
            shows_token_ids=True,
            shows_logprobs=True,
            shows_top=True,
            shows_cached_tokens=True,
            shows_counters=await self.counters() is not None,
            takes_token_prompts=True,
            takes_penalties=False,
        )

    async def tokenize(self, text: str) -> tuple[int, ...] | None:
        """Texts are continued as texts."""
        return None

    async def counters(self) -> Counters | None:
        """From ``/metrics``, which the server has with ``--enable-metrics``."""
        response = await self._http.look("/metrics")
        try:
            values = {} if response is None else prometheus_values(response.text)
        except ValueError:
            return None
        running = values.get("sglang:num_running_reqs")
        return None if running is None else Counters(running=running)

    async def close(self) -> None:
        await self._http.close()

    @staticmethod
    def _body(question: Question, *, stream: bool) -> dict[str, Any]:
        prompt = (
            {"text": question.prompt}
            if isinstance(question.prompt, str)
            else {"input_ids": list(question.prompt)}
        )
        sampling = {"max_new_tokens": question.max_tokens, "temperature": question.temperature}
        if question.stop:
            sampling["stop"] = list(question.stop)
        if question.temperature > 0:
            sampling["sampling_seed"] = question.seed
        return {
            **prompt,
            "sampling_params": sampling,
            "return_logprob": True,
            "logprob_start_len": -1,
            "top_logprobs_num": TOP,
            "return_text_in_logprobs": False,
            "stream": stream,
        }

    async def generate(self, question: Question, *, stream: bool, cold: bool = False) -> AsyncIterator[Piece]:
        body = self._body(question, stream=stream)
        if not stream:
            yield _read(await self._http.post_json("/generate", body), Piece(), 0)
            return
        text, count, ended = "", 0, False
        async with aclosing(self._http.stream_json("/generate", body)) as events:
            async for event in events:
                piece = _read(event, Piece(text=text), count)
                text, count = text + piece.text, count + len(piece.tokens)
                ended = ended or bool(piece.finish_reason)
                yield piece
        if not ended:
            raise Refused("the stream ended without a finish reason", 200)


def _read(data: Any, before: Piece, count: int) -> Piece:
    """What an event adds to the text ``before`` and the ``count`` tokens in front of it. Raises
    ``Refused``.
    """
    try:
        if "error" in data:
            raise Refused(f"the answer holds an error: {str(data['error'])[:200]}", 500)
        meta = data["meta_info"]
        total = meta["completion_tokens"]
        entries, tops = meta["output_token_logprobs"], meta.get("output_top_logprobs") or []
        fresh = total - count
        # Servers before 0.5 repeat all log probabilities in each event, later ones may send the new ones
        # alone.
        entries, tops = entries[len(entries) - fresh :], tops[max(0, len(tops) - fresh) :]
        if len(entries) != fresh:
            raise ValueError(f"{total} tokens, {count} of them known, and {len(entries)} log probabilities")
        tokens = tuple(
            Token(position=count + i, id=entry[1], key=entry[1], logprob=_number(entry[0]))
            for i, entry in enumerate(entries)
        )
        if tops:
            tokens = tuple(
                replace(token, top=tuple((item[1], float(item[0])) for item in top or ()))
                for token, top in zip(tokens, tops, strict=True)
            )
        reason = meta.get("finish_reason")
        text = data["text"]
        if not text.startswith(before.text):
            raise ValueError("its text does not go on from the last event's")
        return Piece(
            text=text[len(before.text) :],
            tokens=tokens,
            finish_reason=reason["type"] if reason else "",
            cached_tokens=meta.get("cached_tokens"),
            prompt_tokens=meta.get("prompt_tokens"),
        )
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise Refused(f"no answer in SGLang's form: {error!r} in {str(data)[:200]}", 200) from error


def _number(value: float | None) -> float:
    return math.nan if value is None else float(value)
