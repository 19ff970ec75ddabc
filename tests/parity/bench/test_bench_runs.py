"""Real runs on the tiny llama: every request has a record, counters are
exact, a sweep goes on where it was.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from parity.bench.bench_run import BenchRun, RequestRecord
from parity.bench.cutover import (
    Cutover,
    CutoverOptions,
    Margins,
    at_least,
    at_most,
    median_ratio,
    overload_row,
    sides,
)
from parity.bench.in_process import InProcessDriver
from parity.bench.over_http import HttpDriver
from parity.bench.peers import raw_row
from parity.bench.plots import save_plots
from parity.bench.replay import CallRecorder, replay_s
from parity.bench.summary import Goodput
from parity.bench.sweep import Point, SweepOptions, csv_text, run_sweep
from parity.bench.workload import Job, Lengths, PrefixShape, Workload
from parity.commands.cutover import command as cutover_command
from parity.records import Verdict
from parity.serve.app import AppSettings
from parity.serve.served_model import EngineSettings, ServedModel, open_served
from parity.serve.server import serving
from scheduler.loop import Scheduler
from scheduler.records import Refusal, Request, ServiceLevel

SETTINGS = EngineSettings(model="llama", n_threads=1, max_num_seqs=8, pool_cells=2000)
LENGTHS = Lengths(input_len=40, output_len=6)


@pytest.fixture(scope="module")
def served() -> Iterator[ServedModel]:
    model = open_served(SETTINGS)
    yield model
    model.close()


def workload(count: int = 8, shape: PrefixShape = PrefixShape.UNIQUE) -> Workload:
    return Workload(name="w", lengths=LENGTHS, num_prompts=count, shape=shape)


def check_records(run: BenchRun, count: int) -> None:
    assert len(run.completed) == len(run.requests) == count
    for record in run.requests:
        assert record.output_tokens == 6
        assert record.due_s <= record.sent_s <= record.token_times_s[0]
        assert list(record.token_times_s) == sorted(record.token_times_s)
        assert record.token_times_s[-1] <= record.end_s <= run.duration_s


def test_closed_loop_serves_every_request_and_counts_exactly(served: ServedModel) -> None:
    run = InProcessDriver(served).run_closed(workload().jobs(), concurrency=4)
    check_records(run, 8)
    assert run.engine["peak_running"] <= 4 and run.engine["engine_failures"] == 0
    one_session = LENGTHS.input_len + LENGTHS.output_len - 1
    assert served.row_bytes() < run.engine["kv_bytes_per_session"] <= one_session * served.row_bytes()
    assert run.engine["peak_rss_bytes"] > 1e6


def test_single_lane_never_runs_two(served: ServedModel) -> None:
    run = InProcessDriver(served, policy="single_lane").run_closed(workload().jobs(), concurrency=4)
    check_records(run, 8)
    assert run.engine["peak_running"] == 1


def test_a_policy_sees_who_asked_how_urgently_and_since_when(
    served: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A policy's clocks are those of the arrival, however late the one thread came to send it."""
    seen: list[Request] = []
    submit = Scheduler.submit

    def note(self: Scheduler, request: Request, now_ms: float) -> Refusal | None:
        assert now_ms >= request.arrival_ms
        seen.append(request)
        return submit(self, request, now_ms)

    monkeypatch.setattr(Scheduler, "submit", note)
    slo = ServiceLevel(ttft_ms=500.0)
    jobs = [
        replace(job, client_id=f"c{job.index}", priority=job.index, slo=slo) for job in workload(3).jobs()
    ]
    times = [0.0, 0.002, 0.004]
    InProcessDriver(served).run_open(jobs, times_s=times)
    assert [(r.client_id, r.priority, r.slo) for r in seen] == [(f"c{i}", i, slo) for i in range(3)]
    assert [r.arrival_ms for r in seen] == [time_s * 1e3 for time_s in times]


def test_open_loop_sends_at_its_times_and_not_before(served: ServedModel) -> None:
    times = [0.0, 0.0, 0.01, 0.05]
    run = InProcessDriver(served).run_open(workload(4).jobs(), times_s=times)
    check_records(run, 4)
    sent = {record.index: record.sent_s for record in run.requests}
    assert all(sent[index] >= due_s for index, due_s in enumerate(times))


def too_large(index: int) -> Job:
    """A request that the pool can never hold, refused at the door."""
    return Job(index=index, prompt=(1,) * (SETTINGS.pool_cells + 1), max_tokens=2)


def test_refused_request_leaves_its_lane_to_the_next(served: ServedModel) -> None:
    jobs = [too_large(90), *workload(3).jobs(), too_large(91)]
    with serving(served, AppSettings(model_name="llama")) as url:
        over_http = HttpDriver(url, "llama").run_closed(jobs, concurrency=1)
    in_process = InProcessDriver(served).run_closed(jobs, concurrency=1)
    for run in (in_process, over_http):
        assert [record.index for record in run.requests] == [job.index for job in jobs]
        check_records(replace(run, requests=tuple(run.completed)), 3)
        assert all(record.error for record in run.requests if record.index >= 90)


def test_open_loop_whose_last_request_is_refused_ends(served: ServedModel) -> None:
    run = InProcessDriver(served).run_open([too_large(0)], times_s=[0.0])
    assert len(run.requests) == 1 and not run.completed


def test_shared_prefixes_and_conversations_hit_and_unique_prompts_do_not(served: ServedModel) -> None:
    def saved(shape: PrefixShape, **variant: Any) -> float:
        run = InProcessDriver(served, **variant).run_closed(workload(6, shape).jobs(), concurrency=1)
        return run.engine["prefix_tokens_saved"]

    assert saved(PrefixShape.SHARED) == 5 * 30  # three quarters of 40 tokens, for all but the first
    assert saved(PrefixShape.MULTI_TURN) >= 4 * 40
    assert saved(PrefixShape.SHARED, prefix_cache=False) == 0
    assert saved(PrefixShape.UNIQUE) < 6 * 16


def test_replay_makes_the_same_calls_and_leaves_the_pool_empty(served: ServedModel) -> None:
    pool = served.pools[0]
    recorder = CallRecorder(served.engine)
    run = InProcessDriver(served, recorder=recorder).run_closed(workload().jobs(), concurrency=4)
    asked = sum(int(call.wanted.sum()) for call in recorder.calls)
    assert asked == sum(record.output_tokens for record in run.completed)
    assert replay_s([pool], [recorder.calls]) > 0
    assert pool.leftover_sequences() == []


def test_replay_applies_every_memory_operation_of_the_run(
    served: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool, applied = served.pools[0], []
    apply = pool.apply
    monkeypatch.setattr(pool, "apply", lambda ops: (applied.extend(ops), apply(ops)))
    recorder = CallRecorder(served.engine)
    # All four end in one step, so that operations are applied between steps, too.
    InProcessDriver(served, recorder=recorder).run_closed(workload(8).jobs(), concurrency=4)
    of_the_run = list(applied)
    applied.clear()
    replay_s([pool], [recorder.calls])
    assert applied == of_the_run
    assert any(call.ops and not len(call.tokens) for call in recorder.calls)


def test_a_model_in_shards_serves_the_same_tokens_on_half_the_cells_each(served: ServedModel) -> None:
    settings = replace(served.settings, shards=2)
    in_shards = open_served(settings)
    try:
        assert in_shards.limits.num_cells == served.limits.num_cells // 2
        assert in_shards.steps == served.steps
        jobs = workload(6, PrefixShape.SHARED).jobs()
        one, two = (InProcessDriver(s).run_closed(jobs, concurrency=3) for s in (served, in_shards))
        check_records(two, 6)
        assert [r.output_tokens for r in two.requests] == [r.output_tokens for r in one.requests]
        row = raw_row(in_shards, workload(), 4, 1)
        assert row.ratio == pytest.approx(row.ours_tokens_per_s / row.peer_tokens_per_s)
        assert not any(pool.leftover_sequences() for pool in in_shards.pools)
        with serving(in_shards, AppSettings(model_name="llama")) as url:
            check_records(HttpDriver(url, "llama").run_closed(jobs, concurrency=3), 6)
    finally:
        in_shards.close()


def test_row_against_raw_calls_is_the_ratio_of_its_sides(served: ServedModel) -> None:
    pool = served.pools[0]
    assert pool.leftover_sequences() == []
    row = raw_row(served, workload(), 4, 1)
    assert row.ratio == pytest.approx(row.ours_tokens_per_s / row.peer_tokens_per_s)


def test_http_driver_counts_the_same_tokens_as_the_server(served: ServedModel) -> None:
    with serving(served, AppSettings(model_name="llama")) as url:
        run = HttpDriver(url, "llama").run_closed(workload(6, PrefixShape.MULTI_TURN).jobs(), concurrency=3)
        check_records(run, 6)
        assert {record.turn for record in run.requests} == {0, 1, 2}
        refused = HttpDriver(url, "other").run_closed(workload(2).jobs(), concurrency=1)
        opened = HttpDriver(url, "llama").run_open(workload(3).jobs(), times_s=[0.0, 0.0, 0.02])
        check_records(opened, 3)
    assert not refused.completed and all("404" in record.error for record in refused.requests)


def test_answer_of_another_form_fails_its_request_and_not_the_run(served: ServedModel) -> None:
    class Listed(HttpDriver):
        def _read_chunk(self, data: dict[str, Any], times_s: list[Any], tokens: list[Any]) -> None:
            return super()._read_chunk([data], times_s, tokens)

    with serving(served, AppSettings(model_name="llama")) as url:
        run = Listed(url, "llama").run_closed(workload(3).jobs(), concurrency=2)
    assert len(run.requests) == 3 and all("AttributeError" in record.error for record in run.requests)


class Fixed:
    """A driver with a known answer, which counts how often it was asked."""

    runs = 0

    def run_closed(self, jobs: list[Job], *, concurrency: int) -> BenchRun:
        Fixed.runs += 1
        records = tuple(
            RequestRecord(index=i, prompt_tokens=1, token_times_s=(1.0, 2.0), end_s=2.0) for i in range(4)
        )
        return BenchRun(duration_s=2.0, requests=records)

    run_open = None


def test_sweep_runs_a_point_once_and_other_settings_anew(tmp_path: Path) -> None:
    def sweep(target: str) -> list[dict]:
        options = SweepOptions(
            target={"model": target},
            goodput=Goodput(),
            metrics=("ttft",),
            percentiles=(50, 99),
            result_dir=tmp_path,
            save_detailed=True,
        )
        return run_sweep([Point(workload=workload(), concurrency=n) for n in (1, 2)], options, Fixed)

    Fixed.runs = 0
    first = sweep("a")
    assert (Fixed.runs, sweep("a"), Fixed.runs) == (2, first, 2)
    sweep("b")
    assert Fixed.runs == 4
    assert first[0]["output_throughput"] == 4.0 and first[0]["p99_ttft_ms"] is None
    assert csv_text(first).splitlines()[0].startswith("mix,prefix")
    kept = [json.loads(path.read_text()) for path in tmp_path.glob("*.json")]
    assert len(kept) == 4 and all(len(item["requests"]) == 4 for item in kept)
    assert [path.name for path in save_plots(first, tmp_path)] == ["throughput.png"]


# -- gate


def test_gate_has_a_row_for_every_claim_and_overload_refuses_instead_of_failing() -> None:
    options = CutoverOptions(
        target=4,
        curve=(1, 4),
        pairs=1,
        num_prompts=8,
        curve_prompts=4,
        lengths=LENGTHS,
        prefix_lengths=LENGTHS,
    )
    rows = {row.claim: row for row in Cutover(SETTINGS, options).rows()}
    assert list(rows) == [
        "throughput, N=4",
        "p99 latency, N=4",
        "p99 TTFT, N=4",
        "goodput, N=4",
        "KV bytes per session, N=4",
        "scaling curve, N=1",
        "scaling curve, N=4",
        "shared-prefix TTFT, times faster",
        "shared-prefix gain in throughput, N=4",
        "goodput, Poisson 1.5 x single lane",
        "p99 TTFT, Poisson 1.5 x single lane",
        "overload, failures",
    ]
    assert rows["p99 latency, N=4"].verdict is Verdict.UNKNOWN  # eight requests carry no p99
    assert rows["overload, failures"].verdict is Verdict.PASS
    assert rows["throughput, N=4"].measured > 0


def test_row_without_a_number_is_unknown_and_margins_decide_the_rest() -> None:
    assert at_least("m", "c", 2.0, 2.0).verdict is Verdict.PASS
    assert at_least("m", "c", 1.99, 2.0).verdict is Verdict.FAIL
    assert at_most("m", "c", 1.01, 1.0).verdict is Verdict.FAIL
    assert at_least("m", "c", None, 2.0).verdict is at_most("m", "c", None, 1.0).verdict is Verdict.UNKNOWN
    assert Margins().throughput == 2.0 and Margins().single_user == 0.97
    for name, margin in asdict(Margins()).items():  # no margin is so wide that its row cannot fail
        option = next(o for o in cutover_command.params if o.name == f"margin_{name}")
        assert option.default == margin > 0


def test_ratio_with_failed_requests_is_none() -> None:
    pairs = [({"x": 1.0, "failed": 0}, {"x": 9.0, "failed": 2})]
    assert median_ratio(pairs, "x") is None and sides(pairs, "x", "ms") == "2 requests failed"


def test_ratio_is_the_median_over_pairs_and_none_where_a_side_has_none() -> None:
    pairs = [({"x": 1.0}, {"x": 2.0}), ({"x": 1.0}, {"x": 9.0}), ({"x": 2.0}, {"x": 6.0})]
    assert median_ratio(pairs, "x") == 3.0
    assert median_ratio([({"x": 0.0}, {"x": 0.0})] * 3, "x") is None  # nothing against nothing shows nothing
    assert median_ratio([({"x": 2.0}, {"x": 0.0})], "x") == 0.0
    assert median_ratio([({"x": 0.0}, {"x": 2.0})], "x") == float("inf")
    assert median_ratio([*pairs, ({"x": None}, {"x": 1.0})], "x") is None


@pytest.mark.parametrize(
    ("error", "failures", "verdict"),
    [
        ("queue is full with 4 requests", 0, Verdict.PASS),
        ("llama_decode returned 1", 0, Verdict.FAIL),
        ("queue is full with 4 requests", 1, Verdict.FAIL),
        ("", 0, Verdict.UNKNOWN),
    ],
)
def test_overload_row_tells_refusals_from_failures(error: str, failures: int, verdict: Verdict) -> None:
    served = RequestRecord(index=0, prompt_tokens=1, token_times_s=(1.0,), end_s=1.0)
    other = RequestRecord(index=1, prompt_tokens=1, error=error) if error else served
    run = BenchRun(duration_s=1.0, requests=(served, other), engine={"engine_failures": failures})
    assert overload_row("m", run).verdict is verdict
