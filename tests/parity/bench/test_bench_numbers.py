"""Numbers of a benchmark: percentiles that the sample carries, definitions as in vllm bench serve."""

from __future__ import annotations

import statistics

import pytest

from parity.bench.bench_run import BenchRun, RequestRecord
from parity.bench.summary import Goodput, summarise
from parity.bench.tails import needed_samples, percentile
from parity.bench.workload import MIXES, Job, Lengths, PrefixShape, Workload, arrival_times
from parity.errors import UsageError


def test_tails_of_98_short_and_two_long_values_are_the_published_ones() -> None:
    values = [10.0] * 98 + [500.0] * 2
    assert statistics.mean(values) == pytest.approx(19.8)
    assert (percentile(values, 95), percentile(values, 99)) == (10.0, 500.0)


@pytest.mark.parametrize(("percent", "needed"), [(50, 2), (95, 20), (99, 100)])
def test_percentile_of_too_small_a_sample_is_none(percent: int, needed: int) -> None:
    assert needed_samples(percent) == needed
    assert percentile(list(range(needed - 1)), percent) is None
    assert percentile(list(range(needed)), percent) is not None
    assert percentile([], percent) is None


def test_percentile_is_the_nearest_rank_of_the_sorted_values() -> None:
    assert percentile([4, 1, 3, 2], 50) == 2
    values = range(1, 21)
    assert [percentile(values, p) for p in (1, 5, 6, 50, 51, 95, 100)] == [1, 1, 2, 10, 11, 19, 20]
    assert percentile(list(range(1, 101)), 99) == 99


def record(*times_s: float, sent_s: float = 1.0, error: str = "") -> RequestRecord:
    return RequestRecord(
        index=0,
        prompt_tokens=10,
        due_s=sent_s,
        sent_s=sent_s,
        token_times_s=times_s,
        end_s=(times_s or (sent_s,))[-1],
        error=error,
    )


def test_latencies_of_one_request_follow_their_definitions() -> None:
    one = record(1.5, 1.75, 2.5)
    assert (one.ttft_s, one.e2el_s, one.tpot_s, one.itl_s) == (0.5, 1.5, 0.5, [0.25, 0.75])


def test_tpot_of_a_one_token_output_is_undefined_and_not_zero() -> None:
    assert record(2.0).tpot_s is None
    row = summarise(BenchRun(duration_s=1.0, requests=(record(2.0), record(2.0))))
    assert row["mean_tpot_ms"] is None and row["p50_tpot_ms"] is None


def test_goodput_counts_completed_requests_that_meet_every_objective() -> None:
    run = BenchRun(
        duration_s=2.0,
        requests=(
            record(1.1, 1.2),
            record(1.1, 9.0),
            record(5.0, 5.1),
            record(error="refused"),
            record(1.05),
        ),
    )
    row = summarise(run, goodput=Goodput.parse(["ttft:200", "tpot:150"]))
    assert row["request_goodput"] == 1.0  # two of five in two seconds
    assert (row["completed"], row["failed"], row["request_throughput"]) == (4, 1, 2.0)
    assert row["output_throughput"] == 7 / 2.0 and row["total_input_tokens"] == 40
    assert summarise(run)["request_goodput"] is None


@pytest.mark.parametrize("item", ["ttft", "ttft:x", "latency:5", "tpot:-1", "e2el:0"])
def test_goodput_objective_that_makes_no_sense_is_refused(item: str) -> None:
    with pytest.raises(UsageError, match="goodput objective"):
        Goodput.parse([item])


@pytest.mark.parametrize(("burstiness", "variation"), [(0.25, 2.0), (1.0, 1.0), (100.0, 0.1)])
def test_arrivals_have_the_mean_and_the_burstiness_that_was_asked_for(
    burstiness: float, variation: float
) -> None:
    times = arrival_times(20_000, request_rate=50.0, burstiness=burstiness, seed=3)
    gaps = [later - earlier for earlier, later in zip([0.0, *times], times, strict=False)]
    assert statistics.mean(gaps) == pytest.approx(1 / 50, rel=0.05)
    assert statistics.pstdev(gaps) / statistics.mean(gaps) == pytest.approx(variation, rel=0.1)


def test_arrivals_without_a_rate_are_refused() -> None:
    with pytest.raises(UsageError):
        arrival_times(1, request_rate=0.0, burstiness=1.0, seed=0)


def test_workload_is_a_function_of_its_seed() -> None:
    workload = Workload(name="w", lengths=MIXES["long/long"], num_prompts=5)
    assert workload.jobs() == workload.jobs()
    assert workload.jobs() != Workload(name="w", lengths=MIXES["long/long"], num_prompts=5, seed=1).jobs()


def test_shared_prompts_begin_alike_and_unique_ones_do_not() -> None:
    def beginnings(shape: PrefixShape) -> set[tuple[int, ...]]:
        jobs = Workload(name="w", lengths=MIXES["long/short"], num_prompts=8, shape=shape).jobs()
        assert {len(job.prompt) for job in jobs} == {200} and len({job.prompt for job in jobs}) == 8
        return {job.prompt[:150] for job in jobs}

    assert len(beginnings(PrefixShape.SHARED)) == 1
    assert len(beginnings(PrefixShape.UNIQUE)) == 8


def test_conversation_goes_on_with_everything_that_was_said() -> None:
    job = Job(index=0, prompt=(1, 2), max_tokens=2, later_turns=((7,), (8,)))
    second = job.following([5, 6])
    assert (second.prompt, second.turn) == ((1, 2, 5, 6, 7), 1)
    assert second.following([9]).following([9]) is None


def test_lengths_vary_within_their_ratio_and_stay_at_least_one() -> None:
    lengths = Lengths(input_len=100, output_len=1, range_ratio=0.5)
    jobs = Workload(name="w", lengths=lengths, num_prompts=200).jobs()
    found = {len(job.prompt) for job in jobs}
    assert min(found) >= 50 and max(found) <= 150 and len(found) > 20
    assert {job.max_tokens for job in jobs} == {1}


def test_latencies_count_from_the_arrival_and_not_from_a_late_send() -> None:
    """Due at 0, sent half a second late because the client's bound was reached, first token 0.1 s later."""
    late = RequestRecord(index=0, prompt_tokens=1, due_s=0.0, sent_s=0.5, token_times_s=(0.6, 0.7), end_s=0.8)
    assert (late.ttft_s, late.e2el_s) == (0.6, 0.8)
    run = BenchRun(duration_s=1.0, requests=(late,))
    assert summarise(run, goodput=Goodput.parse(["ttft:500"]))["request_goodput"] == 0.0
    assert summarise(run, goodput=Goodput.parse(["ttft:600"]))["request_goodput"] == 1.0
