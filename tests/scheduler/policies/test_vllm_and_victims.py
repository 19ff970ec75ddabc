"""Numbers of victims and resumes, and the passes of the vLLM-shaped policies."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from parity.run.runner import replay
from parity.suites.workloads import intervals, play, rows_per_step, session, workload
from scheduler.limits import StepLimits
from scheduler.policies import make_policy
from scheduler.records import IllegalTransition, Request, SessionState, SessionView
from scheduler.resume import (
    Preservation,
    PreservationReceipt,
    ReleaseReceipt,
    SuspensionKey,
    issue_ticket,
    suspension_key,
)


def crowded(policy: str, **options: Any) -> Any:
    """Running [A (priority 10), B (priority 1)] fill the pool with four rows each; both want one more in step
    2.
    """
    return play(
        session(3, 5, priority=10),
        session(4, 5, at=1, priority=1, first_token=3000),
        policy=policy,
        options=options,
        pool_cells=8,
    )


def first_failure(played: Any) -> tuple[list[str], list[str]]:
    """Who ran in the step of the first preemption, and who was suspended after it."""
    for traced, record in zip(played.run.trace, played.run.records, strict=True):
        if record.preempted:
            ran = [c.request_id for c in traced.flight.plan.chunks]
            return ran, sorted({"s0", "s1"} - set(ran))
    raise AssertionError("nobody was preempted")


def test_fcfs_evicts_the_tail_b_which_frees_four_rows_and_a_runs() -> None:
    played = crowded("vllm_fcfs")
    assert first_failure(played) == (["s0"], ["s1"])
    failed = next(i for i, record in enumerate(played.run.records) if record.preempted)
    assert played.run.records[failed - 1].cells_available == 0
    assert played.run.records[failed].cells_available == 8 - 4 - 1  # B's four rows back, one of them A's now


def test_priority_evicts_a_the_requester_and_nothing_runs() -> None:
    played = crowded("vllm_priority")
    assert first_failure(played)[0] == []
    failed = next(i for i, record in enumerate(played.run.records) if record.preempted)
    assert played.run.records[failed].suspended == 1
    assert [name for name, _, _ in intervals(played)[failed + 1]] == ["s1"]


def test_no_waiting_session_enters_in_the_step_of_a_preemption() -> None:
    played = play(
        session(3, 5),
        session(3, 5, first_token=3000),
        session(1, 1, first_token=4000, at=2),
        policy="vllm_fcfs",
        pool_cells=8,
    )
    for traced, record in zip(played.run.trace, played.run.records, strict=True):
        if record.preempted:
            assert traced.flight.plan.intents == ()


def test_running_sessions_come_before_waiting_ones_and_share_one_budget() -> None:
    played = play(
        session(4, 4),
        session(20, 2, at=1, first_token=3000),
        session(4, 2, at=2, first_token=5000),
        policy="vllm_fcfs",
        max_num_batched_tokens=8,
        max_num_seqs=8,
    )
    assert rows_per_step(played)[:5] == [
        {"s0": 4},
        {"s0": 1, "s1": 7},
        {"s0": 1, "s1": 7},
        {"s0": 1, "s1": 6, "s2": 1},
        {"s1": 1, "s2": 3},
    ]


def test_long_prefills_are_clamped_by_the_threshold() -> None:
    played = play(
        session(10, 2),
        session(3, 2, first_token=3000),
        policy="vllm_fcfs",
        options={"long_prefill_threshold": 4},
    )
    assert [step.get("s0") for step in rows_per_step(played)[:4]] == [4, 4, 2, 1]
    assert rows_per_step(played)[0]["s1"] == 3


def test_a_waiting_session_needs_rows_for_its_next_chunk_only() -> None:
    played = play(session(2, 9), session(2, 9, first_token=3000), policy="vllm_fcfs", pool_cells=11)
    assert sorted(rows_per_step(played)[0]) == ["s0", "s1"]  # 10 + 10 rows to come, 11 there
    assert sorted(rows_per_step(play(session(2, 9), session(2, 9, first_token=3000), pool_cells=11))[0]) == [
        "s0"
    ]


# -- resume


def suspended(prompt: int, emitted: int, *, epoch: int = 1, generation: int = 0) -> SessionView:
    request = Request(request_id="r", prompt=tuple(range(prompt)), max_tokens=20, generation=generation)
    return SessionView(
        request, 0, SessionState.SUSPENDED, emitted, 0, prompt + emitted - 1, 0, 9, epoch, True, 0.0, 1.0, 1.0
    )


def ticket(view: SessionView, kind: Preservation, ready: int, **receipts: Any) -> Any:
    key = suspension_key(view)
    release = receipts.pop("release", ReleaseReceipt(key, True, ready))
    preservation = receipts.pop("preservation", PreservationReceipt(key, kind, ready))
    made = issue_ticket(view, release, preservation, allocation_ready=True, stages_ready=True)
    return (made.ready_tokens, made.target_tokens), (made.target_tokens, view.limit_at(made.target_tokens))


@pytest.mark.parametrize(
    ("prompt", "emitted", "kind", "ready", "rebuild", "ordinary"),
    [
        (5, 2, Preservation.EXACT, 6, (6, 6), (6, 7)),
        (5, 2, Preservation.RECOMPUTE, 0, (0, 6), (6, 7)),
        (5, 3, Preservation.PARTIAL, 4, (4, 7), (7, 8)),
        (4, 2, Preservation.FAILED, 3, (0, 5), (5, 6)),
    ],
)
def test_a_resume_rebuilds_exactly_what_is_not_ready_and_goes_on_at_the_frontier(
    prompt: int,
    emitted: int,
    kind: Preservation,
    ready: int,
    rebuild: tuple[int, ...],
    ordinary: tuple[int, ...],
) -> None:
    assert ticket(suspended(prompt, emitted), kind, ready) == (rebuild, ordinary)


@pytest.mark.parametrize("field", ["release", "preservation"])
@pytest.mark.parametrize(("epoch", "generation"), [(10, 0), (11, 1)])
def test_a_receipt_of_another_epoch_or_generation_gives_no_ticket(
    field: str, epoch: int, generation: int
) -> None:
    view = suspended(5, 2, epoch=11)
    stale = SuspensionKey("r", generation, view.committed, epoch)
    receipt = (
        ReleaseReceipt(stale, True, 6)
        if field == "release"
        else PreservationReceipt(stale, Preservation.EXACT, 6)
    )
    with pytest.raises(IllegalTransition, match="another generation"):
        ticket(view, Preservation.EXACT, 6, **{field: receipt})


def test_a_release_or_promotion_in_flight_gives_no_ticket() -> None:
    view = suspended(5, 2)
    key = suspension_key(view)
    with pytest.raises(IllegalTransition, match="release still pending"):
        ticket(view, Preservation.EXACT, 6, release=ReleaseReceipt(key, False, 0))
    with pytest.raises(IllegalTransition, match="promotion still in flight"):
        ticket(
            view,
            Preservation.EXACT,
            6,
            preservation=PreservationReceipt(key, Preservation.EXACT, 6, promoted=False),
        )


def test_a_rebuild_emits_nothing_and_debits_nobody() -> None:
    played = crowded("vllm_fcfs")
    rebuilds = 0
    for traced in played.run.trace:
        for item in traced.result.chunks if traced.result else ():
            if item.before < traced.flight.views[item.request_id].committed:
                rebuilds += 1
                assert item.token is None
                others = sum(i.after - i.before for i in traced.result.chunks if i is not item)
                assert sum(traced.result.debits.values()) == others
    assert rebuilds


@pytest.mark.parametrize("policy", ["vllm_fcfs", "vllm_priority"])
def test_limits_that_contradict_each_other_are_refused_as_by_vllm(policy: str) -> None:
    made = make_policy(policy, long_prefill_threshold=20)
    even = StepLimits(max_num_batched_tokens=8, max_num_seqs=8)
    made.check_limits(even, max_session_tokens=20)
    with pytest.raises(ValueError, match="max_num_batched_tokens 7 is below max_num_seqs 8"):
        made.check_limits(replace(even, max_num_batched_tokens=7), max_session_tokens=20)
    with pytest.raises(ValueError, match="long_prefill_threshold 20 is above the 19 tokens"):
        made.check_limits(even, max_session_tokens=19)
    with pytest.raises(ValueError, match="max_num_batched_tokens 7 is below max_num_seqs 8"):
        replay(workload(session(1, 1), policy=policy, max_num_batched_tokens=7, max_num_seqs=8))
    with pytest.raises(ValueError, match="long_prefill_threshold -1"):
        make_policy(policy, long_prefill_threshold=-1)


@pytest.mark.parametrize("policy", ["orca", "vllm_fcfs", "vllm_priority"])
def test_a_reservation_is_refused_where_nothing_would_follow_it(policy: str) -> None:
    with pytest.raises(ValueError, match="reservation"):
        make_policy(policy, reservation="maximum")
