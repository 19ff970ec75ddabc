"""Black-box parity: green where answers are the same, red on planted faults,
unknown where nothing was proved.
"""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from parity.endpoint.check import EndpointOptions, check_endpoint
from parity.errors import UsageError
from parity.records import Verdict
from parity.serve.served_model import ServedModel

OPTIONS = EndpointOptions(
    prompts=8,
    prompt_tokens=100,
    max_tokens=8,
    rounds=1,
    concurrency=8,
    disconnects=0,
    retries=0,
    shrink_runs=0,
)


def swap_neighbours(served: ServedModel) -> None:
    """The planted mix-up: of two sessions in a step, each gets the other's token."""
    execute = served.engine.execute

    def mixed_up(plan: Any, batch: Any, now_ms: Any) -> Any:
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

    def unstable(plan: Any, batch: Any, now_ms: Any) -> Any:
        result = execute(plan, batch, now_ms)
        chunks = (c._replace(token=65 + next(count) % 7) if c.token is not None else c for c in result.chunks)
        return replace(result, chunks=tuple(chunks))

    served.engine.execute = unstable


def test_our_own_server_keeps_every_bit(url: str) -> None:
    verdict, report = check_endpoint(url, "llama", OPTIONS)
    assert (verdict, report["tier"], report["faults"]) == (Verdict.PASS, "bits", [])
    assert report["facts"]["kind"] == "samebytes" and report["ran_together"] and report["failed"] == 0
    assert report["compared"] == report["prompts"] > 8


def test_planted_mix_up_is_red_under_load_and_stable_alone(start: Any) -> None:
    verdict, report = check_endpoint(start(change=swap_neighbours), "llama", OPTIONS)
    assert verdict is Verdict.FAIL
    assert report["differ_alone"] == 0 and report["differ_under_load"] > 0
    first = report["divergences"][0]
    assert first["scope"] == "load" and first["expected"] != first["actual"]
    assert first["margin"] is not None


def test_server_that_differs_alone_is_red_for_that_reason(start: Any) -> None:
    verdict, report = check_endpoint(start(change=forget_seed), "llama", OPTIONS)
    assert verdict is Verdict.FAIL
    assert report["differ_alone"] > report["prompts"] // 2


def test_interrupted_check_goes_on_where_it_was(url: str, tmp_path: Path) -> None:
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
    assert verdict is Verdict.PASS
    lines = [json.loads(line) for line in results.read_text().splitlines()]
    assert [json.dumps(line) for line in lines[:11]] == kept and len(lines) == 1 + report["answers"]
    before = results.read_text()
    again, _ = check_endpoint(url, "llama", options)
    # Nothing was asked again, so nothing shows that sessions ran together.
    assert again is Verdict.UNKNOWN and results.read_text() == before


def test_results_of_other_questions_are_refused(url: str, tmp_path: Path) -> None:
    results = tmp_path / "answers.jsonl"
    results.write_text('{"check": {"url": "elsewhere"}}\n')
    with pytest.raises(UsageError, match="other questions"):
        check_endpoint(url, "llama", replace(OPTIONS, results=results))


def test_server_that_is_not_there_or_refuses_is_one_line(url: str) -> None:
    with pytest.raises(UsageError, match="does not answer"):
        check_endpoint("http://127.0.0.1:9", "llama", OPTIONS)
    with pytest.raises(UsageError, match="not served"):
        check_endpoint(url, "other", OPTIONS)
    with pytest.raises(UsageError, match="no URL"):
        check_endpoint("127.0.0.1:9", "llama", OPTIONS)
