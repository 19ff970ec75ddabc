"""One load for a llama-server that reaches every planted fault, and what its answers are compared with."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from parity.systems.server_process import ServerProcess

OUTPUT_TOKENS = 32
TIMEOUT_S = 60.0
LONG_STREAM = {"stream": True, "n_predict": 128}
# Longer than what a sliding window's cells hold.
LONG = {"n_predict": 96}
# llama-server holds a token back that is part of a character only, and shows no log probability of it: with
# ASCII alone each token has its own. What is shown is taken before the bias.
NO_PART_OF_A_CHARACTER = tuple([token, False] for token in range(128, 256))


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One request: prompt as token ids, further fields of ``/completion``; ``leave_after`` tokens the
    client is gone (None: it stays).
    """

    name: str
    prompt: tuple[int, ...]
    fields: dict[str, Any] = field(default_factory=dict)
    leave_after: int | None = None

    def body(self, *, cache_prompt: bool) -> dict[str, Any]:
        """The request as llama-server takes it; greedy unless ``fields`` says otherwise."""
        plain = {"n_predict": OUTPUT_TOKENS, "temperature": 0.0, "n_probs": 2, "return_tokens": True}
        fields = {**plain, "prompt": list(self.prompt), "cache_prompt": cache_prompt, **self.fields}
        return {**fields, "logit_bias": [*fields.get("logit_bias", ()), *NO_PART_OF_A_CHARACTER]}


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One answer: text, token ids, and the log probability of each token that the server shows one for."""

    text: str
    ids: tuple[int, ...]
    shown: tuple[tuple[int, float], ...]


Answers = dict[str, tuple[Choice, ...]]


def draw_prompt(draw: random.Random, length: int) -> tuple[int, ...]:
    """Random letters; ids of the tiny models are bytes."""
    return tuple(draw.randrange(97, 123) for _ in range(length))


def first_waves(seed: int) -> list[list[Ask]]:
    """Three waves of eight at once: shared prefixes; unrelated prompts with every setting; the first wave
    again, and clients that leave.
    """
    draw = random.Random(seed)
    shared = [draw_prompt(draw, 40), draw_prompt(draw, 40)]
    tails = [draw_prompt(draw, 9) for _ in range(8)]
    branches = [Ask(name=f"branch{i}", prompt=shared[i % 2] + tails[i], fields=LONG) for i in range(8)]
    settings: list[dict[str, Any]] = [
        {"temperature": 1.5, "seed": 11},
        {"temperature": 1.5, "seed": 12},
        {"temperature": 1.5, "seed": 13},
        {"repeat_penalty": 1.5, "repeat_last_n": 64},
        {"repeat_penalty": 1.5, "repeat_last_n": 64},
        {"logit_bias": [[token, 3.0] for token in range(48, 58)]},
        {"stream": True},
    ]
    others = [
        Ask(name=f"setting{i}", prompt=draw_prompt(draw, 45), fields=each) for i, each in enumerate(settings)
    ]
    again = [Ask(name=f"again{i}", prompt=branches[i].prompt, fields=LONG_STREAM) for i in range(4)]
    streams = [Ask(name=f"stream{i}", prompt=draw_prompt(draw, 30), fields=LONG_STREAM) for i in range(2)]
    leavers = [
        Ask(name=f"leaver{i}", prompt=draw_prompt(draw, 50), fields={"n_predict": 400}, leave_after=3)
        for i in range(2)
    ]
    return [branches, others, again + streams + leavers]


def later_waves(seed: int, first: Sequence[Sequence[Ask]], alone: Answers) -> list[list[Ask]]:
    """Two waves that build on what was answered: conversations that go on, also those of clients that left,
    stop strings, two completions of one prompt, sampled ones again.
    """
    draw = random.Random(seed + 1)
    asked = {ask.name: ask for wave in first for ask in wave}

    def go_on(name: str, count: int | None = None) -> tuple[int, ...]:
        return asked[name].prompt + alone[name][0].ids[:count] + draw_prompt(draw, 7)

    turns = [Ask(name=f"turn{i}", prompt=go_on(f"branch{i}")) for i in range(4)]
    returned = [Ask(name=f"returned{i}", prompt=go_on(f"leaver{i}", 2)) for i in range(2)]
    # A token that the answer has for the first time in its second half, as text: a stop string that is met.
    stops = []
    for i in range(4, 8):
        choice = alone[f"branch{i}"][0]
        words = [chr(token) for token in choice.ids[8:24] if 33 <= token < 127]
        if words:
            stops.append(Ask(name=f"stop{i}", prompt=asked[f"branch{i}"].prompt, fields={"stop": words[:1]}))
    pairs = [Ask(name=f"pair{i}", prompt=draw_prompt(draw, 40), fields={"n_cmpl": 2}) for i in range(2)]
    sampled = [
        Ask(name=f"sampled{i}", prompt=asked[f"setting{i}"].prompt, fields=asked[f"setting{i}"].fields)
        for i in range(3)
    ]
    return [turns + returned + stops[:2], pairs + sampled + stops[2:], first[1]]


async def ask_one(client: httpx.AsyncClient, ask: Ask, *, cache_prompt: bool) -> tuple[Choice, ...]:
    """The answer to one request; what a client saw that left is not an answer and empty."""
    body = ask.body(cache_prompt=cache_prompt)
    if ask.leave_after is not None or body.get("stream"):
        chunks = []
        async with client.stream("POST", "/completion", json={**body, "stream": True}) as response:
            response.raise_for_status()
            async for line in response.aiter_lines():
                if line.startswith("data: "):
                    chunks.append(json.loads(line.removeprefix("data: ")))
                    if ask.leave_after is not None and len(chunks) > ask.leave_after:
                        return ()
        return (
            read_choice(
                {
                    "content": "".join(chunk.get("content", "") for chunk in chunks),
                    "tokens": [token for chunk in chunks for token in chunk.get("tokens", ())],
                    "completion_probabilities": [
                        each for chunk in chunks[:-1] for each in chunk.get("completion_probabilities", ())
                    ],
                }
            ),
        )
    response = await client.post("/completion", json=body)
    response.raise_for_status()
    answer = response.json()
    return tuple(read_choice(each) for each in (answer if isinstance(answer, list) else [answer]))


def read_choice(answer: dict[str, Any]) -> Choice:
    """llama-server's record of one completion."""
    shown = tuple((each["id"], each["logprob"]) for each in answer.get("completion_probabilities", ()))
    return Choice(text=answer["content"], ids=tuple(answer["tokens"]), shown=shown)


async def keep_busy(client: httpx.AsyncClient, companion: Ask, begun: asyncio.Event) -> None:
    """Stream answers to one request again and again until cancelled; ``begun`` is set at the first token."""
    while True:
        async with client.stream("POST", "/completion", json=companion.body(cache_prompt=False)) as response:
            response.raise_for_status()
            async for line in response.aiter_lines():
                if line.startswith("data: ") and json.loads(line.removeprefix("data: ")).get("tokens"):
                    begun.set()


@contextlib.asynccontextmanager
async def busy_with(client: httpx.AsyncClient, companion: Ask) -> AsyncIterator[None]:
    """A stream that has begun and goes on, so that whatever is asked meanwhile does
    not run alone; left at the end.
    """
    begun = asyncio.Event()
    worker = asyncio.create_task(keep_busy(client, companion, begun))
    waiter = asyncio.create_task(begun.wait())
    try:
        await asyncio.wait([worker, waiter], return_when=asyncio.FIRST_COMPLETED)
        if not begun.is_set():
            worker.result()  # raises what went wrong
        yield
    finally:
        for task in (worker, waiter):
            task.cancel()
        await asyncio.gather(worker, waiter, return_exceptions=True)


async def ask_waves(server: ServerProcess, waves: Sequence[Sequence[Ask]], *, at_once: bool) -> Answers:
    """Each wave's requests together and beside a companion, or one after the other with no cache. A refused
    request raises ``httpx.HTTPStatusError``.
    """
    answers: Answers = {}
    # A kept connection may be closed by the server in the moment of the next request.
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    companion = Ask(
        name="companion", prompt=tuple(range(97, 123)), fields={"stream": True, "n_predict": 1900}
    )
    async with httpx.AsyncClient(
        base_url=server.url, timeout=TIMEOUT_S, limits=limits, trust_env=False
    ) as client:
        for number, wave in enumerate(waves):
            if at_once:
                async with busy_with(client, companion):
                    got = await asyncio.gather(*(ask_one(client, ask, cache_prompt=True) for ask in wave))
            else:
                # A client that will leave stays here: what follows needs its whole answer.
                whole = [Ask(name=ask.name, prompt=ask.prompt, fields=ask.fields) for ask in wave]
                got = [await ask_one(client, ask, cache_prompt=False) for ask in whole]
            for ask, choices in zip(wave, got, strict=True):
                answers[f"{ask.name}@{number}" if ask.name in answers else ask.name] = choices
    return answers


def count_other_answers(answers: Answers, alone: Answers) -> tuple[int, int]:
    """How many requests that were answered have another text, and how many have other token ids."""
    answered = [name for name, choices in answers.items() if choices]
    texts = sum(
        [choice.text for choice in answers[name]] != [choice.text for choice in alone[name]]
        for name in answered
    )
    ids = sum(
        [choice.ids for choice in answers[name]] != [choice.ids for choice in alone[name]]
        for name in answered
    )
    return texts, ids


def largest_distance(answers: Answers, alone: Answers) -> float:
    """Largest difference of two log probabilities of the same token after the same tokens."""
    largest = 0.0
    for name, choices in answers.items():
        for mine, other in zip(choices, alone[name], strict=False):
            for (token, logprob), (other_token, other_logprob) in zip(mine.shown, other.shown, strict=False):
                if token != other_token:
                    break
                largest = max(largest, abs(logprob - other_logprob))
    return largest
