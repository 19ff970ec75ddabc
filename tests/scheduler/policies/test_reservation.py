"""Numbers of admission under uncertain outputs: hidden lengths realise what forecasts only guessed."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

import pytest

from parity.checkers.rows import realised_rows
from parity.run.runner import replay
from parity.suites.workloads import play, rows_per_step, session, workload
from scheduler.legality import validate_plan
from scheduler.policies import make_policy
from scheduler.policy.reservation import (
    Recovery,
    answer_allocation,
    estimate_reservation,
    recovery_for,
    request_allocation,
    reservation_error,
)
from scheduler.policy.state import SchedulerState
from scheduler.records import Allocation, AllocationRequest, Request, SessionState, SessionView
from tests.scheduler.serving import OneShard

ROW_BYTES = 131_072
USED, HARD, WATERMARK = 8, 28, 4
SOFT = HARD - WATERMARK
# Total outputs of three requests that have each emitted one: declared maximum, point, p90, realised.
TOTALS = {"A:0": (11, 5, 8, 9), "B:0": (10, 4, 7, 7), "C:0": (10, 4, 6, 8)}
FORECASTS = {name: {"point": point, "p90": p90} for name, (_, point, p90, _) in TOTALS.items()}
POLICIES = {
    "maximum": "maximum",
    "point": {"kind": "point", "forecasts": FORECASTS},
    "p90": {"kind": "quantile", "forecasts": FORECASTS},
    "watermark": {"kind": "watermark", "watermark_rows": WATERMARK, "forecasts": FORECASTS},
}
HIDDEN_ROWS = {name: realised - 1 for name, (*_, realised) in TOTALS.items()}


class PreservedRows(OneShard):
    """Facts of a memory in which every suspended session's rows were preserved
    whole, and one session more runs.
    """

    shares = False

    def available_rows(self) -> int:
        return HARD - USED

    def total_rows(self) -> int:
        return HARD

    def available_sequences(self) -> int:
        return 16

    def cached_tokens(self, view: SessionView) -> int:
        return view.committed

    def pinned_rows(self, view: SessionView) -> int:
        return 0

    def chunk_stop(self, view: SessionView, *, start: int, stop: int) -> int:
        return stop


def resume_ready(index: int, name: str, most: int) -> SessionView:
    request = Request(request_id=name, prompt=(1, 2), max_tokens=most, priority=index)
    return SessionView(request, index, SessionState.SUSPENDED, 1, 0, 2, 0, 4, 1, True, 0.0, 1.0, 1.0)


def resume_state() -> SchedulerState:
    """Three resume-ready requests in order, and a running one that holds rows and wants none."""
    views = {name: resume_ready(i, name, most) for i, (name, (most, *_)) in enumerate(TOTALS.items())}
    holder = SessionView(
        Request(request_id="holder", prompt=(1, 2), max_tokens=1),
        9,
        SessionState.RUNNING,
        0,
        2,
        2,
        0,
        2,
        0,
        False,
        0.0,
        None,
        None,
    )
    names = tuple(views)
    return SchedulerState(
        1,
        1,
        0.0,
        (),
        ("holder",),
        names,
        MappingProxyType({**views, "holder": holder}),
        PreservedRows(),
        64,
        16,
        64,
        MappingProxyType({}),
    )


def planned(kind: str) -> Any:
    policy, state = make_policy("fcfs", reservation=POLICIES[kind]), resume_state()
    plan = policy.plan_iteration(state)
    validate_plan(state, plan, policy)
    return plan


def entered(kind: str) -> list[str]:
    return [intent.request_id for intent in planned(kind).intents]


@pytest.mark.parametrize(
    ("kind", "names", "forecast_rows"),
    [
        ("maximum", ["A:0", "B:0"], 27),
        ("point", ["A:0", "B:0", "C:0"], 18),
        ("p90", ["A:0", "B:0", "C:0"], 26),
        ("watermark", ["A:0", "B:0"], 21),
    ],
)
def test_each_reservation_admits_what_its_forecast_allows(
    kind: str, names: list[str], forecast_rows: int
) -> None:
    assert entered(kind) == names
    policy, views = make_policy("fcfs", reservation=POLICIES[kind]), resume_state().views
    estimated = [policy.future_rows(resume_state(), views[name]) - views[name].committed for name in names]
    assert USED + sum(estimated) == forecast_rows <= (SOFT if kind == "watermark" else HARD)


@pytest.mark.parametrize("kind", ["point", "p90"])
def test_realised_demand_of_29_breaks_the_hard_ceiling_by_one_row_of_128_kib(kind: str) -> None:
    realised = realised_rows(planned(kind), used_rows=USED, hidden_rows=HIDDEN_ROWS)
    assert realised == 29
    assert (realised - HARD) * ROW_BYTES == 128 * 1024


def test_watermark_plan_ends_at_22_below_the_soft_ceiling() -> None:
    assert realised_rows(planned("watermark"), used_rows=USED, hidden_rows=HIDDEN_ROWS) == 22 < SOFT


def test_maximum_leaves_5_rows_unused_and_point_and_p90_are_11_and_3_rows_short() -> None:
    assert 27 - realised_rows(planned("maximum"), used_rows=USED, hidden_rows=HIDDEN_ROWS) == 5
    assert 29 - 18 == sum(TOTALS[n][3] - TOTALS[n][1] for n in TOTALS) == 11
    assert 29 - 26 == sum(TOTALS[n][3] - TOTALS[n][2] for n in TOTALS) == 3


@pytest.mark.parametrize("kind", ["point", "p90"])
def test_c_is_the_victim_when_an_optimistic_plan_is_one_row_short(kind: str) -> None:
    """The same totals as new sessions beside a holder of 5 rows that grows by one a
    step: 11 + 21 rows at the peak.
    """
    forecasts = {f"s{i + 1}": forecast for i, forecast in enumerate(FORECASTS.values())}
    option = dict(POLICIES[kind], forecasts={**forecasts, "s0": {"point": 1, "p90": 1}})
    three = [
        session(1, most, hidden=hidden, first_token=1000 * (i + 2), priority=i)
        for i, (most, _, _, hidden) in enumerate(TOTALS.values())
    ]
    enough = play(session(5, 13), *three, options={"reservation": option}, pool_cells=32)
    assert sum(record.preempted for record in enough.run.records) == 0
    played = play(session(5, 13), *three, options={"reservation": option}, pool_cells=31)
    assert sorted(rows_per_step(played)[0]) == ["s0", "s1", "s2", "s3"]
    failed = next(i for i, record in enumerate(played.run.records) if record.preempted)
    assert failed == 6
    assert sorted(rows_per_step(played)[failed]) == ["s0", "s1", "s2"]  # C gave its rows up
    assert played.outputs == enough.outputs


def test_four_requests_of_five_rows_are_admitted_into_28_rows_of_which_8_are_used() -> None:
    holder = session(8, 2, hidden=2)
    waiting = [session(3, 3, at=1, first_token=1000 * (i + 2)) for i in range(6)]  # 3 + 3 - 1 = 5 rows each
    case = workload(holder, *waiting, pool_cells=29)  # the holder's own last row comes on top
    played = replay(case)
    assert played.run.problems == []
    assert [intent.request_id for intent in played.run.trace[1].flight.plan.intents] == [
        "s1",
        "s2",
        "s3",
        "s4",
    ]
    assert (28 - 8) // 5 == 4


@pytest.mark.parametrize(
    "bad",
    [
        {"kind": "point", "forecasts": {"A": {"point": 0}}},
        {"kind": "quantile", "forecasts": {"A": {"p50": 9, "p90": 3}}},
        {"kind": "watermark", "watermark_rows": -1},
        {"kind": "point", "watermark_rows": 4},
        {"kind": "oracle"},
    ],
)
def test_a_reservation_of_no_sense_is_refused(bad: dict[str, dict[str, dict[str, int]] | int | str]) -> None:
    with pytest.raises(ValueError):
        make_policy("fcfs", reservation=bad)


def test_a_forecast_never_reserves_more_than_the_declared_maximum() -> None:
    policy = make_policy("fcfs", reservation={"kind": "point", "forecasts": {"A:0": {"point": 999}}})
    state = resume_state()
    assert policy.future_rows(state, state.views["A:0"]) == state.views["A:0"].request.num_rows


def test_a_watermark_holds_within_a_burst_on_an_idle_server() -> None:
    """Five of 3 + 7 - 1 = 9 rows at once in 40 rows of which 8 stay free: (40 - 8) // 9 = 3 enter."""
    burst = [session(3, 7, first_token=1000 * (i + 1)) for i in range(5)]
    option = {"reservation": {"kind": "watermark", "watermark_rows": 8}}
    played = play(*burst, options=option, pool_cells=40)
    assert sorted(rows_per_step(played)[0]) == ["s0", "s1", "s2"]
    assert (40 - 8) // 9 == 3


@pytest.mark.parametrize(("watermark", "first"), [(4, ["s0", "s1"]), (5, ["s0"])])
def test_a_second_session_enters_up_to_the_soft_ceiling_exactly(watermark: int, first: list[str]) -> None:
    """9 + 9 rows of 22: 4 stay free."""
    pair = session(3, 7), session(3, 7, first_token=2000)
    option = {"reservation": {"kind": "watermark", "watermark_rows": watermark}}
    played = play(*pair, options=option, pool_cells=22)
    assert sorted(rows_per_step(played)[0]) == first


def test_a_watermark_yields_to_a_session_that_runs_alone() -> None:
    option = {"reservation": {"kind": "watermark", "watermark_rows": 8}}
    assert len(play(session(30, 11), options=option, pool_cells=40).outputs[0]) == 11


# -- estimate, request, result


def estimate(kind: str, view: SessionView, *, reserved: int = 0, hard: int = 28) -> Any:
    reservation = make_policy("fcfs", reservation=POLICIES[kind]).reservation
    return estimate_reservation(reservation, view, reserved_rows=reserved, hard_rows=hard)


def test_an_estimate_of_a_resumed_session_is_what_its_forecast_leaves() -> None:
    view = resume_ready(0, "A:0", 11)
    assert [estimate(kind, view).rows for kind in POLICIES] == [10, 4, 7, 7]


def test_an_estimate_of_a_new_session_is_its_prompt_and_all_outputs_but_the_first() -> None:
    request = Request(request_id="A:0", prompt=(1, 2, 3), max_tokens=11)
    new = SessionView(request, 0, SessionState.WAITING, 0, 0, 0, 0, 0, 0, True, 0.0, None, None)
    assert [estimate(kind, new).rows for kind in POLICIES] == [13, 7, 10, 10]


@pytest.mark.parametrize(("kind", "reserved", "fits"), [("p90", 21, True), ("p90", 22, False)])
def test_a_request_for_rows_follows_an_estimate_that_fits_exactly(
    kind: str, reserved: int, fits: bool
) -> None:
    made = estimate(kind, resume_ready(0, "A:0", 11), reserved=reserved)
    wish = request_allocation(made, epoch=3)
    assert made.fits is fits is (wish is not None)
    if wish is not None:
        assert (wish.request_id, wish.generation, wish.epoch, wish.rows) == ("A:0", 0, 3, 7)


@pytest.mark.parametrize(("reserved", "fits"), [(17, True), (18, False)])
def test_the_soft_ceiling_lies_a_watermark_below_the_hard_one(reserved: int, fits: bool) -> None:
    made = estimate("watermark", resume_ready(0, "A:0", 11), reserved=reserved)
    assert (made.soft_rows, made.fits) == (24, fits)


@pytest.mark.parametrize(
    ("reserved", "realised", "recovery"),
    [
        (21, 21, Recovery.NONE),
        (21, 22, Recovery.EXTEND),
        (26, 28, Recovery.EXTEND),
        (26, 29, Recovery.PREEMPT),
    ],
)
def test_an_underestimate_is_extended_up_to_the_hard_ceiling_and_then_takes_somebodys_rows(
    reserved: int, realised: int, recovery: Recovery
) -> None:
    assert recovery_for(reserved_rows=reserved, realised_rows=realised, hard_rows=28) is recovery
    assert reservation_error(reserved, realised) == reserved - realised


@pytest.mark.parametrize(
    ("rows", "answer"),
    [
        (7, Allocation.GRANTED),
        (8, Allocation.UNAVAILABLE),
        (28, Allocation.UNAVAILABLE),
        (29, Allocation.FAILED),
    ],
)
def test_the_memory_answers_from_its_own_facts(rows: int, answer: Allocation | Allocation) -> None:
    wish = AllocationRequest(request_id="A:0", generation=0, epoch=3, rows=rows)
    result = answer_allocation(wish, available_rows=7, total_rows=28)
    assert (result.request, result.allocation) == (wish, answer)
