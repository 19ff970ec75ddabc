"""What a client may ask: every refusal has a status, names its parameter and gives the numbers."""

from __future__ import annotations

import json
from typing import Any

import pytest

from parity.serve.requests import WITHOUT_EFFECT, AskLimits, BadRequest, parse_json, read_ask
from scheduler.records import ServiceLevel

LIMITS = AskLimits(
    model_name="m",
    n_vocab=264,
    end_tokens=(257,),
    max_session_tokens=100,
    default_max_tokens=16,
    default_seed=7,
)


# Fields of vLLM, llama-server, SGLang and OpenAI that would change an answer, each with a value that does.
NOT_HONOURED = {
    "grammar": "root ::= 'a'",
    "json_schema": {"type": "object"},
    "guided_json": {"type": "object"},
    "guided_regex": "a+",
    "guided_choice": ["a"],
    "guided_grammar": "x",
    "structured_outputs": {"regex": "a"},
    "regex": "a+",
    "ebnf": "x",
    "tool_choice": "required",
    "function_call": "auto",
    "repeat_penalty": 1.1,
    "repeat_last_n": 64,
    "mirostat": 2,
    "mirostat_tau": 5.0,
    "typical_p": 0.9,
    "tfs_z": 0.9,
    "dry_multiplier": 0.8,
    "xtc_probability": 0.5,
    "dynatemp_range": 0.5,
    "samplers": ["top_k"],
    "prompt_logprobs": 1,
    "truncate_prompt_tokens": 5,
    "lora": [{"id": 0, "scale": 1.0}],
    "lora_path": "x",
    "n_predict": 5,
    "n_keep": 5,
    "id_slot": 0,
    "n_probs": 3,
    "use_beam_search": True,
    "length_penalty": 2.0,
    "allowed_token_ids": [5],
    "bad_words": ["x"],
    "logits_processors": ["x"],
    "include_stop_str_in_output": True,
    "skip_special_tokens": False,
    "spaces_between_special_tokens": False,
    "add_special_tokens": False,
    "add_generation_prompt": False,
    "continue_final_message": True,
    "chat_template": "x",
    "chat_template_kwargs": {"a": 1},
    "documents": [{}],
    "modalities": ["audio"],
    "audio": {},
    "prediction": {},
    "reasoning_effort": "high",
    "verbosity": "low",
    "web_search_options": {},
    "min_tokens": 3,
    "best_of": 2,
    "suffix": "x",
    "max_completions_tokens": 5,
}


def ask(prompt: Any = (5, 6, 7), *, is_chat: Any = False, **data: Any) -> Any:
    return read_ask(data, LIMITS, is_chat=is_chat, tokenize=lambda _: list(prompt))


@pytest.mark.parametrize(
    ("parameter", "data"),
    [
        ("n", {"n": 2}),
        ("best_of", {"best_of": 3}),
        ("echo", {"echo": True}),
        ("presence_penalty", {"presence_penalty": 0.5}),
        ("logit_bias", {"logit_bias": {"5": 1}}),
        ("tools", {"tools": [{}]}),
        ("max_tokens", {"max_tokens": 0}),
        ("max_tokens", {"max_tokens": True}),
        ("max_tokens", {"max_tokens": "9"}),
        ("temperature", {"temperature": -1}),
        ("temperature", {"temperature": float("nan")}),
        ("top_p", {"top_p": 1.5}),
        ("stop", {"stop": ["a", ""]}),
        ("stop", {"stop": 5}),
        ("stop", {"stop": ["x"] * 17}),
        ("stop_token_ids", {"stop_token_ids": [264]}),
        ("logprobs", {"logprobs": 21}),
        ("stream", {"stream": "yes"}),
        ("stream_options", {"stream_options": [1]}),
        ("user", {"user": 5}),
        ("user", {"user": "u" * 257}),
        ("n", {"n": True}),
        ("echo", {"echo": 0}),
        ("top_p", {"top_p": "x", "temperature": 0}),
        ("top_k", {"top_k": 1.5, "temperature": 0}),
        ("seed", {"seed": "x", "temperature": 0}),
        ("seed", {"seed": True}),
        ("logprobs", {"logprobs": True}),
        ("logprobs", {"logprobs": "3"}),
        ("logprobs", {"is_chat": True, "logprobs": 1}),
        ("top_logprobs", {"is_chat": True, "top_logprobs": 2}),
        ("top_logprobs", {"top_logprobs": 2}),
        ("max_tokens", {"is_chat": True, "max_tokens": 2, "max_completion_tokens": 3}),
        ("max_completion_tokens", {"is_chat": True, "max_completion_tokens": "3"}),
        ("max_completion_tokens", {"max_completion_tokens": 3}),
        ("stop_token_ids", {"stop_token_ids": [True]}),
        ("ignore_eos", {"ignore_eos": 1}),
        ("stream_options.include_usage", {"stream_options": {"include_usage": 1}}),
        ("stream_options.chunk_size", {"stream_options": {"chunk_size": 1}}),
        ("slo", {"slo": 3}),
        ("slo.ttft_ms", {"slo": {"ttft_ms": 0}}),
        ("slo.e2e_ms", {"slo": {"e2e_ms": 5}}),
        ("priority", {"priority": 1.0}),
        ("messages", {"messages": []}),
        *[(name, {name: value}) for name, value in NOT_HONOURED.items()],
        ("slo.e2el_ms", {"slo": {"e2el_ms": 5}}),
        ("slo.tbt_ms", {"slo": {"tbt_ms": "5"}}),
        ("slo.tbt_ms", {"slo": {"tbt_ms": True}}),
    ],
)
def test_request_with_a_bad_parameter_is_refused_by_name(parameter: str, data: dict[str, Any]) -> None:
    with pytest.raises(BadRequest) as refused:
        ask(**data)
    assert (refused.value.status, refused.value.parameter) == (400, parameter)
    assert parameter in refused.value.message


def test_what_a_policy_looks_at_reaches_the_scheduler() -> None:
    request = ask(user="alice", priority=3, slo={"ttft_ms": 200, "tbt_ms": None}).to_request(
        "r", arrival_ms=7.0
    )
    assert (request.client_id, request.priority, request.arrival_ms) == ("alice", 3, 7.0)
    assert request.slo == ServiceLevel(ttft_ms=200.0)
    assert ask().to_request("r", arrival_ms=0.0).slo == ServiceLevel()


def test_neutral_values_of_unsupported_parameters_are_accepted() -> None:
    neutral = {"n": 1, "presence_penalty": 0, "logit_bias": {}, "tools": None, "echo": False}
    assert ask(**neutral).max_tokens == 16


@pytest.mark.parametrize("is_chat", [False, True])
def test_fields_without_effect_by_nature_are_accepted_whatever_they_say(is_chat: bool) -> None:
    assert ask(is_chat=is_chat, **dict.fromkeys(WITHOUT_EFFECT, "x")) == ask(is_chat=is_chat)


def test_null_is_absent() -> None:
    assert ask(**dict.fromkeys([*NOT_HONOURED, "top_p", "seed", "stop", "slo", "user"])) == ask()


def test_refusal_does_not_send_a_megabyte_back() -> None:
    big = "x" * (1 << 20)
    for data in ({"model": big}, {big: 1}, {"stop": [big, 5]}, {"user": big}, {"logit_bias": {big: 1}}):
        with pytest.raises(BadRequest) as refused:
            ask(**data)
        assert len(str(refused.value.body())) < 400


def test_objectives_reach_the_request() -> None:
    request = ask(slo={"ttft_ms": 50, "tbt_ms": None}, user="u", priority=-3).to_request("r", arrival_ms=1.0)

    assert (request.slo.ttft_ms, request.slo.tbt_ms) == (50.0, None)
    assert (request.client_id, request.priority) == ("u", -3)


@pytest.mark.parametrize(
    "body",
    [
        rb'{"prompt": "\ud800"}',
        rb'{"stop": ["a\udfff"]}',
        rb'{"\ud800": 1}',
        b'{"top_p": NaN}',
        b'{"seed": -Infinity}',
    ],
)
def test_lone_surrogate_and_what_is_no_number_are_a_400(body: bytes) -> None:
    with pytest.raises(BadRequest) as refused:
        parse_json(body)
    json.dumps(refused.value.body()).encode()


def test_escaped_pair_is_a_character() -> None:
    assert parse_json(rb'{"prompt": "\ud83d\ude00"}') == {"prompt": "\U0001f600"}


def test_oversize_request_is_refused_with_the_numbers() -> None:
    with pytest.raises(BadRequest) as refused:
        ask(range(60), max_tokens=41)
    assert refused.value.code == "context_length_exceeded"
    assert all(number in refused.value.message for number in ("100", "60", "41", "101"))
    assert ask(range(60), max_tokens=40).max_tokens == 40


def test_default_length_shrinks_to_the_room_that_is_left() -> None:
    assert ask(range(95)).max_tokens == 5


@pytest.mark.parametrize("prompt", [[], [264], [-1]])
def test_prompt_without_or_with_impossible_tokens_is_refused(prompt: list[int]) -> None:
    with pytest.raises(BadRequest):
        ask(prompt)


def test_unknown_model_is_a_404() -> None:
    with pytest.raises(BadRequest) as refused:
        ask(model="other")
    assert refused.value.status == 404


def test_sampling_key_depends_on_the_prompt_and_never_on_a_request_id() -> None:
    first, again, other = ask(), ask(), ask((5, 6, 8))
    assert first.sampling == again.sampling and first.sampling.seed == 7
    assert first.sampling.key != other.sampling.key


def test_end_tokens_stop_unless_they_are_ignored() -> None:
    assert ask(stop_token_ids=[9]).stop_token_ids == (257, 9)
    assert ask(stop_token_ids=[9], ignore_eos=True).stop_token_ids == (9,)


def test_chat_and_completion_ask_for_logprobs_in_their_own_ways() -> None:
    assert ask(logprobs=3).logprobs == 3
    assert ask(is_chat=True, logprobs=True, top_logprobs=2).logprobs == 2
    assert ask(is_chat=True, logprobs=False).logprobs is None


@pytest.mark.parametrize("body", [b"", b"[1]", b"{", b"\xff", b"[" * 100_000])
def test_body_that_is_no_object_is_a_400(body: bytes) -> None:
    with pytest.raises(BadRequest):
        parse_json(body)
