"""Many clients at once: nothing lost, nothing mixed up, cells given back,
refusals that say when to come again.
"""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from parity.commands.check_endpoint import command as check_endpoint_command
from parity.serve.front import Front
from parity.serve.requests import BadRequest
from parity.serve.served_model import ServedModel
from parity.telemetry import Totals, read_steps
from tests.parity.serve.conftest import client_of

CLIENTS = 64


def body(prompt: str, index: int, max_tokens: int = 16) -> dict:
    """Every third client samples with a seed of its own."""
    sampled = {"temperature": 0.8, "seed": index} if index % 3 == 0 else {"temperature": 0}
    return {"model": "llama", "prompt": prompt, "max_tokens": max_tokens, **sampled}


async def streamed(client: openai.AsyncOpenAI, prompt: str, index: int) -> str:
    pieces: AsyncIterator = await client.completions.create(**body(prompt, index), stream=True)
    return "".join([piece.choices[0].text async for piece in pieces])


def test_64_streaming_clients_lose_nothing_and_get_their_solo_texts(url: str) -> None:
    shared = "the same beginning, "
    prompts = [f"{shared * (i % 2)}client {i * 7919 % 1000} asks{' again' * (i % 5)}" for i in range(CLIENTS)]

    async def run() -> tuple[list[str], list[str]]:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            alone = [await streamed(client, prompt, i) for i, prompt in enumerate(prompts)]
            together = await asyncio.gather(
                *(streamed(client, prompt, i) for i, prompt in enumerate(prompts))
            )
            return alone, list(together)

    alone, together = asyncio.run(run())
    assert together == alone
    assert (
        len(set(alone)) > CLIENTS // 2
    )  # different questions have different answers, so a mix-up would show


def test_client_that_leaves_frees_its_cells(start: Any) -> None:
    url = start(pool_cells=3000, max_num_seqs=1, prefix_cache=False)
    client = client_of(url)
    ask = {"model": "llama", "prompt": "x", "temperature": 0, "extra_body": {"ignore_eos": True}}
    with client.completions.create(**ask, max_tokens=2900, stream=True) as stream:
        next(iter(stream))
    # The only lane is free again long before 2,900 tokens could have been made.
    assert client.completions.create(**ask, max_tokens=2).choices[0].finish_reason == "length"
    text = httpx.get(f"{url}/metrics").text
    assert "samebytes_cancelled_total 1.0" in text and "samebytes_requests_disconnected_total 1.0" in text
    assert "samebytes_live_requests 0.0" in text


def test_client_that_leaves_a_whole_answer_is_cancelled_too(start: Any) -> None:
    url = start(pool_cells=3000, max_num_seqs=1, prefix_cache=False)
    ask = {"prompt": "x", "max_tokens": 2900, "temperature": 0, "ignore_eos": True}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{url}/v1/completions", json=ask, timeout=0.2)
    answer = httpx.post(f"{url}/v1/completions", json={**ask, "max_tokens": 2}, timeout=60)
    assert answer.status_code == 200
    assert "samebytes_cancelled_total 1.0" in httpx.get(f"{url}/metrics").text


def test_full_queue_is_a_429_that_says_when_to_come_again(start: Any) -> None:
    url = start(pool_cells=3000, max_num_seqs=1, max_waiting=1)
    client = client_of(url)
    ask = {
        "model": "llama",
        "prompt": "x",
        "temperature": 0,
        "extra_body": {"ignore_eos": True},
        "stream": True,
    }
    with client.completions.create(**ask, max_tokens=2900) as running:
        next(iter(running))

        async def flood() -> list[httpx.Response]:
            async with httpx.AsyncClient(timeout=60) as http:
                asks = [
                    http.post(f"{url}/v1/completions", json={"prompt": "y", "max_tokens": 1})
                    for _ in range(4)
                ]
                tasks = [asyncio.ensure_future(one) for one in asks]
                done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                refused = [task.result() for task in done]
                running.close()  # makes room, so that the one that waits is served
                return refused + [
                    task.result() for task in (await asyncio.wait(tasks))[0] if task not in done
                ]

        answers = asyncio.run(flood())
    refused = [answer for answer in answers if answer.status_code == 429]
    assert refused and all(1 <= int(answer.headers["retry-after"]) <= 60 for answer in refused)
    assert [answer.status_code for answer in answers if answer.status_code != 429].count(200) >= 1
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="other", prompt="x")  # still there


def test_engine_that_dies_is_a_503_and_not_a_hang(start: Any) -> None:
    def break_engine(served: ServedModel) -> None:
        def execute(*_: object) -> None:
            raise RuntimeError("planted")

        served.engine.execute = execute

    url = start(change=break_engine)
    answers = [httpx.post(f"{url}/v1/completions", json={"prompt": "x"}, timeout=60) for _ in range(2)]
    assert [answer.status_code for answer in answers] == [500, 503]
    assert all("planted" in answer.json()["error"]["message"] for answer in answers)
    assert httpx.get(f"{url}/health").status_code == 503


def test_step_that_fails_once_is_not_seen_by_any_client(start: Any) -> None:
    models = []
    url = start(change=models.append)
    ask = {"prompt": "the river", "max_tokens": 8, "temperature": 0}
    alone = httpx.post(f"{url}/v1/completions", json=ask).json()["choices"][0]["text"]
    models[0].engine.fail_before_call = 0
    assert httpx.post(f"{url}/v1/completions", json=ask).json()["choices"][0]["text"] == alone
    assert "samebytes_engine_failures_total 1.0" in httpx.get(f"{url}/metrics").text


def test_door_is_closed_while_draining(served: ServedModel) -> None:
    front = Front(served)
    front.is_draining = True
    with pytest.raises(BadRequest) as refused:
        front.check_open()
    assert refused.value.status == 503


def test_sigterm_finishes_what_runs_and_exits_with_0_and_its_steps_are_on_record(tmp_path: Path) -> None:
    steps = tmp_path / "steps.jsonl"
    engine = ["llama", "--port", "0", "--threads", "1", "--telemetry", str(steps)]
    process = subprocess.Popen(
        [sys.executable, "-m", "parity.cli", "serve", *engine],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        url = process.stdout.readline().split(" at ")[1].split("/v1")[0]
        client = client_of(url)
        ask = {"model": "llama", "prompt": "x", "max_tokens": 400, "temperature": 0}
        with client.completions.create(**ask, stream=True, extra_body={"ignore_eos": True}) as stream:
            pieces = iter(stream)
            next(pieces)
            assert read_steps(steps)[0]["admitted"] == 1  # readable while the server runs
            process.send_signal(signal.SIGTERM)
            reasons = [piece.choices[0].finish_reason for piece in pieces]
        assert reasons[-1] == "length"
        assert process.wait(60) == 0
        assert "drained" in process.stdout.read()
        assert Totals(read_steps(steps)).as_dict()["decode_tokens"] == 400 - 1
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_own_server_is_green_at_concurrency_16(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        url,
        "--model",
        "llama",
        "--tier",
        "bits",
        "--prompts",
        "16",
        "--max-tokens",
        "12",
        "--rounds",
        "2",
    ]
    code = check_endpoint_command.main([*arguments, "--concurrency", "16"], standalone_mode=False)
    text = capsys.readouterr().out
    assert int(code) == 0, text
    assert "other output alone: 0, under load: 0" in text
    assert "19 compared under load at concurrency 16" in text
