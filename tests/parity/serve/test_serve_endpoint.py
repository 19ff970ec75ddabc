"""The endpoint as real clients see it: the OpenAI library and plain HTTP."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest

from parity.engines.numerics import ROW
from parity.models import resolve_model
from parity.run.oracle import Oracle, Question
from parity.serve.app import AppSettings
from parity.serve.served_model import ServedModel
from tests.parity.serve.conftest import client_of

PROMPT = "the river under the bridge"
GREEDY = {"model": "llama", "prompt": PROMPT, "max_tokens": 24, "temperature": 0}


def test_completion_is_what_the_oracle_gives_alone(client: openai.OpenAI, served: ServedModel) -> None:
    answer = client.completions.create(**GREEDY, extra_body={"return_token_ids": True})
    oracle = Oracle(served.model, resolve_model("llama").sha256, ROW, shadow=False)
    prompt = tuple(served.model.tokenize(PROMPT))
    solo = oracle.solo(Question(prompt=prompt, max_tokens=24, stop_token_ids=served.model.end_tokens()))
    oracle.close()
    choice = answer.choices[0]
    assert tuple(choice.token_ids) == solo.tokens
    assert choice.text == b"".join(map(served.model.token_bytes, solo.tokens)).decode(errors="replace")
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(prompt), len(solo.tokens))


def test_stream_is_the_whole_answer_in_pieces(client: openai.OpenAI) -> None:
    whole = client.completions.create(**GREEDY)
    chunks = list(client.completions.create(**GREEDY, stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].text for c in chunks if c.choices) == whole.choices[0].text
    assert chunks[-1].usage == whole.usage
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "length"
    assert len(chunks) > 5


def test_chat_streams_what_it_answers_whole(client: openai.OpenAI) -> None:
    ask = {
        "model": "llama",
        "messages": [{"role": "user", "content": "hello"}],
        "max_tokens": 12,
        "temperature": 0,
    }
    whole = client.chat.completions.create(**ask, logprobs=True, top_logprobs=2)
    chunks = list(client.chat.completions.create(**ask, stream=True))
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    entries = whole.choices[0].logprobs.content
    assert len(entries) == 12 and all(entry.logprob == entry.top_logprobs[0].logprob for entry in entries)


def test_stop_string_across_tokens_is_never_shown(client: openai.OpenAI) -> None:
    text = client.completions.create(**GREEDY).choices[0].text
    stop = text[5:9]  # one token is at most one character here, so it crosses token boundaries
    expected = text[: text.index(stop)]
    answer = client.completions.create(**GREEDY, stop=[stop])
    streamed = client.completions.create(**GREEDY, stop=[stop], stream=True)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (expected, "stop")
    assert "".join(chunk.choices[0].text for chunk in streamed) == expected
    assert answer.usage.completion_tokens < 24


def test_stop_token_ends_the_answer_and_is_not_shown(client: openai.OpenAI, served: ServedModel) -> None:
    ids = client.completions.create(**GREEDY, extra_body={"return_token_ids": True}).choices[0].token_ids
    answer = client.completions.create(**GREEDY, extra_body={"stop_token_ids": [ids[6]]})
    end = ids.index(ids[6])
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].text == b"".join(map(served.model.token_bytes, ids[:end])).decode(
        errors="replace"
    )


def test_token_prompt_and_text_prompt_have_the_same_answer(
    client: openai.OpenAI, served: ServedModel
) -> None:
    tokens = served.model.tokenize(PROMPT)
    by_tokens = client.completions.create(**{**GREEDY, "prompt": tokens})
    assert by_tokens.choices[0].text == client.completions.create(**GREEDY).choices[0].text


def test_sampled_answer_depends_on_seed_and_prompt_alone(client: openai.OpenAI) -> None:
    def answer(**changes: Any) -> str:
        return (
            client.completions.create(**{**GREEDY, "temperature": 0.9, "seed": 1, **changes}).choices[0].text
        )

    assert answer() == answer()
    assert answer() != answer(seed=2)
    assert answer() != answer(temperature=0)


def test_logprobs_of_a_completion_add_up(client: openai.OpenAI) -> None:
    logprobs = client.completions.create(**GREEDY, logprobs=3).choices[0].logprobs
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == len(logprobs.top_logprobs) == 24
    for token, value, top in zip(
        logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True
    ):
        assert top[token] == value == max(top.values())


def test_oversize_prompt_is_a_400_with_numbers(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="8001 tokens.*9000"):
        client.completions.create(**{**GREEDY, "max_tokens": 9000})


def test_unknown_model_and_route_are_404s_in_openai_form(client: openai.OpenAI, url: str) -> None:
    with pytest.raises(openai.NotFoundError, match="not served"):
        client.completions.create(**{**GREEDY, "model": "other"})
    answer = httpx.get(f"{url}/v1/nothing")
    assert answer.status_code == 404 and "Not Found" in answer.json()["error"]["message"]


def test_models_and_health_say_what_is_served(client: openai.OpenAI, url: str) -> None:
    assert [model.id for model in client.models.list()] == ["llama"]
    assert httpx.get(f"{url}/health").json() == {"status": "ok"}


def test_metrics_count_what_was_served(client: openai.OpenAI, url: str) -> None:
    client.completions.create(**GREEDY)
    values = dict(
        line.rsplit(" ", 1)
        for line in httpx.get(f"{url}/metrics").text.splitlines()
        if not line.startswith("#")
    )
    assert float(values["samebytes_requests_finished_total"]) >= 1
    assert float(values["samebytes_decode_tokens_total"]) >= 23
    assert float(values["samebytes_time_to_first_token_seconds_count"]) >= 1


def test_wrong_key_is_a_401_everywhere_but_at_health(start: Any) -> None:
    url = start(app=AppSettings(model_name="llama", api_key="secret"))
    with pytest.raises(openai.AuthenticationError):
        client_of(url, api_key="secre").models.list()
    assert client_of(url, api_key="secret").models.list().data
    codes = {path: httpx.get(url + path).status_code for path in ("/health", "/metrics", "/v1/models")}
    assert codes == {"/health": 200, "/metrics": 401, "/v1/models": 401}


def test_body_beyond_the_limit_is_a_413(start: Any) -> None:
    url = start(app=AppSettings(model_name="llama", max_body_bytes=1000))
    answer = httpx.post(f"{url}/v1/completions", content=b"{" + b" " * 1000)
    assert answer.status_code == 413 and "1000 bytes" in answer.json()["error"]["message"]


def test_long_prompt_is_read_like_a_short_one(client: openai.OpenAI, served: ServedModel) -> None:
    prompt = "the river " * 300 + " " * 20_000  # read on another thread; too long for the pool
    with pytest.raises(openai.BadRequestError, match="the prompt has 230"):
        client.completions.create(**{**GREEDY, "prompt": prompt})
    spaces = {"metadata": {"padding": " " * 20_000}}
    assert (
        client.completions.create(**GREEDY, extra_body=spaces).choices
        == client.completions.create(**GREEDY).choices
    )
