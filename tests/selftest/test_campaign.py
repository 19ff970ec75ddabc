"""Campaigns explore the same cases from the same seed, whoever runs them, and keep what fails."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from parity.campaign.campaign import (
    DEFAULT_LAYOUTS,
    FEATURE_PAIRS,
    FEATURES,
    Plan,
    Tally,
    draw_batch,
    features_of,
    open_executor,
    run_campaign,
)
from parity.cases.scenarios import SCENARIOS
from parity.commands.fuzz import command, parse_shard
from parity.errors import ExitCode, UsageError
from parity.mutants import cases
from parity.records import Case
from parity.store import REPOSITORY

PLAN = Plan(families=("llama", "gemma2", "falcon_h1"), policies=("fcfs", "aging"), seed=7, exact=True)
BATCHES = 6


class InOrder(Executor):
    """Runs each batch at once, in this thread."""

    def submit(self, function: Any, /, *arguments: Any, **named: Any) -> Future:
        future: Future = Future()
        future.set_result(function(*arguments, **named))
        return future


def explore(plan: Plan = PLAN, *, executor: Executor | None = None, **options: Any) -> Tally:
    settings = {"minutes": 60.0, "jobs": 2, "max_batches": BATCHES, **options}
    return run_campaign(plan, executor or InOrder(), **settings)


@cache
def whole_campaign() -> Tally:
    return explore()


def test_batch_is_the_same_whatever_was_drawn_before() -> None:
    first = [draw_batch(PLAN.batch(number)) for number in range(4)]
    assert [draw_batch(PLAN.batch(number)) for number in (3, 1, 2, 0)] == [first[i] for i in (3, 1, 2, 0)]
    other = Plan(families=PLAN.families, policies=PLAN.policies, seed=8, exact=True)
    assert draw_batch(other.batch(3)) != first[3]


def test_batch_is_the_same_in_another_process() -> None:
    program = (
        "import sys, json; from parity.campaign.campaign import draw_batch; "
        "drawn = [[case.to_json() for case in draw_batch(order)] for order in json.load(sys.stdin)]\n"
        "print(json.dumps(drawn))"
    )
    orders = [PLAN.batch(number) for number in range(12)]
    done = subprocess.run(
        [sys.executable, "-c", program],
        input=json.dumps(orders),
        capture_output=True,
        text=True,
        cwd=REPOSITORY,
        check=True,
    )
    assert json.loads(done.stdout) == [[case.to_json() for case in draw_batch(order)] for order in orders]


def test_shards_together_are_the_whole_campaign() -> None:
    whole = whole_campaign()
    parts = [explore(shard=(index, 2), max_batches=BATCHES // 2) for index in (1, 2)]
    assert sorted(parts[0].batches + parts[1].batches) == whole.batches == list(range(BATCHES))
    assert parts[0].cases + parts[1].cases == whole.cases > BATCHES
    assert parts[0].marks + parts[1].marks == whole.marks
    assert parts[0].pairs + parts[1].pairs == whole.pairs


def test_number_of_jobs_changes_nothing() -> None:
    with ThreadPoolExecutor(3) as pool:
        several = explore(executor=pool, jobs=3)
    one = whole_campaign()
    assert (several.cases, several.marks, several.pairs) == (one.cases, one.marks, one.pairs)
    assert sorted(several.batches) == one.batches


def test_batches_cover_families_layouts_and_policies() -> None:
    orders = [PLAN.batch(number) for number in range(200)]
    seen = {(order["family"], order["layout"], order["policy"]) for order in orders}
    assert len(seen) == len(PLAN.families) * len(DEFAULT_LAYOUTS) * len(PLAN.policies)
    assert {order["template"] for order in orders} >= {"", *(s.name for s in SCENARIOS if s.on_exact)}


@pytest.mark.parametrize("name", ["", *(s.name for s in SCENARIOS if s.on_exact)])
def test_every_case_of_a_batch_runs_the_policy_that_was_asked_for(name: str) -> None:
    plan = Plan(families=("llama",), policies=("sarathi",), exact=True)
    orders = [order for order in map(plan.batch, range(200)) if order["template"] == name]
    drawn = [case for order in orders[:2] for case in draw_batch(order)]
    assert {case.policy for case in drawn} == {"sarathi"}


def test_template_about_a_policy_keeps_it_when_none_is_asked_for() -> None:
    orders = [Plan(families=("llama",), exact=True).batch(number) for number in range(400)]
    own = {order["policy"] for order in orders if order["template"] == "S11"}
    assert own == {"aging"}
    assert len({order["policy"] for order in orders if order["template"] == "S1"}) > 5


def test_batch_that_comes_twice_is_refused() -> None:
    tally = explore(max_batches=1)
    again = {"number": 0, "cases": 1, "sessions": 1, "marks": {}, "pairs": {}, "failures": []}
    with pytest.raises(ValueError, match="batch 0 came twice"):
        tally.add(again)


def test_features_are_read_off_the_case() -> None:
    assert features_of(cases.mixed("llama")) == ["arrivals"]
    assert features_of(cases.seeded("llama")) == ["arrivals", "seeded"]
    assert features_of(cases.exactly_full("llama")) == ["arrivals", "tight_pool"]
    assert features_of(cases.failing("llama")) == ["arrivals", "failures"]
    assert features_of(cases.preempted("llama")) == ["preempt"]
    assert len(FEATURE_PAIRS) == len(FEATURES) * (len(FEATURES) - 1) // 2


def fuzz(*arguments: object) -> Any:
    return CliRunner().invoke(command, list(map(str, arguments)), standalone_mode=False)


def test_missing_coverage_is_unknown_where_it_is_required(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tiny = ("--family", "llama", "--policy", "fcfs", "--exact", "--batches", 1, "--out", tmp_path)
    required = fuzz(*tiny, "--require-coverage")
    assert required.return_value is ExitCode.UNKNOWN
    assert "marks never hit: " in required.output and "pairs of features never seen: " in required.output
    assert fuzz(*tiny).return_value is ExitCode.PASS
    monkeypatch.setattr("parity.campaign.campaign.MARKS", ("concurrent",))
    assert fuzz(*tiny, "--require-coverage").return_value is ExitCode.UNKNOWN  # pairs alone
    monkeypatch.setattr("parity.campaign.campaign.FEATURE_PAIRS", ())
    assert fuzz(*tiny, "--require-coverage").return_value is ExitCode.PASS


def test_failure_stops_the_campaign_and_is_shrunk_stored_and_remembered(tmp_path: Path) -> None:
    database, out = tmp_path / "database", tmp_path / "out"
    options = (
        "--family",
        "llama",
        "--policy",
        "fcfs",
        "--exact",
        "--mutant",
        "logits_rows_swapped",
        "--jobs",
        1,
        "--database",
        database,
        "--json",
        tmp_path / "fuzz.json",
    )
    first = fuzz("--batches", 4, "--out", out, *options)
    assert first.return_value is ExitCode.FAIL, first.output
    totals = json.loads((tmp_path / "fuzz.json").read_text())
    assert 0 < len(totals["batches"]) <= 3 and totals["failures"] > 0
    files = [item["file"] for item in totals["found"] if item["signature"][0] == "divergence"]
    stored = Case.from_json(Path(files[0]).read_text())
    assert len(stored.sessions) <= 3
    assert "parity replay" in first.output

    second = fuzz(
        "--batches", 4, "--out", tmp_path / "again", *options
    )  # the kept case fails before any new one
    assert second.return_value is ExitCode.FAIL
    assert json.loads((tmp_path / "fuzz.json").read_text())["cases"] == 0
    assert {path.name for path in (tmp_path / "again").iterdir()} <= {path.name for path in out.iterdir()}


def test_same_failures_are_counted_once_when_collected(tmp_path: Path) -> None:
    result = fuzz(
        "--family",
        "gemma2",
        "--policy",
        "fcfs",
        "--exact",
        "--mutant",
        "logits_rows_swapped",
        "--jobs",
        1,
        "--batches",
        2,
        "--collect",
        "--layout",
        "unified",
        "--out",
        tmp_path,
        "--json",
        tmp_path / "fuzz.json",
    )
    totals = json.loads((tmp_path / "fuzz.json").read_text())
    assert result.return_value is ExitCode.FAIL
    assert len(totals["batches"]) == 2
    assert totals["failures"] > len(totals["found"]) == len({tuple(f["signature"]) for f in totals["found"]})


@pytest.mark.parametrize("text", ["", "1", "0/2", "3/2", "a/b", "1/0"])
def test_bad_shard_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--shard"):
        parse_shard(text)


@pytest.mark.parametrize(
    "arguments",
    [("--family", "nobody"), ("--policy", "nobody"), ("--executor", "cluster"), ("--executor", "dask://")],
)
def test_bad_input_is_refused(arguments: tuple[str, ...], tmp_path: Path) -> None:
    result = fuzz("--batches", 1, "--exact", "--out", tmp_path, *arguments)
    assert isinstance(result.exception, UsageError)


# -- Dask, for real: a scheduler and two workers on loopback


def start(*command: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "DASK_LOGGING__DISTRIBUTED": "warning"}
    return subprocess.Popen(
        [sys.executable, "-m", "dask", *command],
        env=environment,
        text=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )


@pytest.fixture
def dask_cluster(tmp_path: Path) -> Iterator[Any]:
    """Address of a scheduler with two workers, and the workers' processes.
    Nothing restarts a worker that ends.
    """
    distributed = pytest.importorskip("distributed")
    file = tmp_path / "scheduler.json"
    processes = [
        start(
            "scheduler",
            "--host",
            "127.0.0.1",
            "--port",
            "0",
            "--no-dashboard",
            "--no-jupyter",
            "--scheduler-file",
            str(file),
        )
    ]
    try:
        workers = [
            start(
                "worker",
                "--scheduler-file",
                str(file),
                "--host",
                "127.0.0.1",
                "--no-nanny",
                "--no-dashboard",
                "--nthreads",
                "1",
                "--name",
                name,
            )
            for name in ("first", "second")
        ]
        processes += workers
        with distributed.Client(scheduler_file=str(file), timeout=60) as client:
            client.wait_for_workers(2, timeout=60)
            address = client.scheduler.address.removeprefix("tcp://")
        yield address, workers
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def test_campaign_on_dask_survives_a_killed_worker_without_losing_or_doubling_a_case(
    dask_cluster: Any,
) -> None:
    address, workers = dask_cluster
    expected = whole_campaign()

    def kill_one(tally: Tally) -> None:
        if len(tally.batches) == 2:
            os.kill(workers[0].pid, signal.SIGKILL)

    with open_executor(f"dask://{address}", 2) as pool:
        tally = explore(executor=pool, on_batch=kill_one)
    assert workers[0].wait() == -signal.SIGKILL and workers[1].poll() is None
    assert sorted(tally.batches) == expected.batches
    assert (tally.cases, tally.sessions, tally.marks, tally.pairs) == (
        expected.cases,
        expected.sessions,
        expected.marks,
        expected.pairs,
    )
