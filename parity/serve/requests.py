"""What a client asks, read from JSON and checked: every refusal is a
``BadRequest`` with a status and a sentence.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    WithJsonSchema,
)

from scheduler.records import Request, SamplingParams, ServiceLevel

MAX_STOPS = 16
MAX_TOP_LOGPROBS = 20
MAX_USER_CHARACTERS = 256
SHOWN_CHARACTERS = 60  # of a value that is refused: a megabyte is not sent back

# Fields that would change the answer and that are not offered: only their neutral values are accepted.
NEUTRAL: dict[str, Any] = {
    "n": 1,
    "best_of": 1,
    "echo": False,
    "suffix": "",
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "repetition_penalty": 1,
    "logit_bias": {},
    "min_p": 0,
    "min_tokens": 0,
    "tools": [],
    "functions": [],
    "tool_choice": "none",
    "response_format": {"type": "text"},
}
# Fields that by their nature change no answer of any server: accepted, whatever they say.
WITHOUT_EFFECT = frozenset(
    {
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "parallel_tool_calls",
        "cache_prompt",
    }
)


class BadRequest(Exception):
    """An answer of 4xx or 5xx in OpenAI's form."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        kind: str = "invalid_request_error",
        code: str | None = None,
        parameter: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.message, self.status, self.kind, self.code = message, status, kind, code
        self.parameter, self.retry_after_s = parameter, retry_after_s

    def body(self) -> dict[str, Any]:
        return {
            "error": {"message": self.message, "type": self.kind, "param": self.parameter, "code": self.code}
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One generation. ``logprobs`` None wants none, else so many alternatives per token."""

    prompt: tuple[int, ...]
    max_tokens: int
    sampling: SamplingParams
    stops: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    logprobs: int | None
    stream: bool
    include_usage: bool
    return_token_ids: bool
    is_chat: bool
    client_id: str
    priority: int
    slo: ServiceLevel = ServiceLevel()

    def to_request(self, request_id: str, *, arrival_ms: float) -> Request:
        return Request(
            request_id=request_id,
            prompt=self.prompt,
            max_tokens=self.max_tokens,
            sampling=self.sampling,
            client_id=self.client_id,
            priority=self.priority,
            arrival_ms=arrival_ms,
            slo=self.slo,
            stop_token_ids=self.stop_token_ids,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class AskLimits:
    """What the server allows and assumes. ``max_session_tokens`` bounds prompt and output together."""

    model_name: str
    n_vocab: int
    end_tokens: tuple[int, ...]
    max_session_tokens: int
    default_max_tokens: int
    default_seed: int


# -- What is honoured. A field that is not named here is refused by name, unless a table above has it.

Count = Annotated[int, Field(ge=1, le=2**31)]
Alternatives = Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)]
Milliseconds = Annotated[float, Field(ge=1e-3, le=1e12)]

# Of fields that are checked by hand, for the OpenAPI document.
ROLES = ("system", "developer", "user", "assistant", "tool")
TOKENS = {"type": "array", "items": {"type": "integer", "minimum": 0}}
PROMPT = {
    "anyOf": [
        {"type": "string"},
        TOKENS,
        {"type": "array", "items": {"anyOf": [{"type": "string"}, TOKENS]}, "minItems": 1, "maxItems": 1},
    ]
}
TEXT_PART = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
}
MESSAGES = {
    "type": "array",
    "minItems": 1,
    "items": {
        "type": "object",
        "properties": {
            "role": {"enum": list(ROLES)},
            "content": {"anyOf": [{"type": "string"}, {"type": "array", "items": TEXT_PART}]},
        },
        "required": ["role", "content"],
        "additionalProperties": {"type": "null"},
    },
}
STOP_TEXT = {"type": "string", "minLength": 1}
STOP = {
    "anyOf": [
        STOP_TEXT,
        {"type": "array", "items": STOP_TEXT, "maxItems": MAX_STOPS},
        {"type": "null"},
    ]
}
LOGPROBS = {
    "anyOf": [
        {"type": "integer", "minimum": 0, "maximum": MAX_TOP_LOGPROBS},
        {"const": False},
        {"type": "null"},
    ]
}


class StreamOptions(BaseModel):
    """``include_usage`` adds a chunk with the counts at the end of a stream."""

    model_config = ConfigDict(strict=True, extra="forbid")
    include_usage: bool | None = None


class Objectives(BaseModel):
    """Objectives that a policy is told of: from arrival to first token, and from emission to emission."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)
    ttft_ms: Milliseconds | None = None
    tbt_ms: Milliseconds | None = None


class SchedulingFields(BaseModel):
    """What a policy is told of beside prompt and length; no answer depends on it. A lower priority is
    favoured; ``user`` is the client whose service is counted.
    """

    user: Annotated[str, Field(max_length=MAX_USER_CHARACTERS)] | None = None
    priority: Annotated[int, Field(ge=-(2**31), le=2**31)] | None = None
    slo: Objectives | None = None


class SharedFields(SchedulingFields):
    """Fields of both kinds of generation; null is the same as absent."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)
    model: str | None = None
    max_tokens: Count | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=2**31)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=2**63)] | None = None
    stop: Annotated[Any, AfterValidator(lambda value: _stops(value)), WithJsonSchema(STOP)] = None
    stop_token_ids: list[Annotated[int, Field(ge=0)]] | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None


class CompletionFields(SharedFields):
    """Fields of /v1/completions; ``prompt`` is checked where it is tokenised."""

    prompt: Annotated[Any, WithJsonSchema(PROMPT)] = None
    logprobs: Annotated[
        Alternatives | None,
        BeforeValidator(lambda given: None if given is False else given),
        WithJsonSchema(LOGPROBS),
    ] = None

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def wanted_tokens(self) -> tuple[str, int | None]:
        return "max_tokens", self.max_tokens


class ChatFields(SharedFields):
    """Fields of /v1/chat/completions; ``messages`` are checked where they are rendered."""

    messages: Annotated[Any, WithJsonSchema(MESSAGES)] = None
    logprobs: bool | None = None
    top_logprobs: Alternatives | None = None
    max_completion_tokens: Count | None = None

    @property
    def num_logprobs(self) -> int | None:
        if not self.logprobs:
            if self.top_logprobs:
                raise BadRequest("top_logprobs needs logprobs", parameter="top_logprobs")
            return None
        return self.top_logprobs or 0

    @property
    def wanted_tokens(self) -> tuple[str, int | None]:
        if self.max_completion_tokens is None:
            return "max_tokens", self.max_tokens
        if self.max_tokens not in (None, self.max_completion_tokens):
            raise BadRequest(
                f"max_tokens={self.max_tokens} and max_completion_tokens={self.max_completion_tokens} differ",
                parameter="max_tokens",
            )
        return "max_completion_tokens", self.max_completion_tokens


def parse_json(body: bytes) -> dict[str, Any]:
    """The body as an object of Unicode text and finite numbers. Raises ``BadRequest``."""
    try:
        data = json.loads(body, parse_constant=_no_number)
        if b"\\u" in body:  # an escape can spell half a character, which no encoder takes
            json.dumps(data, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise BadRequest("the body holds a lone surrogate, which is no character") from None
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"the body is not JSON: {shown(error)}") from error
    if not isinstance(data, dict):
        raise BadRequest("the body is not a JSON object")
    return data


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


def shown(value: Any) -> str:
    """A refused value as it is sent back: cut off where it is long."""
    text = str(value) if isinstance(value, Exception) else repr(value)
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}... ({len(text)} characters)"


def read_fields(data: dict[str, Any], *, is_chat: bool) -> CompletionFields | ChatFields:
    """The fields by type and range; every one that is not honoured is refused. Raises ``BadRequest``."""
    try:
        fields = (ChatFields if is_chat else CompletionFields).model_validate(data)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = ".".join(part for part in first["loc"] if isinstance(part, str))[:SHOWN_CHARACTERS]
        raise BadRequest(f"{name}={shown(first['input'])}: {first['msg']}", parameter=name) from error
    for name, value in fields.model_extra.items():
        if value is None or name in WITHOUT_EFFECT:
            continue
        if name not in NEUTRAL:
            raise BadRequest(
                f"{shown(name)[1:-1]} is not supported by this server", parameter=name[:SHOWN_CHARACTERS]
            )
        if not _is_same(value, NEUTRAL[name]):
            raise BadRequest(
                f"{name}={shown(value)} is not supported, only {NEUTRAL[name]!r}", parameter=name
            )
    return fields


def _is_same(value: Any, neutral: Any) -> bool:
    """Equal and of the same kind: true is not the number 1."""
    return value == neutral and isinstance(value, bool) == isinstance(neutral, bool)


def read_ask(
    data: dict[str, Any], limits: AskLimits, *, is_chat: bool, tokenize: Callable[[dict[str, Any]], list[int]]
) -> Ask:
    """A checked request. ``tokenize`` turns the data's prompt or messages into
    token ids. Raises ``BadRequest``.

    Beyond OpenAI's fields a policy is told of ``user`` (the client whose service is counted), ``priority``
    (lower is favoured) and ``slo`` (``{"ttft_ms": ..., "tbt_ms": ...}``, objectives counted from arrival
    and from emission to emission).
    """
    fields = read_fields(data, is_chat=is_chat)
    if fields.model not in (None, limits.model_name):
        raise BadRequest(
            f"model {shown(fields.model)} is not served, {limits.model_name!r} is",
            status=404,
            code="model_not_found",
            parameter="model",
        )
    own_stops = tuple(fields.stop_token_ids or ())
    if any(token >= limits.n_vocab for token in own_stops):
        raise BadRequest(
            f"stop_token_ids holds an id that is not below {limits.n_vocab}", parameter="stop_token_ids"
        )
    num_logprobs = fields.num_logprobs
    wanted = fields.wanted_tokens
    prompt = tuple(tokenize(data))
    if not prompt:
        raise BadRequest("the prompt has no tokens", parameter="messages" if is_chat else "prompt")
    if any(not 0 <= token < limits.n_vocab for token in prompt):
        raise BadRequest(f"the prompt holds token ids outside 0 to {limits.n_vocab - 1}", parameter="prompt")
    slo = fields.slo or Objectives()
    return Ask(
        prompt=prompt,
        max_tokens=_max_tokens(*wanted, limits, len(prompt)),
        sampling=_sampling(fields, limits, prompt),
        stops=fields.stop or (),
        stop_token_ids=own_stops if fields.ignore_eos else (*limits.end_tokens, *own_stops),
        logprobs=num_logprobs,
        stream=bool(fields.stream),
        include_usage=bool(fields.stream_options and fields.stream_options.include_usage),
        return_token_ids=bool(fields.return_token_ids),
        is_chat=is_chat,
        client_id=fields.user or "default",
        priority=fields.priority or 0,
        slo=ServiceLevel(ttft_ms=slo.ttft_ms, tbt_ms=slo.tbt_ms),
    )


def _max_tokens(name: str, wanted: int | None, limits: AskLimits, prompt_tokens: int) -> int:
    room = limits.max_session_tokens - prompt_tokens
    if wanted is None:
        wanted = min(limits.default_max_tokens, max(room, 1))
    if wanted > room:
        raise BadRequest(
            f"this server holds {limits.max_session_tokens} tokens per request; "
            f"the prompt has {prompt_tokens} and {name} asks for {wanted}: {prompt_tokens + wanted} in all",
            code="context_length_exceeded",
            parameter=name,
        )
    return wanted


def _sampling(fields: SharedFields, limits: AskLimits, prompt: tuple[int, ...]) -> SamplingParams:
    """Sampling keyed by (seed, prompt, position): the same question has the same
    answer, whoever else is served.
    """
    temperature = 1.0 if fields.temperature is None else fields.temperature
    if temperature == 0:
        return SamplingParams()
    return SamplingParams(
        temperature=temperature,
        seed=limits.default_seed if fields.seed is None else fields.seed,
        top_k=max(0, fields.top_k or 0),
        top_p=max(1.0 if fields.top_p is None else fields.top_p, 1e-9),
        key=hashlib.blake2b(json.dumps(prompt).encode(), digest_size=16).hexdigest(),
    )


def _stops(value: Any) -> tuple[str, ...]:
    stops = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) and stop for stop in stops):
        raise ValueError("neither a string nor a list of non-empty strings")
    if len(stops) > MAX_STOPS:
        raise ValueError(f"{len(stops)} strings, at most {MAX_STOPS} are allowed")
    return tuple(stops)


def is_token(value: Any) -> bool:
    """Is it a non-negative integer (and not a boolean)?"""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
