"""Numbers of the baseline, the refill, the mixed step and the packed rows."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest

from parity.checkers.outcomes import served_sessions
from parity.checkers.rows import slots_of
from parity.engines.exact import ExactEngine
from parity.suites.workloads import TICK_MS, play, rows_per_step, session
from scheduler.limits import Layout, PoolLimits, Sharing, StepLimits
from scheduler.loop import Scheduler
from scheduler.policies import make_policy
from scheduler.records import Completion, FinishReason, Phase, Request

SLOTS = 2
A, B, C = 0, 1, 2


def refill_fixture(policy: str, **options: Any) -> Any:
    """A has 2 outputs and B 8, both at once; C has 3 and comes at cut 2. Nobody declares its true length."""
    return play(
        session(1, 20, hidden=2),
        session(1, 20, hidden=8),
        session(1, 20, hidden=3, at=2),
        policy=policy,
        options=options,
        max_num_seqs=SLOTS,
    )


def occupancy(played: Any) -> tuple[int, Fraction]:
    """Iterations, and useful slots over available slots."""
    slots = slots_of(played.run, slots=SLOTS)
    return slots.iterations, slots.utilization


def test_fixed_batch_needs_11_iterations_with_13_of_22_slots_useful() -> None:
    assert occupancy(refill_fixture("fixed_batch")) == (11, Fraction(13, 22))


@pytest.mark.parametrize("policy", ["fcfs", "orca", "vllm_fcfs", "vllm_priority", "vtc", "static_priority"])
def test_iteration_refill_needs_8_iterations_with_13_of_16_slots_useful(policy: str) -> None:
    assert occupancy(refill_fixture(policy)) == (8, Fraction(13, 16))
    assert Fraction(13, 16) == Fraction("0.8125")


def test_fixed_cohort_of_two_and_eight_outputs_uses_10_of_16_slots() -> None:
    played = play(
        session(1, 20, hidden=2), session(1, 20, hidden=8), policy="fixed_batch", max_num_seqs=SLOTS
    )
    assert occupancy(played) == (8, Fraction(10, 16))


def test_first_token_of_c_waits_for_the_cohort_under_fixed_batch_and_for_one_step_under_refill() -> None:
    fixed, refill = (served_sessions(refill_fixture(policy).run)[C] for policy in ("fixed_batch", "fcfs"))
    assert (fixed.ttft_ms, refill.ttft_ms) == (7 * TICK_MS, TICK_MS)


def test_single_lane_never_has_two_sessions_in_a_step_and_ends_after_all_iterations() -> None:
    steps = rows_per_step(refill_fixture("single_lane"))
    assert [len(step) for step in steps] == [1] * 13


def _scheduler(policy: str, *, stops: Any = None, budget: int = 64, max_num_seqs: int = 8) -> Any:
    limits = PoolLimits(layout=Layout.STOCK, num_cells=200, num_sequences=16, sharing=Sharing.NONE)
    flights = []
    scheduler = Scheduler(
        ExactEngine((limits,), stops=stops),
        make_policy(policy),
        StepLimits(max_num_batched_tokens=budget, max_num_seqs=max_num_seqs),
        observer=lambda flight, result: flights.append((flight, result)),
    )
    return scheduler, flights


def _request(name: str, prompt_tokens: int, outputs: int, **fields: Any) -> Request:
    return Request(request_id=name, prompt=tuple(range(prompt_tokens)), max_tokens=outputs, **fields)


def test_mixed_step_picks_two_decodes_and_a_prefill_in_key_order_and_debits_completed_rows() -> None:
    stop = 5000
    scheduler, flights = _scheduler("static_priority", stops={"req-B": (4, stop)}, budget=6, max_num_seqs=3)
    scheduler.submit(
        _request(
            "req-B", 3, 9, generation=2, client_id="alpha", priority=0, arrival_ms=1.0, stop_token_ids=(stop,)
        ),
        1.0,
    )
    scheduler.submit(_request("req-C", 3, 9, generation=1, client_id="beta", priority=1, arrival_ms=0.0), 1.0)
    scheduler.step(1.0)
    scheduler.steps = StepLimits(max_num_batched_tokens=4, max_num_seqs=3)
    scheduler.submit(_request("req-A", 4, 9, client_id="alpha", arrival_ms=2.0), 2.0)
    scheduler.submit(_request("req-D", 2, 9, client_id="beta", arrival_ms=0.0, priority=-1), 2.0)
    scheduler.submit(_request("req-E", 2, 9, generation=4, client_id="beta", priority=-1), 2.0)
    scheduler.set_ready("req-D", False)
    scheduler.cancel("req-E", 2.0)
    scheduler.take_completions()
    scheduler.step(2.0)
    flight, result = flights[-1]
    assert [(c.request_id, c.generation, c.start, c.stop) for c in flight.plan.chunks] == [
        ("req-B", 2, 3, 4),
        ("req-C", 1, 3, 4),
        ("req-A", 0, 0, 2),
    ]
    assert flight.plan.order == ((0, 0, 1.0, "req-B", 2), (0, 1, 0.0, "req-C", 1), (1, 0, 2.0, "req-A", 0))
    assert (flight.plan.ledger.num_tokens, flight.plan.ledger.num_seqs) == (4, 3)
    assert result.debits == {"alpha": 3, "beta": 1}
    end = scheduler.take_completions()
    assert [(c.request_id, c.reason, len(c.tokens)) for c in end] == [("req-B", FinishReason.STOP, 2)]
    committed = [item.after for item in result.chunks if item.request_id == "req-B"]
    assert (3 + len(end[0].tokens), committed) == (5, [4])  # logical length 5, committed 4
    assert isinstance(end[0], Completion)


def test_packed_rows_have_offsets_0_1_4_5_and_positions_5_0_1_2_2() -> None:
    scheduler, flights = _scheduler("orca")
    for name, prompt_tokens, arrival_ms in (("A", 5, 0.0), ("B", 3, 1.0), ("C", 2, 2.0)):
        scheduler.submit(_request(name, prompt_tokens, 2, arrival_ms=arrival_ms), 2.0)
    scheduler.set_ready("B", False)
    scheduler.step(3.0)
    scheduler.set_ready("B", True)
    scheduler.step(4.0)
    flight, _ = flights[-1]
    assert [(c.request_id, c.start, c.stop) for c in flight.plan.chunks] == [
        ("A", 5, 6),
        ("B", 0, 3),
        ("C", 2, 3),
    ]
    assert flight.batch.offsets == (0, 1, 4, 5)
    assert flight.batch.positions == (5, 0, 1, 2, 2)
    assert [flight.views[name].phase for name in "ABC"] == [Phase.DECODE, Phase.PREFILL, Phase.DECODE]


def test_packed_rows_see_no_other_session() -> None:
    together, _ = _scheduler("orca")
    requests = [_request(name, prompt_tokens, 4) for name, prompt_tokens in (("A", 5), ("B", 3), ("C", 2))]
    for request in requests:
        together.submit(request, 0.0)
    while not together.is_idle:
        together.step(0.0)
    for end in together.take_completions():
        alone, _ = _scheduler("orca")
        alone.submit(next(request for request in requests if request.request_id == end.request_id), 0.0)
        while not alone.is_idle:
            alone.step(0.0)
        assert alone.take_completions()[0].tokens == end.tokens
