"""How an answer ends: what is counted when a stop token ends it; nothing is computed for who has gone."""

from __future__ import annotations

import json
from typing import Any

import httpx

from parity.serve.app import AppSettings
from parity.serve.served_model import EngineSettings, open_served
from parity.serve.server import serving

ASK = {
    "prompt": "the river",
    "max_tokens": 24,
    "temperature": 0,
    "return_token_ids": True,
    "ignore_eos": True,
}
MANY = 6000


def post(url: str, **fields: Any) -> dict:
    return httpx.post(f"{url}/v1/completions", json={**ASK, **fields}, timeout=60).json()


def events(url: str, **fields: Any) -> list[dict]:
    """The data of a stream's events, without the last word."""
    asked = {**ASK, "stream": True, "stream_options": {"include_usage": True}, **fields}
    text = httpx.post(f"{url}/v1/completions", json=asked, timeout=60).text
    *lines, done = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert done == "[DONE]"
    return [json.loads(line) for line in lines]


def test_stop_token_is_counted_and_not_shown(url: str) -> None:
    whole = post(url)["choices"][0]["token_ids"]
    at = next(i for i in range(1, len(whole)) if whole[i] not in whole[:i])
    before = post(url, max_tokens=at)["choices"][0]["text"]

    answer = post(url, stop_token_ids=[whole[at]])
    choice = answer["choices"][0]
    assert (choice["finish_reason"], choice["text"]) == ("stop", before)
    assert choice["token_ids"] == whole[: at + 1]
    prompt = len(choice["prompt_token_ids"])
    usage = {"prompt_tokens": prompt, "completion_tokens": at + 1, "total_tokens": prompt + at + 1}
    assert answer["usage"] == usage

    *chunks, last = events(url, stop_token_ids=[whole[at]])
    assert (last["choices"], last["usage"]) == ([], usage)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == before
    assert [token for chunk in chunks for token in chunk["choices"][0]["token_ids"]] == whole[: at + 1]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks][-1] == "stop"


def test_nothing_is_computed_for_a_client_that_has_gone() -> None:
    steps = []
    served = open_served(EngineSettings(model="llama", n_threads=1, max_num_seqs=4))
    served.note_step = steps.append
    with serving(served, AppSettings(model_name="llama")) as url:
        asked = {**ASK, "max_tokens": MANY, "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=asked, timeout=60) as answer:
            next(answer.iter_bytes())
    served.close()  # drained: whatever was still live has been computed to its end

    assert 0 < sum(step.decode_tokens for step in steps) < MANY - 1
