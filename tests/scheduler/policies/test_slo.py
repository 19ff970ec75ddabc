"""Numbers of deadlines, overload, tails: least slack, bounded and rejecting
overload, SCORPIO's guards, DistServe.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest

from parity.checkers.outcomes import OutcomeLedger, ledger_of, served_sessions
from parity.checkers.rows import backlog_after
from parity.suites.workloads import TICK_MS, order_of_first_chunks, play, rows_per_step, session
from scheduler.policy.cost import deadline_ms
from scheduler.policy.goodput import sweep_goodput
from scheduler.records import Request, ServiceLevel, SessionState, SessionView

SLO = ServiceLevel(ttft_ms=30.0, tbt_ms=20.0)
BOUNDED = {"overload": {"kind": "bounded", "max_live": 4}}


def burst(options: Any = None, policy: Any = "least_slack") -> Any:
    """Six requests at once, two rows a tick, one first-token and one next-token unit each."""
    played = play(
        *[session(1, 2, slo=SLO, first_token=1000 * (i + 1)) for i in range(6)],
        policy=policy,
        options=options,
        max_num_batched_tokens=2,
    )
    return played, ledger_of(served_sessions(played.run), window_ms=60.0)


def test_accepting_all_of_the_burst_completes_six_and_misses_two_first_tokens() -> None:
    played, ledger = burst()
    assert (ledger.offered, ledger.completed, ledger.valid, ledger.missed, ledger.rejected) == (6, 6, 4, 2, 0)
    late = [item for item in served_sessions(played.run) if not item.is_valid]
    assert [item.ttft_ms for item in late] == [40.0, 40.0]
    assert all(gap <= 20.0 for item in late for gap in item.gaps_ms)


def test_two_endpoints_of_the_burst_are_selected_with_negative_predicted_slack() -> None:
    played, _ = burst()
    slacks = [key[0] for traced in played.run.trace for key in traced.flight.plan.order]
    assert sum(slack < 0 for slack in slacks) == 2


def test_a_cap_of_four_live_accepts_four_of_the_burst_all_valid_at_the_same_goodput() -> None:
    _, all_accepted = burst()
    _, bounded = burst(BOUNDED)
    assert (bounded.accepted, bounded.valid, bounded.rejected, bounded.missed) == (4, 4, 2, 0)
    assert bounded.figure("request_goodput").value == all_accepted.figure("request_goodput").value
    assert bounded.figure("request_throughput").value < all_accepted.figure("request_throughput").value


def test_rejecting_the_infeasible_gives_up_the_two_that_would_be_late() -> None:
    _, ledger = burst({"overload": {"kind": "reject_infeasible", "tick_ms": TICK_MS}})
    assert (ledger.valid, ledger.missed, ledger.rejected) == (4, 0, 2)


def test_scorpio_rejects_what_cannot_meet_its_first_deadline() -> None:
    _, ledger = burst({"tick_ms": TICK_MS}, policy="scorpio_guard")
    assert ledger.rejected and ledger.valid + ledger.missed + ledger.rejected == 6
    assert all(
        item.ttft_ms <= 30.0
        for item in served_sessions(burst({"tick_ms": TICK_MS}, "scorpio_guard")[0].run)
        if item.emissions_ms
    )


def test_scorpio_orders_by_deadline_and_bounds_the_virtual_batch() -> None:
    tight, loose = ServiceLevel(ttft_ms=1000.0, tbt_ms=20.0), ServiceLevel(ttft_ms=900.0, tbt_ms=40.0)
    options = {"tick_ms": TICK_MS, "base_ms": 4.0, "ms_per_session": 8.0}
    played = play(
        *[
            session(2, 6, slo=slo, first_token=1000 * (i + 1))
            for i, slo in enumerate((tight, tight, loose, loose))
        ],
        policy="scorpio_guard",
        options=options,
    )
    assert order_of_first_chunks(played)[:2] == ["s2", "s3"]
    started = {
        name: next(i for i, step in enumerate(rows_per_step(played)) if name in step)
        for name in ("s0", "s1", "s2", "s3")
    }
    assert started["s1"] > started["s0"] >= started["s2"]


@pytest.mark.parametrize(("base_ms", "together"), [(4.0, 2), (4.5, 1)])
def test_scorpio_admits_up_to_the_tightest_limit_exactly(base_ms: float, together: int) -> None:
    """Three sessions of 20 ms: 4 + 8 * 2 = 20 admits two; half a millisecond more only one."""
    options = {"tick_ms": TICK_MS, "base_ms": base_ms, "ms_per_session": 8.0}
    slo = ServiceLevel(tbt_ms=20.0)
    played = play(
        *[session(2, 4, slo=slo, first_token=1000 * (i + 1)) for i in range(3)],
        policy="scorpio_guard",
        options=options,
    )
    assert max(map(len, rows_per_step(played))) == together


@pytest.mark.parametrize(("limit", "together"), [(40.0, 3), (39.0, 2)])
def test_scorpio_counts_a_loose_session_by_its_share_of_the_steps(limit: float, together: int) -> None:
    """A tight one of 20 ms and two loose ones of 40 are 1 + 1/2 + 1/2 = 2: 4 + 8 * 2 = 20."""
    options = {"tick_ms": TICK_MS, "base_ms": 4.0, "ms_per_session": 8.0}
    limits = [20.0, limit, limit]
    played = play(
        *[
            session(2, 9, slo=ServiceLevel(tbt_ms=ms), first_token=1000 * (i + 1))
            for i, ms in enumerate(limits)
        ],
        policy="scorpio_guard",
        options=options,
    )
    assert played.run.records[0].running == together


def test_scorpio_decodes_a_loose_session_every_other_step_beside_a_tight_one() -> None:
    tight, loose = ServiceLevel(tbt_ms=20.0), ServiceLevel(tbt_ms=40.0)
    played = play(
        session(1, 9, slo=tight), session(1, 4, slo=loose, first_token=3000), policy="scorpio_guard"
    )
    steps = rows_per_step(played)
    assert all("s0" in step for step in steps[:9])
    assert [i for i, step in enumerate(steps) if "s1" in step][1:4] == [2, 4, 6]
    assert all(item.is_valid for item in served_sessions(played.run))


@pytest.mark.parametrize(("options", "expected"), [(BOUNDED, (122, 0, 118)), ({}, None)])
def test_saturation_closes_and_a_bounded_policy_serves_122_of_240(
    options: dict[str, dict[str, int | str]], expected: tuple[int, ...] | None
) -> None:
    """Two arrivals a tick for 120 ticks: 240 requests of two rows in a window of 130 ticks of two rows."""
    sessions = [session(1, 2, at=i // 2, slo=SLO, first_token=1000 + 10 * i) for i in range(240)]
    played = play(
        *sessions,
        policy="least_slack",
        options=options,
        max_num_batched_tokens=2,
        max_num_seqs=256,
        num_sequences=256,
        pool_cells=1000,
    )
    ledger = ledger_of(served_sessions(played.run, until_ms=1300.0), window_ms=1300.0)
    arrived = [2 * 2] * 120 + [0] * 10  # rows of two requests a tick, and ten ticks to drain
    assert backlog_after(arrived, [2] * 130)[-1] == 220
    assert ledger.offered == ledger.valid + ledger.missed + ledger.rejected + ledger.open == 240
    if expected is not None:
        assert (ledger.valid, ledger.missed, ledger.rejected) == expected
        assert ledger.figure("completed_attainment").value == 1
        assert ledger.figure("offered_attainment").value == Fraction(122, 240)
        assert f"{float(ledger.figure('offered_attainment').value):.3%}" == "50.833%"
    else:
        assert ledger.rejected == 0
        # 220 rows of excess are 110 requests that cannot be in time
        assert ledger.open + ledger.missed >= 110


def test_goodput_is_the_last_swept_rate_before_attainment_falls_below_alpha() -> None:
    def attainment(rate: float) -> float:
        """Offered attainment of least slack at ``rate`` requests per tick: a replay per rate."""
        sessions = [session(1, 2, at=int(i / rate), slo=SLO, first_token=1000 + 10 * i) for i in range(60)]
        played = play(*sessions, policy="least_slack", max_num_batched_tokens=2, max_num_seqs=64)
        ledger = ledger_of(served_sessions(played.run), window_ms=1e6)
        return float(ledger.figure("offered_attainment").value)

    sweep = sweep_goodput(attainment, [0.5, 1.0, 1.5, 2.0], alpha=0.9)
    assert sweep.rate == 1.0  # two rows a tick are one request a tick
    assert [rate for rate, _ in sweep.points] == [0.5, 1.0, 1.5]


def test_ledger_refuses_outcomes_that_do_not_close() -> None:
    with pytest.raises(ValueError, match="do not close"):
        OutcomeLedger(
            window_ms=1.0,
            offered=5,
            valid=2,
            late=0,
            failed=0,
            cancelled=0,
            rejected=2,
            open=0,
            emitted_tokens=2,
            valid_tokens=2,
        )


def test_of_equal_slacks_the_next_token_comes_before_an_older_first_token() -> None:
    """At 10 ms: s0 has waited since 0 and is due at 40, s1 emitted at 10 and is due at 40; one row a tick."""
    first = session(1, 2, at=0, slo=ServiceLevel(ttft_ms=40.0), first_token=1000)
    second = session(1, 2, at=0, slo=ServiceLevel(ttft_ms=20.0, tbt_ms=30.0), first_token=2000)
    played = play(first, second, policy="least_slack", max_num_batched_tokens=1)
    assert [name for step in rows_per_step(played) for name in step] == ["s1", "s1", "s0", "s0"]


def test_a_deadline_counts_from_arrival_also_when_the_request_was_submitted_later() -> None:
    request = Request(
        request_id="r", prompt=(1,), max_tokens=2, arrival_ms=5.0, slo=ServiceLevel(ttft_ms=30.0, tbt_ms=20.0)
    )
    waiting = SessionView(request, 0, SessionState.WAITING, 0, 0, 0, 0, 0, 0, True, 25.0, None, None)
    emitting = SessionView(request, 0, SessionState.RUNNING, 1, 1, 1, 0, 0, 3, True, 25.0, 40.0, 50.0)
    assert (deadline_ms(waiting), deadline_ms(emitting)) == (35.0, 70.0)


@pytest.mark.parametrize(
    ("limit", "gaps"),
    [
        (30.0, [2, 1, 2, 1, 2, 1]),  # a share of 2/3: credit 2/3, 4/3, 1, ...
        (40.0, [2, 2, 2, 2, 2, 2]),
        (50.0, [3, 2, 3, 2, 3, 2]),  # 2/5: 2/5, 4/5, 6/5, then 1/5 + 4/5
        (70.0, [4, 3, 4, 3, 4, 3]),  # 2/7 comes to 8/7 after four steps, to 1 after three more
        (100.0, [5, 5, 5, 5, 5, 5]),
    ],
)
def test_scorpio_credits_give_a_session_its_limit_in_the_mean_beside_a_tight_one(
    limit: float, gaps: list[int]
) -> None:
    """A step takes 20 ms, the tight session's limit, and runs it every time."""
    played = play(
        session(1, 60, slo=ServiceLevel(tbt_ms=20.0)),
        session(1, 7, slo=ServiceLevel(tbt_ms=limit), first_token=3000),
        policy="scorpio_guard",
        ms_per_step=20.0,
    )
    at = played.run.emitted_at
    assert at[0] == list(range(60))
    assert [later - earlier for earlier, later in zip(at[1], at[1][1:], strict=False)] == gaps
    assert 20.0 * (at[1][6] - at[1][0]) / 6 == limit
