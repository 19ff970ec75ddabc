"""What a client may ask: every refusal has a status, names its parameter and gives the numbers."""

from __future__ import annotations

import pytest

from parity.serve.requests import AskLimits, BadRequest, parse_json, read_ask
from scheduler.records import ServiceLevel

LIMITS = AskLimits(
    model_name="m",
    n_vocab=264,
    end_tokens=(257,),
    max_session_tokens=100,
    default_max_tokens=16,
    default_seed=7,
)


def ask(prompt=(5, 6, 7), *, is_chat=False, **data):
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
        ("priority", {"priority": 1.5}),
        ("slo", {"slo": 5}),
        ("slo", {"slo": {"e2el_ms": 5}}),
        ("slo.ttft_ms", {"slo": {"ttft_ms": 0}}),
        ("slo.tbt_ms", {"slo": {"tbt_ms": "5"}}),
        ("slo.tbt_ms", {"slo": {"tbt_ms": True}}),
    ],
)
def test_request_with_a_bad_parameter_is_refused_by_name(parameter, data):
    with pytest.raises(BadRequest) as refused:
        ask(**data)
    assert (refused.value.status, refused.value.parameter) == (400, parameter)
    assert parameter in refused.value.message


def test_what_a_policy_looks_at_reaches_the_scheduler():
    request = ask(user="alice", priority=3, slo={"ttft_ms": 200, "tbt_ms": None}).to_request(
        "r", arrival_ms=7.0
    )
    assert (request.client_id, request.priority, request.arrival_ms) == ("alice", 3, 7.0)
    assert request.slo == ServiceLevel(ttft_ms=200.0)
    assert ask().to_request("r", arrival_ms=0.0).slo == ServiceLevel()


def test_neutral_values_of_unsupported_parameters_are_accepted():
    neutral = {"n": 1, "presence_penalty": 0, "logit_bias": {}, "tools": None, "echo": False}
    assert ask(**neutral).max_tokens == 16


def test_oversize_request_is_refused_with_the_numbers():
    with pytest.raises(BadRequest) as refused:
        ask(range(60), max_tokens=41)
    assert refused.value.code == "context_length_exceeded"
    assert all(number in refused.value.message for number in ("100", "60", "41", "101"))
    assert ask(range(60), max_tokens=40).max_tokens == 40


def test_default_length_shrinks_to_the_room_that_is_left():
    assert ask(range(95)).max_tokens == 5


@pytest.mark.parametrize("prompt", [[], [264], [-1]])
def test_prompt_without_or_with_impossible_tokens_is_refused(prompt):
    with pytest.raises(BadRequest):
        ask(prompt)


def test_unknown_model_is_a_404():
    with pytest.raises(BadRequest) as refused:
        ask(model="other")
    assert refused.value.status == 404


def test_sampling_key_depends_on_the_prompt_and_never_on_a_request_id():
    first, again, other = ask(), ask(), ask((5, 6, 8))
    assert first.sampling == again.sampling and first.sampling.seed == 7
    assert first.sampling.key != other.sampling.key


def test_end_tokens_stop_unless_they_are_ignored():
    assert ask(stop_token_ids=[9]).stop_token_ids == (257, 9)
    assert ask(stop_token_ids=[9], ignore_eos=True).stop_token_ids == (9,)


def test_chat_and_completion_ask_for_logprobs_in_their_own_ways():
    assert ask(logprobs=3).logprobs == 3
    assert ask(is_chat=True, logprobs=True, top_logprobs=2).logprobs == 2
    assert ask(is_chat=True, logprobs=False).logprobs is None


@pytest.mark.parametrize("body", [b"", b"[1]", b"{", b"\xff", b"[" * 100_000])
def test_body_that_is_no_object_is_a_400(body):
    with pytest.raises(BadRequest):
        parse_json(body)
