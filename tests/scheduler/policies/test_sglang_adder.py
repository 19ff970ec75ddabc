"""Admission arithmetic of prefill batches: chunk-led gates, separate limits, the warm and cold rule."""

from __future__ import annotations

from typing import Any

import pytest

from parity.run.runner import Replay, replay
from parity.suites.workloads import TICK_MS, play, rows_per_step, session, workload
from scheduler.policies.sglang_adder import AdderLimits, Affinity, Lead, Verdict

PAGE = 16


def adder(*sessions: Any, **options: Any) -> Replay:
    limits = {
        key: options.pop(key)
        for key in ("max_num_batched_tokens", "pool_cells", "max_num_seqs")
        if key in options
    }
    return play(
        *sessions, policy="sglang_adder", options=options, **{"max_num_batched_tokens": 512, **limits}
    )


def prompts(*lengths: int, outputs: int = 1) -> Any:
    return [session(rows, outputs, first_token=1000 * (i + 1)) for i, rows in enumerate(lengths)]


@pytest.mark.parametrize(
    ("user", "chunk", "limit"),
    [(None, None, None), (None, 64, 64), (32, 64, 32), (96, 64, 64), (32, None, 32)],
)
def test_extend_limit_is_the_minimum_of_both_or_the_chunk_budget_alone(
    user: int | None, chunk: int | None, limit: int | None
) -> None:
    assert AdderLimits(max_extend_tokens=user, chunk_tokens=chunk).extend_limit() == limit


def test_a_full_chunk_ends_the_scan_and_a_tail_chunk_lets_followers_join() -> None:
    steps = rows_per_step(adder(*prompts(160, 8, 8), chunk_tokens=64, mix_chunked=True))
    assert steps[:3] == [{"s0": 64}, {"s0": 64}, {"s0": 32, "s1": 8, "s2": 8}]


def test_a_tail_chunk_stays_alone_by_default() -> None:
    steps = rows_per_step(adder(*prompts(160, 8, 8), chunk_tokens=64))
    assert steps[:4] == [{"s0": 64}, {"s0": 64}, {"s0": 32}, {"s1": 8, "s2": 8}]


def test_a_prompt_is_cut_at_a_page_boundary() -> None:
    steps = rows_per_step(adder(*prompts(100), chunk_tokens=40, page_tokens=PAGE))
    assert [step["s0"] for step in steps[:3]] == [32, 32, 36]


def test_a_prefix_that_is_not_page_aligned_keeps_its_batch_alone() -> None:
    # A chunk below one page cannot end at a boundary, so the next one begins off it.
    steps = rows_per_step(adder(*prompts(20, 4), chunk_tokens=10, page_tokens=PAGE, mix_chunked=True))
    assert steps[:3] == [{"s0": 10}, {"s0": 10}, {"s1": 4}]
    steps = rows_per_step(adder(*prompts(36, 4), chunk_tokens=10, page_tokens=PAGE, mix_chunked=True))
    assert steps[:5] == [{"s0": 10}, {"s0": 6}, {"s0": 10}, {"s0": 10}, {"s1": 4}]  # the tail begins at 26


def test_carried_rows_of_a_chunk_count_as_cached_tokens() -> None:
    free = rows_per_step(adder(*prompts(160, 8), chunk_tokens=64, mix_chunked=True))
    bounded = rows_per_step(adder(*prompts(160, 8), chunk_tokens=64, mix_chunked=True, max_cached_tokens=100))
    assert free[2] == {"s0": 32, "s1": 8}
    assert bounded[2] == {"s0": 32}  # 128 carried rows have used the limit up


@pytest.mark.parametrize(
    ("limits", "joined"),
    [
        ({}, {"s0": 24, "s1": 24}),
        ({"max_extend_tokens": 40}, {"s0": 24}),
        ({"max_extend_tokens": 48}, {"s0": 24}),  # 24 tokens take two pages of 16: 32 + 32
        ({"max_extend_tokens": 63}, {"s0": 24}),
        ({"max_extend_tokens": 64}, {"s0": 24, "s1": 24}),
        ({"max_extend_tokens": 48, "page_tokens": 8}, {"s0": 24, "s1": 24}),
        ({"max_requests": 1}, {"s0": 24}),
        ({"max_requests": 2}, {"s0": 24, "s1": 24}),
        ({"max_buffer_bytes": 63 * 8, "buffer_bytes_per_token": 8}, {"s0": 24}),
        ({"max_buffer_bytes": 64 * 8, "buffer_bytes_per_token": 8}, {"s0": 24, "s1": 24}),
    ],
)
def test_limits_stop_adding_to_a_batch(limits: dict[str, int], joined: dict[str, int]) -> None:
    assert rows_per_step(adder(*prompts(24, 24), **limits))[0] == joined


@pytest.mark.parametrize(
    "limits",
    [{"max_requests": 1}, {"max_extend_tokens": 8}, {"max_buffer_bytes": 8}, {"max_cached_tokens": 1}],
)
def test_no_limit_blocks_a_single_oversized_request(limits: dict[str, int]) -> None:
    assert rows_per_step(adder(*prompts(24), **limits))[0] == {"s0": 24}


def test_decodes_wait_while_a_prefill_batch_can_be_made() -> None:
    steps = rows_per_step(adder(*prompts(8, outputs=4), session(8, 2, at=1, first_token=5000)))
    assert steps[:3] == [{"s0": 8}, {"s1": 8}, {"s0": 1, "s1": 1}]


# -- warm and cold


@pytest.mark.parametrize(
    ("warm", "lead", "skips", "passes", "age_ms", "verdict"),
    [
        (True, Lead.NONE, 0, 0, 0, Verdict.ADMIT),
        (True, Lead.WARM, 99, 99, 1e9, Verdict.ADMIT),
        (True, Lead.COLD, 0, 0, 0, Verdict.ADMIT),
        (False, Lead.NONE, 99, 99, 1e9, Verdict.ADMIT),
        (False, Lead.COLD, 99, 99, 1e9, Verdict.ADMIT),
        (False, Lead.WARM, 0, 0, 0, Verdict.SKIP),
        (False, Lead.WARM, 15, 2, 4999.9, Verdict.SKIP),
        (False, Lead.WARM, 16, 0, 0, Verdict.STOP),
        (False, Lead.WARM, 0, 3, 0, Verdict.STOP),
        (False, Lead.WARM, 0, 0, 5000.0, Verdict.STOP),
    ],
)
def test_affinity_decides_as_its_table_says(
    warm: bool, lead: Lead, skips: int, passes: int, age_ms: float, verdict: Verdict
) -> None:
    assert Affinity().judge(warm=warm, lead=lead, skips=skips, passes=passes, age_ms=age_ms) is verdict


def warm_and_cold(waves: int, **options: Any) -> Replay:
    """A prompt of 100 tokens is resident; each tick a warm request that shares it
    leads, a cold one waits from tick 2.
    """
    shared = [session(100, 1, first_token=500)]
    warm = [session(100, 1, at=2 + wave, first_token=500) for wave in range(waves)]
    cold = session(40, 1, at=2, first_token=9000)
    case = workload(
        *shared,
        warm[0],
        cold,
        *warm[1:],
        policy="sglang_adder",
        options={"warm_cold": True, **options},
        prefix_cache=True,
        max_num_batched_tokens=512,
        pool_cells=900,
        prefix_block_tokens=1,
    )
    played = replay(case)
    assert played.run.problems == []
    return played


def deferred(played: Replay) -> list[int]:
    return [
        traced.step
        for traced in played.run.trace
        if any(i.kind.value == "defer" and i.request_id == "s2" for i in traced.flight.plan.intents)
    ]


def test_a_cold_request_is_not_deferred_behind_later_arrivals() -> None:
    """It is the head of the queue in the pass after its first deferral, and the head always leads a batch."""
    played = warm_and_cold(8)
    assert deferred(played) == [2]
    assert played.run.emitted_at[2] == [3]


def test_a_pass_skips_at_most_w_cold_requests_then_the_scan_stops() -> None:
    shared = session(100, 1, first_token=500)
    lead = session(100, 1, at=2, first_token=500)
    cold = [session(4, 1, at=2, first_token=9000 + 100 * i) for i in range(5)]
    follower = session(100, 1, at=2, first_token=500)
    played = replay(
        workload(
            shared,
            lead,
            *cold,
            follower,
            policy="sglang_adder",
            options={"warm_cold": True, "max_skips": 3},
            prefix_cache=True,
            max_num_batched_tokens=512,
            pool_cells=900,
            prefix_block_tokens=1,
        )
    )
    intents = [(i.kind.value, i.request_id) for i in played.run.trace[2].flight.plan.intents]
    assert intents == [("admit", "s1"), ("defer", "s2"), ("defer", "s3"), ("defer", "s4")]
    admitted = [i.request_id for i in played.run.trace[3].flight.plan.intents]
    assert admitted == ["s2", "s3", "s4", "s5", "s6", "s7"]  # cold leads, everybody joins


def test_an_old_cold_request_stops_the_scan_and_leads_the_next_batch() -> None:
    played = warm_and_cold(2, max_age_ms=TICK_MS / 2)
    assert deferred(played) == [2]
    young = warm_and_cold(2, max_passes=0)
    assert deferred(young) == []  # stopped at once, not skipped
    assert young.run.emitted_at[2] == [3]


def test_priority_scheduling_turns_the_rule_off_and_orders_by_priority() -> None:
    played = warm_and_cold(2, priority_scheduling=True)
    assert deferred(played) == []
    assert played.run.emitted_at[2] == [2]


def test_warm_means_at_least_64_cached_tokens() -> None:
    for shared_tokens, is_warm in ((64, True), (63, False)):
        first = session(100, 1, first_token=500)
        lead = session(100, 1, at=2, first_token=500)
        other = session(shared_tokens, 1, first_token=500)
        follower = type(first)(prompt=other.prompt + tuple(range(9000, 9010)), max_tokens=1, arrival_step=2)
        played = replay(
            workload(
                first,
                lead,
                follower,
                policy="sglang_adder",
                options={"warm_cold": True},
                prefix_cache=True,
                max_num_batched_tokens=512,
                pool_cells=900,
                prefix_block_tokens=1,
            )
        )
        assert ("s2" in rows_per_step(played)[2]) is is_warm


def test_a_tail_that_begins_off_a_page_stays_alone_although_there_is_room() -> None:
    steps = rows_per_step(adder(*prompts(33, 4), chunk_tokens=12, page_tokens=PAGE, mix_chunked=True))
    assert steps[:5] == [{"s0": 12}, {"s0": 4}, {"s0": 12}, {"s0": 5}, {"s1": 4}]


def test_the_warm_and_cold_rule_is_off_by_default() -> None:
    played = warm_and_cold(2, warm_cold=False)
    assert deferred(played) == []
    assert played.run.emitted_at[2] == [2]
