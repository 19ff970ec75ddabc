"""What a client asks, read from JSON and checked: every refusal is a
``BadRequest`` with a status and a sentence.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from scheduler.records import Request, SamplingParams, ServiceLevel

MAX_STOPS = 16
MAX_TOP_LOGPROBS = 20
# Parameters that would change the answer and that are not offered: only their neutral values are accepted.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "min_p": (0,),
    "min_tokens": (0,),
    "tools": ([],),
    "functions": ([],),
    "response_format": ({"type": "text"},),
}


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


def parse_json(body: bytes) -> dict[str, Any]:
    """The body as an object. Raises ``BadRequest``."""
    try:
        data = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"the body is not JSON: {error}") from error
    if not isinstance(data, dict):
        raise BadRequest("the body is not a JSON object")
    return data


def read_ask(
    data: dict[str, Any], limits: AskLimits, *, is_chat: bool, tokenize: Callable[[dict[str, Any]], list[int]]
) -> Ask:
    """A checked request. ``tokenize`` turns the data's prompt or messages into
    token ids. Raises ``BadRequest``.

    Beyond OpenAI's fields a policy is told of ``user`` (the client whose service is counted), ``priority``
    (lower is favoured) and ``slo`` (``{"ttft_ms": ..., "tbt_ms": ...}``, objectives counted from arrival and
    from emission to emission).
    """
    model = data.get("model", limits.model_name)
    if model != limits.model_name:
        raise BadRequest(
            f"model {model!r} is not served, {limits.model_name!r} is",
            status=404,
            code="model_not_found",
            parameter="model",
        )
    for name, neutral in NEUTRAL.items():
        value = data.get(name)
        if value is not None and value not in neutral:
            raise BadRequest(f"{name}={value!r} is not supported, only {neutral[0]!r}", parameter=name)
    prompt = tuple(tokenize(data))
    if not prompt:
        raise BadRequest("the prompt has no tokens", parameter="messages" if is_chat else "prompt")
    if any(not 0 <= token < limits.n_vocab for token in prompt):
        raise BadRequest(f"the prompt holds token ids outside 0 to {limits.n_vocab - 1}", parameter="prompt")
    options = data.get("stream_options") or {}
    if not isinstance(options, dict):
        raise BadRequest("stream_options is not an object", parameter="stream_options")
    own_stops = _token_list(data, "stop_token_ids", limits)
    return Ask(
        prompt=prompt,
        max_tokens=_max_tokens(data, limits, len(prompt), is_chat=is_chat),
        sampling=_sampling(data, limits, prompt),
        stops=_stops(data),
        stop_token_ids=own_stops if _flag(data, "ignore_eos") else (*limits.end_tokens, *own_stops),
        logprobs=_logprobs(data, is_chat=is_chat),
        stream=_flag(data, "stream"),
        include_usage=bool(options.get("include_usage")),
        return_token_ids=_flag(data, "return_token_ids"),
        is_chat=is_chat,
        client_id=_user(data),
        priority=_integer(data, "priority", 0, low=-(2**31), high=2**31),
        slo=_slo(data),
    )


def _max_tokens(data: dict[str, Any], limits: AskLimits, prompt_tokens: int, *, is_chat: bool) -> int:
    name = (
        "max_completion_tokens" if is_chat and data.get("max_completion_tokens") is not None else "max_tokens"
    )
    room = limits.max_session_tokens - prompt_tokens
    default = min(limits.default_max_tokens, max(room, 1))
    wanted = _integer(data, name, default, low=1, high=2**31)
    if wanted > room:
        raise BadRequest(
            f"this server holds {limits.max_session_tokens} tokens per request; "
            f"the prompt has {prompt_tokens} and {name} asks for {wanted}: {prompt_tokens + wanted} in all",
            code="context_length_exceeded",
            parameter=name,
        )
    return wanted


def _sampling(data: dict[str, Any], limits: AskLimits, prompt: tuple[int, ...]) -> SamplingParams:
    """Sampling keyed by (seed, prompt, position): the same question has the same
    answer, whoever else is served.
    """
    temperature = _number(data, "temperature", 1.0, low=0.0, high=100.0)
    if temperature == 0:
        return SamplingParams()
    top_p = _number(data, "top_p", 1.0, low=0.0, high=1.0)
    key = hashlib.blake2b(json.dumps(prompt).encode(), digest_size=16).hexdigest()
    return SamplingParams(
        temperature=temperature,
        seed=_integer(data, "seed", limits.default_seed, low=-(2**63)),
        top_k=max(0, _integer(data, "top_k", 0, low=-1, high=2**31)),
        top_p=max(top_p, 1e-9),
        key=key,
    )


def _stops(data: dict[str, Any]) -> tuple[str, ...]:
    value = data.get("stop")
    stops = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) and stop for stop in stops):
        raise BadRequest("stop is neither a string nor a list of non-empty strings", parameter="stop")
    if len(stops) > MAX_STOPS:
        raise BadRequest(f"stop has {len(stops)} strings, at most {MAX_STOPS} are allowed", parameter="stop")
    return tuple(stops)


def _logprobs(data: dict[str, Any], *, is_chat: bool) -> int | None:
    value = data.get("logprobs")
    if value is None or value is False:
        return None
    if is_chat:
        if value is not True:
            raise BadRequest("logprobs is not a boolean", parameter="logprobs")
        return _integer(data, "top_logprobs", 0, low=0, high=MAX_TOP_LOGPROBS)
    return _integer(data, "logprobs", 0, low=0, high=MAX_TOP_LOGPROBS)


def _token_list(data: dict[str, Any], name: str, limits: AskLimits) -> tuple[int, ...]:
    value = data.get(name) or []
    if not isinstance(value, list) or not all(is_token(item) and item < limits.n_vocab for item in value):
        raise BadRequest(f"{name} is not a list of token ids below {limits.n_vocab}", parameter=name)
    return tuple(value)


def is_token(value: Any) -> bool:
    """Is it a non-negative integer (and not a boolean)?"""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _user(data: dict[str, Any]) -> str:
    user = data.get("user") or "default"
    if not isinstance(user, str) or len(user) > 256:
        raise BadRequest("user is not a string of at most 256 characters", parameter="user")
    return user


def _slo(data: dict[str, Any]) -> ServiceLevel:
    value = data.get("slo")
    if value is None:
        return ServiceLevel()
    names = ("ttft_ms", "tbt_ms")
    if not isinstance(value, dict) or any(name not in names for name in value):
        raise BadRequest(f"slo is not an object of {' and '.join(names)}", parameter="slo")
    limits = {}
    for name in names:
        if value.get(name) is not None:
            at = f"slo.{name}"
            limits[name] = _number({at: value[name]}, at, 0.0, low=1e-3, high=1e12)
    return ServiceLevel(**limits)


def _flag(data: dict[str, Any], name: str) -> bool:
    value = data.get(name)
    if value is not None and not isinstance(value, bool):
        raise BadRequest(f"{name} is not a boolean", parameter=name)
    return bool(value)


def _integer(data: dict[str, Any], name: str, default: int, *, low: int, high: int = 2**63) -> int:
    value = data.get(name)
    if value is None:
        return default
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise BadRequest(f"{name}={value!r} is not an integer from {low} to {high}", parameter=name)
    return value


def _number(data: dict[str, Any], name: str, default: float, *, low: float, high: float) -> float:
    value = data.get(name)
    if value is None:
        return default
    if not isinstance(value, int | float) or isinstance(value, bool) or not low <= value <= high:
        raise BadRequest(f"{name}={value!r} is not a number from {low} to {high}", parameter=name)
    return float(value)
