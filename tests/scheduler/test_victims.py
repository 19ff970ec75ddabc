"""Who gives way and why: the policy's victim whenever cells are short, and its record."""

from __future__ import annotations

from typing import Any

import pytest

from scheduler.limits import Layout
from scheduler.records import PolicyIdentity, Preemption, PreemptionMode, PreemptionReason
from tests.scheduler.serving import OPTIMISTIC, Serving, request

LAYOUTS = (Layout.UNIFIED, Layout.STOCK)


def preemptions(serving: Serving) -> list[Preemption]:
    return [item for flight, _ in serving.trace for item in flight.preemptions]


def crowded(
    policy: str, layout: Layout, *, priorities: tuple[int, ...] = (0, 0, 0), **options: Any
) -> Serving:
    """Three sessions of 3 rows each run one after the other; 10 cells, so in the second decode step only
    the first finds one (3 * 3 + 1).
    """
    serving = Serving(
        cells=10,
        policy=policy,
        layout=layout,
        prefix_cache=False,
        options=options,
        max_num_batched_tokens=9,
        max_num_seqs=4,
    )
    serving.submit(*[request(name, 3, 6, priority=p) for name, p in zip("abc", priorities, strict=True)])
    serving.step()
    assert sorted(serving.scheduler.table.running) == ["a", "b", "c"]
    return serving


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("policy", "priorities", "victim", "score"),
    [
        ("fcfs", (0, 0, 0), "c", (2,)),
        ("vllm_fcfs", (0, 0, 0), "c", (2,)),
        ("vllm_priority", (1, 2, 3), "c", (3, 0.0, 2)),
        ("vllm_priority", (9, 2, 3), "a", (9, 0.0, 0)),
        ("static_priority", (1, 9, 3), "b", (9, 0.0, 1)),
        ("aging", (1, 9, 3), "b", (9, 0.0, 1)),
    ],
)
def test_the_victim_is_whom_the_policy_says_though_another_session_is_blocked(
    layout: Layout, policy: str, priorities: tuple[int, ...], victim: str, score: tuple
) -> None:
    options = {} if policy.startswith("vllm") else OPTIMISTIC
    serving = crowded(policy, layout, priorities=priorities, **options)
    serving.step()
    record = preemptions(serving)[0]
    assert (record.victim, record.reason) == (victim, PreemptionReason.NO_CELLS)
    assert sorted(record.candidates) == ["a", "b", "c"]
    assert record.scores[record.candidates.index(victim)] == score == max(record.scores)
    assert serving.scheduler.table.views[victim].state.value == "suspended"
    serving.run()
    serving.check_all_as_alone()


def test_a_record_says_everything_about_a_preemption() -> None:
    serving = crowded("vllm_priority", Layout.UNIFIED, priorities=(9, 2, 3))
    serving.step()
    assert preemptions(serving) == [
        Preemption(
            decision_id=2,
            policy=PolicyIdentity("vllm_priority"),
            victim="a",
            client_id="default",
            epoch=1,
            reason=PreemptionReason.NO_CELLS,
            mode=PreemptionMode.RECOMPUTE,
            is_fallback=False,
            requester="c",  # b took the last cell
            wanted_rows=1,
            available_rows=0,
            candidates=("b", "c", "a"),
            scores=((2, 0.0, 1), (3, 0.0, 2), (9, 0.0, 0)),
            tie_break="later arrival, then later submission",
            released_rows=3,
            kept_rows=0,
            freed_cells=(3,),
            suspensions=0,
        )
    ]


def test_telemetry_counts_preemptions_by_reason_and_what_they_gave_back() -> None:
    serving = crowded("fcfs", Layout.UNIFIED, **OPTIMISTIC)
    record = serving.step()
    assert (record.preempted, record.preempted_no_cells, record.released_rows) == (1, 1, 3)
    serving.scheduler.preempt("b", serving.now_ms)
    record = serving.step()
    assert (record.preempted, record.preempted_asked, record.preempted_again) == (1, 1, 0)
    serving.run()
    totals = serving.totals.values
    by_reason = sum(totals[f"preempted_{reason.value}"] for reason in PreemptionReason)
    assert totals["preempted"] == by_reason == len(preemptions(serving)) == totals["resumed"]
    assert totals["resume_latency_ms"] >= 10 * totals["resumed"] > 0


def high_and_low() -> Serving:
    """``a`` lies below, ``b`` above; ``a`` ends and its 4 cells are all that is left below ``b``'s."""
    serving = Serving(cells=11, prefix_cache=False, options=OPTIMISTIC, max_num_batched_tokens=9)
    serving.submit(request("a", 3, 2), request("b", 3, 8))
    serving.step(2)
    assert list(serving.ends) == ["a"]
    return serving


def test_a_session_whose_own_cells_lie_too_high_is_rebuilt_lower_and_nobody_is_chosen() -> None:
    serving = high_and_low()
    serving.submit(request("c", 1, 2))
    serving.scheduler.policy.choose_victim = None  # must not be asked
    serving.run()
    serving.check_all_as_alone()
    records = preemptions(serving)
    assert {item.reason for item in records} == {PreemptionReason.OWN_CELLS_TOO_HIGH}
    assert all(item.victim == item.requester == "b" and not item.tie_break for item in records)
    assert all((item.mode is PreemptionMode.REBUILD_TAIL) is (item.kept_rows > 0) for item in records)


def test_an_entry_never_makes_anybody_give_way() -> None:
    """vLLM-shaped: a step with a preemption has no waiting pass, whatever was planned."""
    serving = Serving(
        cells=12, policy="vllm_fcfs", prefix_block_tokens=2, max_num_batched_tokens=6, max_num_seqs=6
    )
    for index in range(8):
        serving.submit(request(f"s{index}", [*range(3 + index % 3), 90 + index], 5))
        serving.step(2)
    serving.run()
    serving.check_all_as_alone()
    stepped = [flight for flight, _ in serving.trace]
    assert any(flight.preemptions for flight in stepped)
    assert all(not (flight.preemptions and flight.plan.intents) for flight in stepped)
