"""A server whose engine has a process of its own: the engine may die, the server and its callers may not."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import httpx
import openai
import pytest

from parity.engines.chain_processes import ProcessChain
from parity.engines.shards import ShardedEngine
from parity.serve.served_model import ServedModel
from scheduler.engine import Batch
from scheduler.loop import MAX_ENGINE_FAILURES
from scheduler.records import IterationPlan
from tests.parity.serve.conftest import client_of

PROMPT = "the same bytes"
Start = Callable[..., str]


def answer(client: openai.OpenAI, max_tokens: int = 40) -> str:
    """A greedy answer, with no end before its length."""
    done = client.completions.create(model="llama", prompt=PROMPT, max_tokens=max_tokens, temperature=0)
    return done.choices[0].text


def chains(served: ServedModel) -> list[ProcessChain]:
    """Every shard's engine."""
    engine = served.engine
    return [*engine.shards] if isinstance(engine, ShardedEngine) else [engine]


@pytest.mark.parametrize("shards", [1, 2])
def test_engine_killed_under_a_request_is_started_again_and_the_answer_is_the_same(
    client: openai.OpenAI, start: Start, shards: int
) -> None:
    held: list[ServedModel] = []
    url = start(change=held.append, contained=True, shards=shards, max_num_seqs=8)
    whole = answer(client)  # of a server whose engine lives in its own process
    before = [pid for chain in chains(held[0]) for pid in chain.pids]
    assert os.getpid() not in before and len(before) == shards

    with client_of(url) as contained:
        text = ""
        stream = contained.completions.create(
            model="llama", prompt=PROMPT, max_tokens=40, temperature=0, stream=True
        )
        for number, chunk in enumerate(stream):
            text += chunk.choices[0].text
            if number == 2:
                for pid in before:
                    os.kill(pid, signal.SIGKILL)
        assert text == whole
        assert answer(contained) == whole
    assert not {pid for chain in chains(held[0]) for pid in chain.pids} & {*before}
    assert httpx.get(f"{url}/health").status_code == 200


def test_request_that_always_ends_the_engine_gets_an_error_and_the_next_one_is_served(
    client: openai.OpenAI, start: Start
) -> None:
    deadly, deaths = [True], []

    def arm(served: ServedModel) -> None:
        launch = served.engine.launch

        def launch_deadly(plan: IterationPlan, batch: Batch, now_ms: float) -> None:
            if deadly[0]:
                served.engine.break_next = (0, "killed")
                deaths.append(plan)
            launch(plan, batch, now_ms)

        served.engine.launch = launch_deadly

    url = start(change=arm, contained=True)
    with client_of(url) as contained:
        with pytest.raises(openai.InternalServerError, match="the engine: its process ended by SIGKILL"):
            answer(contained)
        assert len(deaths) == MAX_ENGINE_FAILURES
        deadly[0] = False
        assert answer(contained) == answer(client)
