"""Numbers of fairness: client gaps, VTC, its completion-settled relative, aging,
reuse quotas, MLFQ, starvation.
"""

from __future__ import annotations

from typing import Any

import pytest

from parity.checkers.service import client_reports, service_of, starved_clients
from parity.records import Case
from parity.run.runner import Replay, replay
from parity.suites.workloads import TICK_MS, order_of_first_chunks, play, session, workload
from scheduler.limits import Layout
from scheduler.records import ServiceLevel

ONE_EVENT = {"max_num_batched_tokens": 1, "max_num_seqs": 1}


def flood(policy: str, **options: Any) -> Replay:
    """A offers eight events of cost two, B four, all at once; one event a tick; six are in time."""
    slo = ServiceLevel(ttft_ms=6 * TICK_MS)
    events = [session(1, 1, client_id="A", slo=slo, first_token=1000 + i) for i in range(8)]
    events += [session(1, 1, client_id="B", slo=slo, first_token=2000 + i) for i in range(4)]
    return play(*events, policy=policy, options=options, **ONE_EVENT)


WEIGHTS = {"input_weight": 1, "output_weight": 1}  # one prompt row and one output: cost two


@pytest.mark.parametrize(
    ("policy", "options", "gap"), [("fcfs", {}, 16), ("vtc", WEIGHTS, 2), ("vtc_completed", WEIGHTS, 2)]
)
def test_fifo_lets_the_gap_reach_16_and_least_service_keeps_it_at_2(
    policy: str, options: dict[str, int], gap: int
) -> None:
    ledger = service_of(flood(policy, **options).run, **WEIGHTS)
    assert ledger.gap("A", "B") == gap
    assert ledger.totals() == {"A": 16, "B": 8}


@pytest.mark.parametrize(
    ("policy", "options", "valid"), [("fcfs", {}, {"A": 6, "B": 0}), ("vtc", WEIGHTS, {"A": 3, "B": 3})]
)
def test_equal_goodput_hides_who_got_it(policy: str, options: dict[str, int], valid: dict[str, int]) -> None:
    reports = client_reports(flood(policy, **options).run, window_ms=12 * TICK_MS, **WEIGHTS)
    assert {client: report.outcomes.valid for client, report in reports.items()} == valid
    assert sum(report.outcomes.valid for report in reports.values()) == 6
    assert not any(report.starved for report in reports.values())


# -- aging and starvation


def pressed(policy: str, options: dict[str, float] | None = None, ticks: int = 12) -> Replay:
    """One low-priority request at tick 0, one high-priority request every tick, one event a tick."""
    low = session(1, 1, priority=4, client_id="low", first_token=900)
    high = [session(1, 1, at=t, client_id="high", first_token=2000 + t) for t in range(ticks)]
    return play(low, *high, policy=policy, options=options, **ONE_EVENT)


def test_static_priority_starves_the_low_request_and_the_ledger_says_so() -> None:
    played = pressed("static_priority")
    ledger = service_of(played.run, until_ms=12 * TICK_MS)
    assert starved_clients(ledger, start_ms=0.0, stop_ms=12 * TICK_MS) == ["low"]


def test_with_a_quantum_of_two_ticks_the_low_request_first_wins_at_tick_8() -> None:
    played = pressed("aging", {"quantum_ms": 2 * TICK_MS})
    assert played.run.emitted_at[0] == [8]
    assert starved_clients(service_of(played.run), start_ms=0.0, stop_ms=12 * TICK_MS) == []


def test_a_client_without_work_in_the_whole_interval_is_not_starved() -> None:
    ledger = service_of(pressed("static_priority").run)
    assert starved_clients(ledger, start_ms=0.0, stop_ms=1e9) == []


# -- reuse quotas


def reuse(policy_options: dict, policy: str = "preble_quota") -> Case:
    """A prompt is resident; then one hot request that shares it arrives each tick, and
    one cold request at the start.
    """
    first = session(16, 1, first_token=500)
    cold = session(16, 1, at=2, first_token=9000, client_id="cold")
    hot = [session(16, 1, at=2 + t, first_token=500, client_id="hot") for t in range(9)]
    return workload(
        first,
        cold,
        *hot,
        policy=policy,
        options=policy_options,
        layout=Layout.STOCK,
        prefix_cache=True,
        max_num_batched_tokens=16,
        max_num_seqs=1,
        pool_cells=400,
        prefix_block_tokens=1,
    )


def completed_by_tick(played: Replay, stop_ms: float) -> dict[str, int]:
    done = {"hot": 0, "cold": 0}
    for event in service_of(played.run, until_ms=stop_ms).events:
        if event.outputs and event.client_id in done:
            done[event.client_id] += 1
    return done


def test_a_quota_of_two_to_one_completes_eight_hot_and_one_cold() -> None:
    played = replay(reuse({"quotas": [2, 1]}))
    assert played.run.problems == []
    assert completed_by_tick(played, 11 * TICK_MS) == {"hot": 8, "cold": 1}


def test_no_group_is_suppressed_in_any_cycle() -> None:
    sessions = [session(16, 1, first_token=500)]
    sessions += [session(16, 1, at=2, first_token=9000 + 100 * i, client_id="cold") for i in range(4)]
    sessions += [session(16, 1, at=2, first_token=500, client_id="hot") for _ in range(8)]
    case = workload(
        *sessions,
        policy="preble_quota",
        options={"quotas": (2, 1)},
        prefix_cache=True,
        max_num_batched_tokens=16,
        max_num_seqs=1,
        pool_cells=600,
        prefix_block_tokens=1,
    )
    played = replay(case)
    clients = [case.sessions[int(name[1:])].client_id for name in order_of_first_chunks(played)][1:]
    # The resident prompt itself was the first cycle's cold pick.
    assert clients == ["hot", "hot", *["hot", "hot", "cold"] * 3, "cold"]


# -- MLFQ


def mlfq(promote_after_ms: float, epochs: int = 20) -> Replay:
    """A prompt whose first step costs 4 joins the queue of quantum 4; a job of cost 1
    comes to the first every tick.
    """
    long = session(4, 1, client_id="long", first_token=900)
    short = [session(1, 1, at=t, client_id="short", first_token=2000 + t) for t in range(epochs)]
    return play(
        long,
        *short,
        policy="fastserve_mlfq",
        max_num_batched_tokens=4,
        max_num_seqs=1,
        options={"quantum_rows": 1, "levels": 4, "promote_after_ms": promote_after_ms},
    )


def test_a_long_first_step_skips_to_the_queue_that_covers_it_and_waits_behind_the_first_one() -> None:
    assert mlfq(promote_after_ms=1e9).run.emitted_at[0] == [20]


def test_a_starving_job_is_promoted_to_the_first_queue() -> None:
    assert mlfq(promote_after_ms=5 * TICK_MS).run.emitted_at[0] == [6]


def test_a_job_that_uses_up_its_quantum_falls_behind_a_new_one() -> None:
    options = {"quantum_rows": 2, "levels": 4, "promote_after_ms": 1e9, "max_batch": 1}
    played = play(
        session(1, 9), session(1, 2, at=3, first_token=3000), policy="fastserve_mlfq", options=options
    )
    assert played.run.emitted_at[1] == [3, 4]
    assert played.run.emitted_at[0] == [0, 1, 2, *range(5, 11)]


def test_a_waiting_job_takes_the_place_of_a_running_one_of_a_lower_queue() -> None:
    options = {"quantum_rows": 2, "levels": 4, "promote_after_ms": 1e9}
    played = play(
        session(1, 9),
        session(1, 2, at=3, first_token=3000),
        policy="fastserve_mlfq",
        options=options,
        max_num_seqs=1,
    )
    intents = [(i.kind.value, i.request_id) for t in played.run.trace for i in t.flight.plan.intents]
    assert ("preempt", "s0") in intents and ("resume", "s0") in intents
    assert played.run.emitted_at[1][-1] < played.run.emitted_at[0][-1]


def test_rebuilds_after_preemptions_are_at_most_twice_the_work() -> None:
    """One-token chunks, long prompts, one lane: without a bound every row would cost a whole rebuild."""
    options = {"quantum_rows": 4, "promote_after_ms": 5 * TICK_MS}
    played = play(
        session(90, 4),
        session(90, 1, first_token=3000),
        session(5, 4, first_token=6000),
        policy="fastserve_mlfq",
        options=options,
        max_num_seqs=1,
        max_chunk_tokens=1,
    )
    rebuilt = sum(record.recompute_tokens for record in played.run.records)
    work = sum(record.prefill_tokens + record.decode_tokens for record in played.run.records)
    assert sum(record.preempted for record in played.run.records) >= 3
    assert 0 < rebuilt <= 2 * work


def test_quotas_count_within_one_plan() -> None:
    """The resident prompt and two hot ones spend the first cycle; then four hot and two cold come at once."""
    sessions = [session(16, 1, first_token=500)]
    sessions += [session(16, 1, at=2, first_token=500, client_id="hot") for _ in range(2)]
    sessions += [session(16, 1, at=4, first_token=9000 + 100 * i, client_id="cold") for i in range(2)]
    sessions += [session(16, 1, at=4, first_token=500, client_id="hot") for _ in range(4)]
    case = workload(
        *sessions,
        policy="preble_quota",
        options={"quotas": (2, 1)},
        prefix_cache=True,
        max_num_batched_tokens=256,
        pool_cells=600,
        prefix_block_tokens=1,
    )
    intents = [intent.request_id for intent in replay(case).run.trace[4].flight.plan.intents]
    assert intents == ["s5", "s6", "s3", "s7", "s8", "s4"]
