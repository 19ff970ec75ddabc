"""Any OpenAI-compatible server; with what vLLM, SGLang and our own ``serve`` show beyond that."""

from __future__ import annotations

import json
import math
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any
from uuid import uuid4

from parity.endpoint.answers import Piece, Token, bytes_key, text_key
from parity.endpoint.case import Question
from parity.endpoint.http_access import EndpointAccess, HttpAccess, prometheus_values
from parity.endpoint.system import Counters, Refused, Retryable, SystemFacts
from parity.errors import UsageError

# What to ask for beyond text, richest first; a server that refuses one is asked for less. OpenAI's
# completions allow five alternatives. vLLM: ``return_token_ids`` adds the ids, ``return_tokens_as_token_ids``
# names tokens by them.
EXTRAS: tuple[dict[str, Any], ...] = (
    {"logprobs": 5, "return_token_ids": True, "return_tokens_as_token_ids": True},
    {"logprobs": 5},
    {"logprobs": 2},
    {"return_token_ids": True},
    {},
)
ID_NAME = "token_id:"  # vLLM's form of a token's name
# Gauges of how many requests run, by software, as their documents name them.
RUNNING_GAUGES = {
    "vllm": "vllm:num_requests_running",
    "sglang": "sglang:num_running_reqs",
    "samebytes": "samebytes_running",
    "llama-server": "llamacpp:requests_processing",
}


@dataclass(slots=True)
class _Progress:
    """How many tokens of each choice have come."""

    tokens: dict[int, int]


class OpenAiSystem:
    """Asks ``/v1/completions``, or ``/v1/chat/completions`` where the access says chat."""

    def __init__(self, access: EndpointAccess) -> None:
        self.access = access
        self._http = HttpAccess(access)
        self._path = "/v1/chat/completions" if access.chat else "/v1/completions"
        self._extras: dict[str, Any] = {}
        self._kind = "openai"
        self.facts = SystemFacts(kind="openai", model=access.model)

    # -- what it is

    async def open(self) -> SystemFacts:
        """Learn what the server is, gives and takes by asking for one token. Raises ``UsageError``."""
        answer = await self._find_extras()
        self._kind, version, counts = await self._find_software()
        model = await self._find_model()
        tokens = [token for piece in answer for token in piece.tokens]
        self.facts = SystemFacts(
            kind=self._kind,
            version=version,
            model=self.access.model,
            context_tokens=model.get("max_model_len") or (model.get("meta") or {}).get("n_ctx"),
            shows_token_ids=any(token.id is not None for token in tokens),
            shows_logprobs=any(not math.isnan(token.logprob) for token in tokens),
            shows_top=any(len(token.top) > 1 for token in tokens),
            shows_cached_tokens=any(piece.cached_tokens is not None for piece in answer),
            shows_counters=counts,
            takes_n=await self._takes({"n": 2}),
            can_ask_cold=self._kind == "vllm",
        )
        return self.facts

    async def _find_extras(self) -> list[Piece]:
        error: Exception | None = None
        question = Question(prompt="river stone lamp", max_tokens=1)
        for extras in EXTRAS:
            self._extras = extras
            try:
                return [piece async for piece in self.generate(question, stream=False)]
            except Refused as refused:
                error = refused
            except Retryable as failure:
                raise UsageError(
                    "the server does not answer", where=self.access.url, why=str(failure)
                ) from failure
        raise UsageError("the server refuses a plain request", where=self.access.url, why=str(error))

    async def _takes(self, fields: dict[str, Any]) -> bool:
        body = {**self._body(Question(prompt="river", max_tokens=1), stream=False, cold=False), **fields}
        try:
            answer = await self._http.post_json(self._path, body)
            return len(answer["choices"]) > 1
        except (Refused, Retryable, KeyError, TypeError, AttributeError):
            return False

    async def _find_software(self) -> tuple[str, str, bool]:
        """Kind, version, and whether it counts what runs."""
        counted: dict[str, float] = {}
        if (response := await self._http.look("/metrics")) is not None:
            try:
                counted = prometheus_values(response.text)
            except ValueError:
                counted = {}
        kind = next((kind for kind, gauge in RUNNING_GAUGES.items() if gauge in counted), "openai")
        version = ""
        if kind in ("openai", "vllm"):
            version = str((await self._http.look_json("/version")).get("version", ""))
        elif kind == "sglang":
            version = str((await self._http.look_json("/get_server_info")).get("version", ""))
        return kind, version, kind != "openai"

    async def _find_model(self) -> dict[str, Any]:
        models = (await self._http.look_json("/v1/models")).get("data") or []
        named = [item for item in models if isinstance(item, dict) and item.get("id") == self.access.model]
        return named[0] if named else {}

    async def tokenize(self, text: str) -> tuple[int, ...] | None:
        """vLLM has ``/tokenize``; prompts are given back as texts to the others."""
        return None

    async def counters(self) -> Counters | None:
        gauge = RUNNING_GAUGES.get(self._kind)
        response = await self._http.look("/metrics") if gauge is not None else None
        if response is None:
            return None
        try:
            return Counters(running=prometheus_values(response.text).get(gauge))
        except ValueError:
            return None

    async def close(self) -> None:
        await self._http.close()

    # -- one question

    def _body(self, question: Question, *, stream: bool, cold: bool) -> dict[str, Any]:
        extras = dict(self._extras)
        body: dict[str, Any] = {
            "model": self.access.model,
            "max_tokens": question.max_tokens,
            "temperature": question.temperature,
            "stream": stream,
        }
        if self.access.chat:
            body["messages"] = [{"role": "user", "content": question.prompt}]
            if "logprobs" in extras:
                extras |= {"logprobs": True, "top_logprobs": extras["logprobs"]}
        else:
            body["prompt"] = question.prompt if isinstance(question.prompt, str) else list(question.prompt)
        if stream:
            body["stream_options"] = {"include_usage": True}
        if question.temperature > 0:
            body["seed"] = question.seed
        if question.stop:
            body["stop"] = list(question.stop)
        if question.n != 1:
            body["n"] = question.n
        if cold and self._kind == "vllm":
            body["cache_salt"] = f"cold {uuid4()}"  # a salt of its own shares no blocks with anybody
        return {**body, **extras}

    async def generate(self, question: Question, *, stream: bool, cold: bool = False) -> AsyncIterator[Piece]:
        body = self._body(question, stream=stream, cold=cold)
        progress = _Progress({})
        if not stream:
            for piece in self._read(await self._http.post_json(self._path, body), progress):
                yield piece
            return
        finished: dict[int, bool] = {}
        async with aclosing(self._http.stream_json(self._path, body)) as events:
            async for event in events:
                for piece in self._read(event, progress):
                    finished[piece.index] = finished.get(piece.index, False) or bool(piece.finish_reason)
                    yield piece
        if not finished or not all(finished.values()):
            raise Refused("the stream ended without a finish reason", 200)

    def _read(self, data: Any, progress: _Progress) -> list[Piece]:
        """The pieces of an answer or of a chunk. Raises ``Refused`` for another form."""
        try:
            if "error" in data:
                raise Refused(f"the answer holds an error: {json.dumps(data['error'])[:200]}", _status(data))
            usage = data.get("usage") or {}
            pieces = [self._read_choice(choice, progress) for choice in data.get("choices") or ()]
            if not pieces and not usage and "choices" not in data:
                raise ValueError("it has no choices")
            counts = {
                "cached_tokens": (usage.get("prompt_tokens_details") or {}).get("cached_tokens"),
                "prompt_tokens": usage.get("prompt_tokens"),
            }
            if len(progress.tokens) == 1:  # of several choices usage says the sum
                counts["index"] = next(iter(progress.tokens))
                counts["total_tokens"] = usage.get("completion_tokens")
            if pieces and usage:
                pieces[-1] = replace(pieces[-1], **counts)
            elif usage:
                pieces = [Piece(**counts)]
            return pieces
        except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
            raise Refused(f"no answer in OpenAI's form: {error!r} in {str(data)[:200]}", 200) from error

    @staticmethod
    def _read_choice(choice: dict[str, Any], progress: _Progress) -> Piece:
        index = choice.get("index") or 0
        source = choice.get("message") or choice.get("delta") or choice
        text = (source.get("content") if source is not choice else choice.get("text")) or ""
        thought = source.get("reasoning_content") or source.get("reasoning") or ""
        if not isinstance(text, str) or not isinstance(thought, str):
            raise ValueError(f"the text is {json.dumps(text)}")
        begin = progress.tokens.get(index, 0)
        tokens = read_tokens(choice.get("logprobs"), choice.get("token_ids"), begin)
        progress.tokens[index] = begin + len(tokens)
        return Piece(
            index=index,
            text=text,
            reasoning=thought,
            tokens=tokens,
            finish_reason=str(choice.get("finish_reason") or ""),
        )


def _status(data: dict[str, Any]) -> int:
    code = data["error"].get("code") if isinstance(data["error"], dict) else None
    return code if isinstance(code, int) else 500


def read_tokens(logprobs: Any, ids: list[int] | None, begin: int) -> tuple[Token, ...]:
    """The tokens of a choice: chat's ``content``, or completions' parallel lists, with ids where they are
    given.

    Raises KeyError, TypeError, ValueError or AttributeError for another form.
    """
    shown: list[Token] = []
    if logprobs and logprobs.get("content") is not None:
        # llama-server gives this form for completions too, with ids in it.
        for item in logprobs["content"]:
            top = _pairs((_entry_key(entry), entry["logprob"]) for entry in item.get("top_logprobs") or ())
            data = None if item.get("bytes") is None else bytes(item["bytes"])
            shown.append(
                Token(
                    position=begin + len(shown),
                    id=item.get("id", _id_of_name(item["token"])),
                    key=_entry_key(item),
                    data=data,
                    logprob=_number(item["logprob"]),
                    top=top,
                )
            )
    elif logprobs and logprobs.get("tokens"):
        names = logprobs["tokens"]
        values = logprobs.get("token_logprobs") or [None] * len(names)
        tops = logprobs.get("top_logprobs") or [None] * len(names)
        for name, value, top in zip(names, values, tops, strict=True):
            shown.append(
                Token(
                    position=begin + len(shown),
                    id=_id_of_name(name),
                    key=_name_key(name),
                    logprob=_number(value),
                    top=_pairs((_name_key(key), number) for key, number in (top or {}).items()),
                )
            )
    if not ids:
        return tuple(shown)
    if not shown:
        return tuple(Token(position=begin + i, id=id_) for i, id_ in enumerate(ids))
    if len(ids) != len(shown):
        raise ValueError(f"{len(ids)} token ids and {len(shown)} log probabilities")
    return tuple(replace(token, id=id_) for token, id_ in zip(shown, ids, strict=True))


def _pairs(pairs: Any) -> tuple[tuple[Any, float], ...]:
    """Known names with their numbers, best first; of one name the better."""
    best: dict[Any, float] = {}
    for key, value in pairs:
        if key is not None and value is not None and value > best.get(key, -math.inf):
            best[key] = float(value)
    return tuple(sorted(best.items(), key=lambda item: -item[1]))


def _number(value: float | None) -> float:
    return math.nan if value is None else float(value)


def _id_of_name(name: str) -> int | None:
    return (
        int(name.removeprefix(ID_NAME))
        if name.startswith(ID_NAME) and name[len(ID_NAME) :].isdigit()
        else None
    )


def _name_key(name: str) -> int | str | None:
    number = _id_of_name(name)
    return text_key(name) if number is None else number


def _entry_key(entry: dict[str, Any]) -> int | str | None:
    if "id" in entry:
        return entry["id"]
    number = _id_of_name(entry["token"])
    if number is not None:
        return number
    return bytes_key(entry["bytes"]) if entry.get("bytes") is not None else text_key(entry["token"])
