"""llama-server by its own ``/completion``: ids, log probabilities by id, cached tokens, slots, its
counters.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from parity.endpoint.answers import Piece, Token
from parity.endpoint.case import Question
from parity.endpoint.http_access import EndpointAccess, HttpAccess, prometheus_values
from parity.endpoint.system import Counters, Refused, Retryable, SystemFacts
from parity.errors import UsageError

N_PROBS = 5
FINISH = {"limit": "length", "eos": "stop", "word": "stop"}


class LlamaServerSystem:
    """One llama-server. It holds bytes back that are no whole character: such a token has no log probability,
    in a stream no id either, and the bytes of the next one are those of both.
    """

    def __init__(self, access: EndpointAccess) -> None:
        self.access = access
        self._http = HttpAccess(access)
        self._has_metrics = False

    async def open(self) -> SystemFacts:
        """Read ``/props``. Raises ``UsageError`` where that is not llama-server's."""
        props = await self._http.look_json("/props")
        if "total_slots" not in props:
            raise UsageError("not a llama-server", where=self.access.url, why="/props does not say its slots")
        self._has_metrics = await self.counters() is not None
        settings = props.get("default_generation_settings") or {}
        return SystemFacts(
            kind="llama-server",
            version=str(props.get("build_info", "")),
            model=str(props.get("model_path", "")).rpartition("/")[2],
            slots=props["total_slots"],
            context_tokens=settings.get("n_ctx"),
            shows_token_ids=True,
            shows_logprobs=True,
            shows_top=True,
            shows_cached_tokens=True,
            shows_counters=self._has_metrics,
            holds_back=True,
            takes_token_prompts=True,
            takes_n=await self._takes_n(),
            takes_penalties=True,
            can_ask_cold=True,
        )

    async def _takes_n(self) -> bool:
        """Older builds ignore ``n_cmpl``."""
        body = self._body(Question(prompt="river", max_tokens=1, n=2), stream=False, cold=True)
        try:
            answer = await self._http.post_json("/completion", body)
        except Refused:
            return False
        except Retryable as error:
            raise UsageError("the server does not answer", where=self.access.url, why=str(error)) from error
        return isinstance(answer, list) and len(answer) == 2

    async def tokenize(self, text: str) -> tuple[int, ...] | None:
        try:
            answer = await self._http.post_json("/tokenize", {"content": text, "add_special": True})
            return tuple(answer["tokens"])
        except (Refused, Retryable, KeyError, TypeError):
            return None

    async def counters(self) -> Counters | None:
        """The mean of busy slots is over all decode calls since the start: total again, it can be
        subtracted.
        """
        response = await self._http.look("/metrics")
        if response is None:
            return None
        try:
            values = prometheus_values(response.text)
        except ValueError:
            return None
        steps, busy = values.get("llamacpp:n_decode_total"), values.get("llamacpp:n_busy_slots_per_decode")
        return Counters(
            running=values.get("llamacpp:requests_processing"),
            steps=steps,
            step_sessions=None if steps is None or busy is None else steps * busy,
        )

    async def close(self) -> None:
        await self._http.close()

    @staticmethod
    def _body(question: Question, *, stream: bool, cold: bool) -> dict[str, Any]:
        body: dict[str, Any] = {
            "prompt": question.prompt if isinstance(question.prompt, str) else list(question.prompt),
            "n_predict": question.max_tokens,
            "temperature": question.temperature,
            "seed": question.seed,
            "stop": list(question.stop),
            "cache_prompt": not cold,
            "n_probs": N_PROBS,
            "return_tokens": True,
            "stream": stream,
        }
        if question.n != 1:
            body["n_cmpl"] = question.n
        if question.repeat_penalty != 1.0:
            body["repeat_penalty"] = question.repeat_penalty
        if question.logit_bias:
            body["logit_bias"] = [[token, bias] for token, bias in question.logit_bias]
        return body

    async def generate(self, question: Question, *, stream: bool, cold: bool = False) -> AsyncIterator[Piece]:
        body = self._body(question, stream=stream, cold=cold)
        if not stream:
            answer = await self._http.post_json("/completion", body)
            for item in answer if isinstance(answer, list) else [answer]:
                yield _read(item, streamed=False)
            return
        ended = 0
        async with aclosing(self._http.stream_json("/completion", body)) as events:
            async for event in events:
                ended += bool(isinstance(event, dict) and event.get("stop"))
                yield _read(event, streamed=True)
        if ended < question.n:
            raise Refused("the stream ended without its last event", 200)


def _read(data: Any, *, streamed: bool) -> Piece:
    """A whole answer, or an event of a stream. Raises ``Refused`` for another form."""
    try:
        if "error" in data:
            raise Refused(
                f"the answer holds an error: {str(data['error'])[:200]}", data["error"].get("code", 500)
            )
        entries = data.get("completion_probabilities") or []
        ids = data.get("tokens") or []
        if streamed:
            # Of an event only the last token's position is known.
            begin = data["tokens_predicted"] - len(entries or ids)
            tokens = tuple(_token(item, begin + index) for index, item in enumerate(entries))
            if not entries:
                tokens = tuple(Token(position=begin + index, id=id_) for index, id_ in enumerate(ids))
        else:
            tokens = align_entries(ids, [_token(item, 0) for item in entries])
        timings = data.get("timings") or {}
        stop = data.get("stop_type")
        return Piece(
            index=data.get("index") or 0,
            text=data["content"],
            tokens=tokens,
            finish_reason=FINISH.get(stop, str(stop)) if data.get("stop") else "",
            total_tokens=data["tokens_predicted"],
            cached_tokens=timings.get("cache_n"),
            prompt_tokens=data.get("tokens_evaluated"),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise Refused(f"no answer in llama-server's form: {error!r} in {str(data)[:200]}", 200) from error


def align_entries(ids: Sequence[int], entries: Sequence[Token]) -> tuple[Token, ...]:
    """A token for each id. One that was held back has no entry, and its bytes are in a later one's.

    An entry's place is the first id of its own up to which as many bytes were generated as were sent with it.
    Raises ValueError where there is none.
    """
    spelled = {id_: data for entry in entries for id_, data in entry.spelled}
    tokens: list[Token] = []
    sent = 0
    for entry in entries:
        sent += len(entry.data)
        begin = end = len(tokens)
        while ids[end : end + 1] and (ids[end] != entry.id or not _has_bytes(ids[: end + 1], spelled, sent)):
            end += 1
        if end == len(ids):
            raise ValueError(f"token {entry.id} is shown, and is not among the ids from {begin} on")
        group = ids[begin : end + 1]
        is_split = 1 < len(group) == len(entry.data)
        parts = (
            [bytes([byte]) for byte in entry.data] if is_split else [b""] * (len(group) - 1) + [entry.data]
        )
        for index, id_ in enumerate(group[:-1]):
            tokens.append(Token(position=begin + index, id=id_, key=id_, data=parts[index]))
        tokens.append(replace(entry, position=end, data=parts[-1], spelled=()))
    rest = ids[len(tokens) :]  # held back to the end, or part of a stop string
    return (*tokens, *(Token(position=len(tokens) + i, id=id_, key=id_) for i, id_ in enumerate(rest)))


def _has_bytes(ids: Sequence[int], spelled: Mapping[int, bytes], count: int) -> bool:
    """Have these tokens ``count`` bytes? Those whose spelling is not known may have any number."""
    return any(id_ not in spelled for id_ in ids) or sum(len(spelled[id_]) for id_ in ids) >= count


def _token(item: dict[str, Any], position: int) -> Token:
    return Token(
        position=position,
        id=item["id"],
        key=item["id"],
        data=bytes(item["bytes"]),
        logprob=math.nan if item["logprob"] is None else float(item["logprob"]),
        top=tuple((entry["id"], float(entry["logprob"])) for entry in item["top_logprobs"]),
        spelled=tuple((entry["id"], bytes(entry["bytes"])) for entry in item["top_logprobs"]),
    )
