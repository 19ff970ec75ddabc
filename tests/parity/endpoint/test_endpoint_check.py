"""Black-box parity: green where answers are the same, red on planted faults,
unknown where nothing was proved.
"""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path

import pytest

from parity.endpoint.check import EndpointOptions, check_endpoint, make_prompts
from parity.endpoint.client import EndpointAnswer, merge_chunks, read_answer
from parity.endpoint.judge import Asked, judge
from parity.errors import UsageError
from parity.records import Tier, Verdict
from parity.serve.served_model import ServedModel

OPTIONS = EndpointOptions(prompts=8, max_tokens=8, rounds=1, concurrency=8, disconnects=0, retries=0)


def swap_neighbours(served: ServedModel) -> None:
    """The planted mix-up: of two sessions in a step, each gets the other's token."""
    execute = served.engine.execute

    def mixed_up(plan, batch, now_ms):
        result = execute(plan, batch, now_ms)
        emitted = [i for i, chunk in enumerate(result.chunks) if chunk.token is not None]
        if len(emitted) < 2:
            return result
        chunks = list(result.chunks)
        first, second = emitted[:2]
        chunks[first] = chunks[first]._replace(token=result.chunks[second].token)
        chunks[second] = chunks[second]._replace(token=result.chunks[first].token)
        return replace(result, chunks=tuple(chunks))

    served.engine.execute = mixed_up


def forget_seed(served: ServedModel) -> None:
    """A server that differs from itself even alone: every third emitted token is another one."""
    execute, count = served.engine.execute, itertools.count()

    def unstable(plan, batch, now_ms):
        result = execute(plan, batch, now_ms)
        chunks = (c._replace(token=65 + next(count) % 7) if c.token is not None else c for c in result.chunks)
        return replace(result, chunks=tuple(chunks))

    served.engine.execute = unstable


def test_planted_mix_up_is_red_under_load_and_stable_alone(start):
    verdict, report = check_endpoint(start(change=swap_neighbours), "llama", OPTIONS)
    assert verdict is Verdict.FAIL
    assert report["differ_alone"] == 0 and report["differ_under_load"] > 0
    first = report["divergences"][0]
    assert first["kind"] == "tokens under load" and first["expected"] != first["actual"]
    assert first["margin"] is not None and report["most_distinct_answers"] > 1


def test_server_that_differs_alone_is_red_for_that_reason(start):
    verdict, report = check_endpoint(start(change=forget_seed), "llama", OPTIONS)
    assert verdict is Verdict.FAIL
    assert report["differ_alone"] == 8 and report["compared"] == 0


def test_interrupted_check_goes_on_where_it_was(url: str, tmp_path: Path):
    results = tmp_path / "answers.jsonl"
    options = replace(OPTIONS, results=results)

    class Interrupted(Exception):
        pass

    def interrupt(done: int, total: int) -> None:
        if done == 10:
            raise Interrupted

    with pytest.raises(Interrupted):
        check_endpoint(url, "llama", options, interrupt)
    kept = results.read_text().splitlines()
    assert len(kept) == 1 + 10
    with open(results, "a") as file:
        file.write('{"round": "alo')  # a line that was being written
    verdict, report = check_endpoint(url, "llama", options)
    assert (verdict, report["answers"]) == (Verdict.PASS, 24)
    lines = [json.loads(line) for line in results.read_text().splitlines()]
    assert [json.dumps(line) for line in lines[:11]] == kept and len(lines) == 1 + 24


def test_results_of_other_questions_are_refused(url: str, tmp_path: Path):
    results = tmp_path / "answers.jsonl"
    results.write_text('{"check": {"url": "elsewhere"}}\n')
    with pytest.raises(UsageError, match="other questions"):
        check_endpoint(url, "llama", replace(OPTIONS, results=results))


def test_server_that_is_not_there_or_refuses_is_one_line(url: str):
    with pytest.raises(UsageError, match="does not answer"):
        check_endpoint("http://127.0.0.1:9", "llama", OPTIONS)
    with pytest.raises(UsageError, match="not served"):
        check_endpoint(url, "other", OPTIONS)
    with pytest.raises(UsageError, match="no URL"):
        check_endpoint("127.0.0.1:9", "llama", OPTIONS)


def test_prompts_mix_lengths_and_share_prefixes():
    prompts = make_prompts(24, seed=0)
    assert len(set(prompts)) == 24 and prompts == make_prompts(24, seed=0)
    lengths = [len(prompt.split()) for prompt in prompts]
    assert min(lengths) < 5 and max(lengths) > 120
    shared = {tuple(prompt.split()[:40]) for prompt in prompts[1::2]}
    assert len(shared) == 1


# -- judgement over answers, no server


def answers(**changed: EndpointAnswer) -> list[Asked]:
    """Two prompts, twice alone and once under load; ``changed`` replaces the answers of prompt 0 by round."""
    same = EndpointAnswer(
        text="ab", finish_reason="length", tokens=(1, 2), logprobs=(-0.5, -0.25), margins=(2.0, 0.125)
    )
    rounds = ("alone 0", "alone 1", "load 0")
    return [
        Asked(name, prompt, changed.get(name.replace(" ", "_"), same) if prompt == 0 else same)
        for prompt in range(2)
        for name in rounds
    ]


def verdict_of(asked: list[Asked], tier: Tier = Tier.BYTES, most_in_flight: int = 4):
    return judge(asked, prompts=2, tier=tier, most_in_flight=most_in_flight, alone_rounds=2, load_rounds=1)


SAME = {"finish_reason": "length"}


@pytest.mark.parametrize(
    ("changed", "counts"),
    [
        ({}, (0, 0)),
        ({"load_0": EndpointAnswer(text="ax", tokens=(1, 9), **SAME)}, (0, 1)),
        ({"load_0": EndpointAnswer(text="ax", **SAME)}, (0, 1)),
        ({"load_0": EndpointAnswer(text="ab", tokens=(1, 2), finish_reason="stop")}, (0, 1)),
        ({"alone_1": EndpointAnswer(text="ax", tokens=(1, 9), **SAME)}, (1, 0)),
    ],
)
def test_judge_keeps_alone_and_under_load_apart(changed, counts):
    verdict, report = verdict_of(answers(**changed))
    assert (report["differ_alone"], report["differ_under_load"]) == counts
    assert verdict is (Verdict.FAIL if any(counts) else Verdict.PASS)


def test_divergence_carries_the_margin_of_its_position():
    _, report = verdict_of(answers(load_0=EndpointAnswer(text="ax", tokens=(1, 9), **SAME)))
    found = report["divergences"][0]
    assert (found["index"], found["expected"], found["actual"], found["margin"]) == (1, 2, 9, 0.125)


def test_other_log_probabilities_fail_bits_and_not_bytes():
    moved = EndpointAnswer(text="ab", tokens=(1, 2), logprobs=(-0.5, -0.2500001), **SAME)
    assert verdict_of(answers(load_0=moved))[0] is Verdict.PASS
    verdict, report = verdict_of(answers(load_0=moved), Tier.BITS)
    assert verdict is Verdict.FAIL and report["differ_in_logprobs"] == 1


@pytest.mark.parametrize(
    "asked",
    [
        answers(load_0=EndpointAnswer(error="HTTP 500")),
        answers(alone_1=EndpointAnswer(error="ReadTimeout")),
        [item for item in answers() if item.is_alone],
        [],
    ],
)
def test_missing_answers_are_unknown_and_never_a_pass(asked):
    assert verdict_of(asked)[0] is Verdict.UNKNOWN


def test_requests_that_never_overlapped_prove_nothing():
    assert verdict_of(answers(), most_in_flight=1)[0] is Verdict.UNKNOWN


def test_bits_without_log_probabilities_are_unknown():
    bare = EndpointAnswer(text="ab", **SAME)
    asked = [Asked(item.round, item.prompt, bare) for item in answers()]
    assert verdict_of(asked, Tier.BITS)[0] is Verdict.UNKNOWN
    assert verdict_of(asked, Tier.BYTES)[0] is Verdict.PASS


def test_answers_without_logprobs_and_of_llama_server_are_read():
    assert read_answer({"choices": [{"text": "a", "finish_reason": "stop"}]}, chat=False).text == "a"
    content = [{"token": "a", "logprob": -1.0, "top_logprobs": [{"logprob": -1.0}, {"logprob": -3.0}]}]
    found = read_answer({"choices": [{"text": "a", "logprobs": {"content": content}}]}, chat=False)
    assert (found.tokens, found.logprobs, found.margins) == (("a",), (-1.0,), (2.0,))


def test_streamed_answers_are_the_whole_ones_and_a_broken_stream_is_none(url: str):
    options = replace(OPTIONS, prompts=3, stream=True, concurrency=3)
    assert check_endpoint(url, "llama", options)[0] is Verdict.PASS
    chunk = {"choices": [{"text": "a", "finish_reason": None}]}
    assert (
        merge_chunks([chunk, {"choices": [{"text": "b", "finish_reason": "stop"}]}], chat=False).text == "ab"
    )
    with pytest.raises(ValueError, match="without a finish reason"):
        merge_chunks([chunk], chat=False)
    with pytest.raises(ValueError, match="holds an error"):
        merge_chunks([chunk, {"error": {"message": "x"}}], chat=False)
