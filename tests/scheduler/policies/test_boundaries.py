"""Both sides of every comparison of every policy, and every part of every ordering key."""

from __future__ import annotations

from fractions import Fraction
from types import MappingProxyType
from typing import Any

import pytest

from parity.records import Fault, FaultKind
from parity.run.runner import replay
from parity.suites.workloads import TICK_MS, intervals, play, rows_per_step, session, workload
from scheduler.policies import make_policy, option_types, policy_names
from scheduler.policies.fastserve_mlfq import Job, Queues
from scheduler.policies.vllm_fcfs import QueueMemory
from scheduler.policies.vtc import Counters
from scheduler.policy.cost import ExclusiveCost, deadline_ms, headroom_ms, slack_ms
from scheduler.policy.goodput import sweep_goodput
from scheduler.policy.overload import Overload
from scheduler.policy.plan import PlanBuilder
from scheduler.policy.reservation import Reservation
from scheduler.policy.state import SchedulerState
from scheduler.records import Request, ServiceLevel, SessionState, SessionView
from tests.scheduler.serving import OneShard

WAITING, RUNNING, SUSPENDED = SessionState.WAITING, SessionState.RUNNING, SessionState.SUSPENDED


def view(
    name: str = "r",
    *,
    index: int = 0,
    state: SessionState = WAITING,
    prompt: int = 4,
    most: int = 4,
    emitted: int = 0,
    computed: int = 0,
    committed: int | None = None,
    ready: bool = True,
    last_ms: float | None = None,
    **fields: Any,
) -> SessionView:
    request = Request(request_id=name, prompt=tuple(range(prompt)), max_tokens=most, **fields)
    return SessionView(
        request,
        index,
        state,
        emitted,
        computed,
        computed if committed is None else committed,
        0,
        0,
        0,
        ready,
        0.0,
        last_ms,
        last_ms,
    )


class Facts(OneShard):
    """What policies ask of a memory, as numbers."""

    def __init__(self, *, rows: int = 1000, cached: dict[str, int] | None = None) -> None:
        self.rows, self.cached = rows, cached or {}

    def available_rows(self) -> int:
        return self.rows

    def cached_tokens(self, view: SessionView) -> int:
        return self.cached.get(view.request_id, 0)


def state(
    *views: SessionView, now_ms: float = 0.0, memory: Facts | NoStops | None = None, policy_memory: Any = None
) -> SchedulerState:
    def queue(kind: SessionState) -> tuple[str, ...]:
        return tuple(item.request_id for item in views if item.state is kind)

    return SchedulerState(
        1,
        1,
        now_ms,
        queue(WAITING),
        queue(RUNNING),
        queue(SUSPENDED),
        MappingProxyType({item.request_id: item for item in views}),
        memory or Facts(),
        64,
        16,
        64,
        MappingProxyType({}),
        policy_memory,
    )


def decode(name: str = "r", **fields: Any) -> SessionView:
    return view(name, state=RUNNING, emitted=1, computed=4, last_ms=0.0, **fields)


def prefill(name: str = "r", **fields: Any) -> SessionView:
    return view(name, state=RUNNING, computed=1, **fields)


SOON, LATER = ServiceLevel(ttft_ms=10.0, tbt_ms=10.0), ServiceLevel(ttft_ms=20.0, tbt_ms=20.0)

# (policy, options, the favoured one, the other): they differ in one part of the key, and in later parts
# the other way round.
PAIRS = [
    ("fcfs", {}, decode("b", index=5), prefill("a", index=1)),
    ("fcfs", {}, decode("b", index=1), decode("a", index=2)),
    ("fcfs", {}, prefill("b", index=9), view("a", index=2, state=SUSPENDED)),
    ("fcfs", {}, view("b", index=9, state=SUSPENDED), view("a", index=2)),
    ("fcfs", {}, view("b", index=1), view("a", index=2)),
    ("orca", {}, view("b", index=2, arrival_ms=1.0), view("a", index=1, arrival_ms=2.0)),
    ("orca", {}, view("b", index=1), view("a", index=2)),
    ("scorpio_guard", {}, prefill("b", index=9, slo=LATER), view("a", index=1, slo=SOON)),
    ("scorpio_guard", {}, decode("b", index=9, slo=LATER), prefill("a", index=1, slo=SOON)),
    ("scorpio_guard", {}, view("b", index=9, slo=SOON), view("a", index=1, slo=LATER)),
    ("scorpio_guard", {}, view("b", index=1, slo=SOON), view("a", index=9, slo=SOON)),
    ("static_priority", {}, decode("b", priority=9, arrival_ms=9.0), prefill("a", priority=1)),
    ("static_priority", {}, prefill("b", priority=1, arrival_ms=9.0), view("a", priority=2)),
    ("static_priority", {}, view("b", arrival_ms=1.0), view("a", arrival_ms=2.0)),
    ("static_priority", {}, view("a", generation=2), view("b", generation=1)),
    ("static_priority", {}, view("a", generation=1), view("a", generation=2)),
    ("sarathi", {}, prefill("b", index=9), decode("a", index=1)),
    ("sarathi", {}, prefill("b", index=1), prefill("a", index=2)),
    ("sarathi", {}, decode("b", index=1), decode("a", index=2)),
    ("least_slack", {}, view("b", index=9, slo=SOON, arrival_ms=0.0), view("a", slo=LATER, arrival_ms=0.0)),
    # a decode and a first token, both due at 20 and one tick away; then by arrival, then by name
    ("least_slack", {}, decode("b", slo=LATER, arrival_ms=5.0), view("a", slo=LATER)),
    (
        "least_slack",
        {},
        view("b", slo=ServiceLevel(ttft_ms=20.0), arrival_ms=0.0),
        view("a", slo=ServiceLevel(ttft_ms=15.0), arrival_ms=5.0),
    ),
    ("least_slack", {}, view("a", index=2, slo=SOON), view("b", index=1, slo=SOON)),
    ("sglang_adder", {}, prefill("b", index=9, priority=9), view("a", index=1, state=SUSPENDED)),
    ("sglang_adder", {}, view("b", index=9, state=SUSPENDED, priority=9), view("a", index=1)),
    ("sglang_adder", {}, view("b", index=1, priority=9), view("a", index=2)),
    (
        "sglang_adder",
        {"priority_scheduling": True},
        view("b", index=9, priority=1),
        view("a", index=1, state=SUSPENDED, priority=2),
    ),
    (
        "sglang_adder",
        {"priority_scheduling": True},
        prefill("b", index=1, priority=9),
        prefill("a", index=2, priority=1),
    ),
]


@pytest.mark.parametrize(("policy", "options", "favoured", "other"), PAIRS)
def test_a_key_orders_by_each_of_its_parts(
    policy: str, options: dict[str, bool], favoured: SessionView, other: SessionView
) -> None:
    made = make_policy(policy, **options)
    both = state(favoured, other)
    assert made.order_key(both, favoured) < made.order_key(both, other)


def test_age_counts_whole_quanta_since_arrival() -> None:
    made = make_policy("aging", quantum_ms=10.0)
    old = view(priority=5, arrival_ms=100.0)
    aged = [made.priority(state(old, now_ms=now), old) for now in (90.0, 100.0, 109.9, 110.0, 129.9, 130.0)]
    assert aged == [5, 5, 5, 4, 3, 2]
    with pytest.raises(ValueError):
        make_policy("aging", quantum_ms=0.0)
    make_policy("aging", quantum_ms=0.1)


# -- a victim


@pytest.mark.parametrize(
    ("requester", "victim"),
    [
        (decode("r", index=1, priority=1, arrival_ms=1.0), "r9"),
        (decode("r", index=1, priority=2, arrival_ms=1.0), "r9"),
        (decode("r", index=8, priority=2, arrival_ms=5.0), "r9"),
        (decode("r", index=10, priority=2, arrival_ms=5.0), "r"),
        (decode("r", index=1, priority=2, arrival_ms=6.0), "r"),
        (decode("r", index=1, priority=3, arrival_ms=0.0), "r"),
    ],
)
def test_static_priority_takes_the_last_by_priority_arrival_and_index_be_it_the_requester(
    requester: SessionView, victim: str
) -> None:
    made = make_policy("static_priority")
    other = decode("r9", index=9, priority=2, arrival_ms=5.0)
    assert made.choose_victim(state(requester, other), requester) == victim
    assert made.choose_victim(state(requester), requester) == "r"


@pytest.mark.parametrize(("index", "victim"), [(1, "r9"), (10, "r")])
def test_the_default_takes_the_newest_be_it_the_requester(index: int, victim: str) -> None:
    requester, other = decode("r", index=index), decode("r9", index=9)
    made = make_policy("fcfs")
    assert made.choose_victim(state(requester, other), requester) == victim
    assert made.choose_victim(state(requester), requester) == "r"


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (decode("a", index=9, priority=1, arrival_ms=9.0), decode("b", index=1, priority=2)),
        (decode("a", index=9, priority=1, arrival_ms=1.0), decode("b", index=1, priority=1, arrival_ms=2.0)),
        (decode("a", index=1, priority=1), decode("b", index=2, priority=1)),
    ],
)
def test_vllm_priority_takes_the_largest_of_priority_arrival_and_index_though_it_asks(
    first: SessionView, second: SessionView
) -> None:
    made, both = make_policy("vllm_priority"), state(first, second)
    assert made.choose_victim(both, first) == made.choose_victim(both, second) == "b"
    memory = QueueMemory(0, {"a": 0, "b": 1})
    waiting = [view(v.request_id, index=v.index, **fields_of(v)) for v in (first, second)]
    keys = [made.order_key(state(*waiting, policy_memory=memory), v) for v in waiting]
    assert keys[0] < keys[1]


def fields_of(item: SessionView) -> dict:
    return {"priority": item.request.priority, "arrival_ms": item.request.arrival_ms}


def test_vllm_orders_running_ones_by_entry_then_preempted_ones_last_first_then_waiting_ones() -> None:
    made = make_policy("vllm_fcfs")
    views = [
        decode("r1", index=9),
        decode("r2", index=8),
        view("s1", index=1, state=SUSPENDED),
        view("s2", index=2, state=SUSPENDED),
        view("w1", index=0),
        view("w2", index=3),
    ]
    memory = QueueMemory(9, {"r1": 5, "r2": 6, "s1": 8, "s2": 7})
    all_of_them = state(*views, policy_memory=memory)
    mixed = [views[i] for i in (5, 4, 3, 2, 1, 0)]
    ordered = sorted(mixed, key=lambda item: made.order_key(all_of_them, item))
    assert ordered == views
    assert made.choose_victim(all_of_them, views[0]) == "r2"


def test_vllm_stamps_what_enters_or_is_preempted_and_forgets_what_ends() -> None:
    made, item = make_policy("vllm_fcfs"), decode()
    memory = made.observe(made.start(), "submitted", item, 0.0)
    assert memory == QueueMemory(0, {})
    for event, stamp in (("admitted", 0), ("preempted", 1), ("resumed", 2)):
        memory = made.observe(memory, event, item, 0.0)
        assert memory == QueueMemory(stamp + 1, {"r": stamp})
    assert made.observe(memory, "emitted", item, 0.0) == memory
    for event in ("finished", "cancelled", "failed"):
        assert made.observe(memory, event, item, 0.0) == QueueMemory(3, {})
        assert made.observe(QueueMemory(3, {"other": 1}), event, item, 0.0) == QueueMemory(3, {"other": 1})


def test_vllm_clamps_by_a_threshold_above_zero_only() -> None:
    for threshold, tokens in ((0, 9), (1, 1), (9, 9), (10, 9)):
        made = make_policy("vllm_fcfs", long_prefill_threshold=threshold)
        assert made.chunk_tokens(state(), view(), 9) == tokens


@pytest.mark.parametrize(("cells", "entered"), [(8, ["s0", "s1"]), (7, ["s0"])])
def test_vllm_lets_one_enter_beside_a_running_one_when_the_next_rows_of_both_fit_exactly(
    cells: int, entered: list[str]
) -> None:
    """s0 has four rows and needs one more, s1 three."""
    played = play(session(4, 2), session(3, 1, at=1, first_token=3000), policy="vllm_fcfs", pool_cells=cells)
    assert sorted(rows_per_step(played)[1]) == entered


@pytest.mark.parametrize(("cells", "preempted"), [(8, 0), (7, 1)])
def test_vllm_makes_no_waiting_pass_when_running_ones_lack_a_row(cells: int, preempted: int) -> None:
    """Two of three rows each want a fourth; a third session of one row waits."""
    played = play(
        session(3, 3),
        session(3, 3, first_token=3000),
        session(1, 1, at=1, first_token=4000),
        policy="vllm_fcfs",
        pool_cells=cells,
    )
    assert played.run.records[1].preempted == preempted
    assert played.run.trace[1].flight.plan.intents == ()


def test_vllm_looks_at_the_queue_when_running_ones_take_the_last_rows_exactly() -> None:
    """s0 takes the last of four cells in step 1, in which s1 comes and can no longer be in time."""
    played = play(
        session(3, 2),
        session(1, 1, at=1, first_token=3000, slo=ServiceLevel(ttft_ms=5.0)),
        policy="vllm_fcfs",
        options={"overload": "reject_infeasible"},
        pool_cells=4,
    )
    assert played.run.ended_at[1] == 1


# -- overload and cost


@pytest.mark.parametrize(("live", "refused"), [(3, False), (4, True), (5, True)])
def test_a_bound_of_four_live_sessions_refuses_the_fifth(live: int, refused: bool) -> None:
    overload = Overload(kind="bounded", max_live=4)
    kinds = [WAITING, RUNNING, SUSPENDED]
    there = state(*(view(f"r{i}", state=kinds[i % 3]) for i in range(live)))
    refusal = overload.refuse(there, Request(request_id="n", prompt=(1,), max_tokens=1))
    assert (refusal is not None) is refused
    if refused:
        assert (refusal.retryable, refusal.needed, refusal.available) == (True, live + 1, 4)
    assert Overload().refuse(there, Request(request_id="n", prompt=(1,), max_tokens=1)) is None


@pytest.mark.parametrize("policy", ["fcfs", "scorpio_guard"])
@pytest.mark.parametrize(("limit", "rejected"), [(20.0, False), (19.9, True)])
def test_a_first_token_exactly_in_time_is_feasible(policy: str, limit: float, rejected: bool) -> None:
    """Four rows at two a tick of 10 ms."""
    options = {"tick_ms": 10.0, "tokens_per_tick": 2}
    if policy == "fcfs":
        options = {"overload": {"kind": "reject_infeasible", **options}}
    made = make_policy(policy, **options)
    item = view(slo=ServiceLevel(ttft_ms=limit))
    assert (made.rejects(state(item), item) is not None) is rejected
    emitted = view(state=SUSPENDED, emitted=1, committed=4, last_ms=0.0, slo=ServiceLevel(tbt_ms=0.1))
    assert made.rejects(state(emitted), emitted) is None


def test_cached_rows_count_as_computed_in_what_is_feasible() -> None:
    made = make_policy("scorpio_guard", tick_ms=10.0, tokens_per_tick=2)
    item = view(slo=ServiceLevel(ttft_ms=10.0))
    assert made.rejects(state(item, memory=Facts(cached={"r": 2})), item) is None
    assert made.rejects(state(item, memory=Facts(cached={"r": 1})), item) is not None


@pytest.mark.parametrize(
    "bad",
    [
        {"kind": "bounded"},
        {"kind": "bounded", "max_live": 0},
        {"kind": "queue", "max_live": 1},
        {"kind": "reject_infeasible", "max_live": 4},
        {"kind": "nothing"},
    ],
)
def test_an_overload_that_contradicts_itself_is_refused(bad: dict[str, int | str]) -> None:
    with pytest.raises(ValueError):
        Overload(**bad)
    Overload(kind="bounded", max_live=1)


def test_deadlines_count_from_arrival_and_the_previous_emission_and_are_infinite_without_an_objective() -> (
    None
):
    slo = ServiceLevel(ttft_ms=30.0, tbt_ms=20.0)
    assert deadline_ms(view(arrival_ms=5.0, slo=slo)) == 35.0
    assert deadline_ms(view(state=RUNNING, emitted=1, computed=4, last_ms=50.0, slo=slo)) == 70.0
    assert deadline_ms(view()) == deadline_ms(decode()) == float("inf")


@pytest.mark.parametrize(("rows", "finish"), [(1, 10.0), (2, 10.0), (3, 20.0), (4, 20.0), (5, 30.0)])
def test_a_first_token_takes_a_tick_for_each_started_share_of_rows(rows: int, finish: float) -> None:
    assert ExclusiveCost(10.0, 2).emission_ms(view(prompt=rows), 0.0) == finish


def test_a_rebuild_comes_on_top_of_the_row_that_emits() -> None:
    cost = ExclusiveCost(10.0, 2)
    assert cost.emission_ms(decode(), 5.0) == 15.0
    assert cost.emission_ms(view(state=SUSPENDED, emitted=1, committed=4, last_ms=0.0), 5.0) == 35.0
    assert cost.emission_ms(view(state=SUSPENDED, emitted=1, committed=4, last_ms=0.0), 5.0, cached=3) == 25.0
    assert slack_ms(decode(slo=SOON), 5.0, cost) == -5.0
    assert headroom_ms(decode(slo=SOON), 5.0) == 5.0
    assert headroom_ms(view(slo=SOON, arrival_ms=2.0), 15.0) == -3.0


@pytest.mark.parametrize("bad", [(0.0, 1), (-1.0, 1), (10.0, 0)])
def test_a_cost_of_nothing_is_refused(bad: tuple[float, int]) -> None:
    with pytest.raises(ValueError):
        ExclusiveCost(*bad)
    ExclusiveCost(0.1, 1)


# -- reservation


@pytest.mark.parametrize(
    ("forecast", "emitted", "rows"),
    [(1, 0, 4), (3, 0, 6), (3, 2, 6), (3, 3, 6), (3, 4, 7), (9, 0, 12), (99, 0, 12)],
)
def test_a_forecast_is_at_least_what_was_emitted_and_at_most_what_was_declared(
    forecast: int, emitted: int, rows: int
) -> None:
    """Prompt of four, at most nine outputs: the last one needs no row."""
    made = Reservation(kind="point", forecasts={"r": {"point": forecast}})
    item = view(state=SUSPENDED, most=9, emitted=emitted, committed=4 if emitted else 0, last_ms=0.0)
    assert made.future_rows(item) == rows


def test_each_kind_reads_its_own_forecast() -> None:
    forecasts = {"r": {"point": 2, "p50": 3, "p90": 5}}
    made = {kind: Reservation(kind=kind, forecasts=forecasts) for kind in ("maximum", "point", "quantile")}
    assert [made[kind].total_outputs(view(most=9)) for kind in made] == [9, 2, 5]
    assert Reservation(kind="quantile", quantile="p50", forecasts=forecasts).total_outputs(view(most=9)) == 3
    assert Reservation(kind="watermark", forecasts=forecasts).total_outputs(view(most=9)) == 5
    assert Reservation(kind="point").total_outputs(view(most=9)) == 9


@pytest.mark.parametrize(
    ("fields", "fine"),
    [
        ({"kind": "watermark", "watermark_rows": 0}, True),
        ({"kind": "watermark", "watermark_rows": 1}, True),
        ({"kind": "watermark", "watermark_rows": -1}, False),
        ({"kind": "maximum", "watermark_rows": 1}, False),
        ({"kind": "point", "forecasts": {"r": {"point": 1}}}, True),
        ({"kind": "point", "forecasts": {"r": {"point": 0}}}, False),
        ({"kind": "quantile", "forecasts": {"r": {"p50": 3, "p90": 3}}}, True),
        ({"kind": "quantile", "forecasts": {"r": {"p9": 4, "p50": 3}}}, False),
        ({"kind": "quantile", "forecasts": {"r": {"p50": 3, "p90": 9, "point": 1}}}, True),
    ],
)
def test_a_reservation_is_checked_when_it_is_made(
    fields: dict[str, dict[str, dict[str, int]] | int | str], fine: bool
) -> None:
    if fine:
        Reservation(**fields)
    else:
        with pytest.raises(ValueError):
            Reservation(**fields)


# -- goodput


def test_a_rate_whose_attainment_is_exactly_alpha_still_counts() -> None:
    shares = {1.0: 1.0, 2.0: 0.9, 3.0: 0.89, 4.0: 1.0}
    found = sweep_goodput(shares.__getitem__, sorted(shares), alpha=0.9)
    assert (found.rate, len(found.points)) == (2.0, 3)
    assert sweep_goodput(lambda rate: 0.0, [1.0], alpha=0.9).rate == 0.0


@pytest.mark.parametrize(
    ("rates", "alpha"), [([], 0.9), ([1.0, 1.0], 0.9), ([2.0, 1.0], 0.9), ([1.0], 0.0), ([1.0], 1.1)]
)
def test_a_sweep_of_no_sense_is_refused(rates: list[float], alpha: float) -> None:
    with pytest.raises(ValueError):
        sweep_goodput(lambda rate: 1.0, rates, alpha=alpha)
    assert sweep_goodput(lambda rate: 1.0, [1.0], alpha=1.0).rate == 1.0


# -- ORCA


@pytest.mark.parametrize(
    ("prompt", "steps"),
    [
        (7, [{"s0": 1, "s1": 7}]),  # what the decode leaves is enough
        (8, [{"s0": 1}, {"s1": 8}]),  # a whole step's budget: it waits for a step of its own
        (9, [{"s0": 1, "s1": 7}, {"s1": 2}]),  # never fits a step whole, so it is cut
    ],
)
def test_orca_waits_for_a_step_that_holds_a_prompt_whole_if_there_can_be_one(
    prompt: int, steps: list[dict[str, int]]
) -> None:
    played = play(
        session(1, 2), session(prompt, 1, at=1, first_token=3000), policy="orca", max_num_batched_tokens=8
    )
    assert rows_per_step(played)[1 : 1 + len(steps)] == steps


@pytest.mark.parametrize(
    ("prompt", "steps"),
    [
        (14, [{"s0": 1, "s1": 7}, {"s0": 1, "s1": 7}, {"s0": 1}]),
        (15, [{"s0": 1, "s1": 7}, {"s0": 1}, {"s0": 1}, {"s1": 8}]),
    ],
)
def test_orca_waits_with_the_rest_of_a_cut_prompt_too(prompt: int, steps: list[dict[str, int]]) -> None:
    """Seven rows are left beside a decode; a rest of eight fits a step of its own."""
    played = play(
        session(1, 4), session(prompt, 1, at=1, first_token=3000), policy="orca", max_num_batched_tokens=8
    )
    assert rows_per_step(played)[1 : 1 + len(steps)] == steps


@pytest.mark.parametrize(("slots", "refused"), [(13, False), (12, True)])
def test_orca_accepts_a_request_that_takes_all_slots_exactly(slots: int, refused: bool) -> None:
    request = Request(request_id="n", prompt=(1, 2, 3, 4), max_tokens=9)
    made = make_policy("orca", slots=slots)
    assert (made.refuse(state(), request) is not None) is refused
    assert make_policy("orca").refuse(state(), request) is None


@pytest.mark.parametrize(
    ("policy", "options"),
    [
        ("orca", {"slots": 0}),
        ("sarathi", {"chunk_tokens": 0}),
        ("sarathi_serve", {"tau": 0}),
        ("preble_quota", {"quotas": [1, 0]}),
        ("preble_quota", {"quotas": []}),
        ("vtc", {"input_weight": -1}),
        ("vtc", {"output_weight": -1}),
        ("fastserve_mlfq", {"quantum_rows": 0}),
        ("fastserve_mlfq", {"levels": 0}),
        ("fastserve_mlfq", {"promote_after_ms": 0.0}),
        ("fastserve_mlfq", {"max_batch": 0}),
        ("sglang_adder", {"max_skips": -1}),
        ("sglang_adder", {"max_passes": -1}),
        ("sglang_adder", {"max_age_ms": -0.1}),
        ("sglang_adder", {"warm_tokens": 0}),
        ("sglang_adder", {"chunk_tokens": 0}),
        ("sglang_adder", {"page_tokens": 0}),
        ("sglang_adder", {"max_requests": 0}),
    ],
)
def test_an_option_just_out_of_range_is_refused_and_the_next_one_is_not(
    policy: str, options: dict[str, float | list[int]]
) -> None:
    with pytest.raises(ValueError):
        make_policy(policy, **options)
    inside = {
        name: [1] if isinstance(value, list) else 0.1 if isinstance(value, float) else value + 1
        for name, value in options.items()
    }
    make_policy(policy, **inside)


@pytest.mark.parametrize("policy", [name for name in policy_names() if "overload" in option_types(name)])
def test_a_suspended_session_is_never_given_up_for_its_first_token(policy: str) -> None:
    """Its prompt is cut in two; it is suspended between, and can then no longer be in time."""
    options = {"overload": {"kind": "reject_infeasible", "tick_ms": TICK_MS}}
    case = workload(
        session(10, 2, slo=ServiceLevel(ttft_ms=15.0)),
        policy=policy,
        options=options,
        max_num_batched_tokens=8,
        max_num_seqs=8,
        faults=(Fault(kind=FaultKind.PREEMPT, step=1, session=0),),
    )
    played = replay(case)
    assert played.run.problems == []
    assert sum(record.preempted for record in played.run.records) == 1
    assert len(played.outputs[0]) == 2


# -- SCORPIO


def test_scorpio_decodes_with_a_credit_of_exactly_one_step() -> None:
    """A share of 1/2: the first step gives half a credit, the second a whole one."""
    made = make_policy("scorpio_guard")
    tight = decode("a", slo=ServiceLevel(tbt_ms=20.0))
    loose = decode("b", index=1, slo=ServiceLevel(tbt_ms=40.0))
    for before, runs in ((Fraction(49, 100), False), (Fraction(1, 2), True)):
        chosen = state(tight, loose, policy_memory={"b": before}, memory=NoStops())
        plan = made.plan_iteration(chosen)
        assert ("b" in [chunk.request_id for chunk in plan.chunks]) is runs
        assert made.planned(chosen, plan) == {"a": 0, "b": 0 if runs else before + Fraction(1, 2)}


class NoStops(Facts):
    """Chunks may end anywhere."""

    def chunk_stop(self, view: SessionView, *, start: int, stop: int) -> int:
        return stop


def test_scorpio_carries_over_one_step_of_credit_at_most_and_forgets_who_is_gone() -> None:
    made = make_policy("scorpio_guard")
    loose = decode("b", slo=ServiceLevel(tbt_ms=40.0))
    left_out = state(loose, policy_memory={"b": Fraction(1), "gone": Fraction(1)}, memory=NoStops())
    nothing = make_policy("scorpio_guard").plan_iteration(state())
    assert made.planned(left_out, nothing) == {"b": 1}


def test_scorpio_counts_only_ready_decodes_for_the_tightest_limit() -> None:
    made = make_policy("scorpio_guard")
    loose = decode("b", slo=ServiceLevel(tbt_ms=40.0))
    others = [
        prefill("p", index=1, slo=ServiceLevel(tbt_ms=10.0)),
        decode("n", index=2, ready=False, slo=ServiceLevel(tbt_ms=10.0)),
        decode("u", index=3),
    ]
    plan = made.plan_iteration(state(loose, *others, policy_memory={}, memory=NoStops()))
    assert "b" in [chunk.request_id for chunk in plan.chunks]


@pytest.mark.parametrize(
    ("limits", "enters"), [((None, None), True), ((10.0, None), False), ((None, 10.0), False)]
)
def test_scorpio_lets_a_second_session_in_when_nobody_has_a_limit(
    limits: tuple[float | None, ...], enters: bool
) -> None:
    """Any batch of two takes 11 ms."""
    made = make_policy("scorpio_guard", base_ms=11.0)
    running, entering = (
        make("abc"[i], index=i, slo=ServiceLevel(tbt_ms=limit))
        for i, (make, limit) in enumerate(zip((decode, view), limits, strict=True))
    )
    assert made._admissible(state(running, entering), entering, []) is enters
    assert made._admissible(state(entering), entering, []) is True
    assert made._admissible(state(entering), entering, [view("e", slo=ServiceLevel(tbt_ms=10.0))]) is False


# -- FastServe


def test_a_job_joins_the_first_queue_whose_quantum_covers_its_first_step() -> None:
    made = make_policy("fastserve_mlfq", quantum_rows=4, levels=3)
    for rows, level in ((1, 0), (4, 0), (5, 1), (8, 1), (9, 2), (99, 2)):
        memory = made.observe(made.start(), "submitted", view(prompt=rows), 7.0)
        assert memory.jobs["r"] == Job(level, 0, 0, 7.0)


@pytest.mark.parametrize(("used", "level"), [(2, 0), (3, 1)])
def test_a_job_falls_when_its_quantum_is_used_up_exactly(used: int, level: int) -> None:
    """A quantum of four and one more row decoded."""
    made = make_policy("fastserve_mlfq", quantum_rows=4, levels=3)
    memory = Queues(5, {"r": Job(0, used, 1, 0.0)})
    job = made.observe(memory, "decoded", decode(), 9.0, 1).jobs["r"]
    assert (job.level, job.used, job.since_ms, job.done) == (level, 0 if level else 3, 9.0, 1)


def test_a_depleted_job_falls_to_the_first_lower_queue_that_covers_its_next_step() -> None:
    made = make_policy("fastserve_mlfq", quantum_rows=4, levels=4)
    for left, level in ((8, 1), (9, 2), (16, 2), (17, 3), (99, 3)):
        part = view(state=RUNNING, prompt=left + 4, computed=4)
        memory = made.observe(Queues(5, {"r": Job(0, 0, 1, 0.0)}), "prefilled", part, 0.0, 4)
        assert memory.jobs["r"].level == level
    last = made.observe(Queues(5, {"r": Job(3, 31, 1, 0.0)}), "decoded", decode(), 0.0, 1)
    assert last.jobs["r"].level == 3


@pytest.mark.parametrize(
    ("level", "waited_ms", "promoted"), [(1, 300.0, True), (1, 299.9, False), (0, 999.0, False)]
)
def test_a_job_is_promoted_after_exactly_the_time_and_never_from_the_first_queue(
    level: int, waited_ms: float, promoted: bool
) -> None:
    made = make_policy("fastserve_mlfq")
    job = Job(level, 3, 0, 100.0)
    at = state(view(), now_ms=100.0 + waited_ms, policy_memory=Queues(1, {"r": job}))
    assert made.planned(at, None).jobs["r"] == (Job(0, 0, 1, at.now_ms) if promoted else job)
    assert made.order_key(at, at.views["r"]) == ((0, 1, 0) if promoted else (level, 0, 0))


@pytest.mark.parametrize(
    ("done", "rebuilt", "may"), [(0, 0, False), (1, 0, True), (3, 3, True), (2, 3, False)]
)
def test_a_job_may_be_preempted_when_it_has_done_as_much_as_it_rebuilt(
    done: int, rebuilt: int, may: bool
) -> None:
    assert Job(1, 0, 0, 0.0, done, rebuilt).may_be_preempted is may


@pytest.mark.parametrize(
    ("level", "done", "victim"), [(0, 1, None), (1, 1, "low"), (1, 0, None), (2, 1, "low")]
)
def test_a_job_takes_the_place_of_a_lower_queue_only(level: int, done: int, victim: str | None) -> None:
    made = make_policy("fastserve_mlfq")
    low, high = decode("low"), view("high", index=1)
    jobs = {"low": Job(level, 0, 0, 0.0, done), "high": Job(0, 0, 1, 0.0)}
    found = made._lower_than(state(low, high, policy_memory=Queues(2, jobs)), high)
    assert (found and found.request_id) == victim


def test_the_last_of_the_lowest_queue_gives_way_be_it_the_requester() -> None:
    made = make_policy("fastserve_mlfq")
    jobs = {"a": Job(0, 0, 9, 0.0), "b": Job(1, 0, 1, 0.0), "c": Job(1, 0, 2, 0.0)}
    running = [decode(name, index=i) for i, name in enumerate("abc")]
    at = state(*running, policy_memory=Queues(9, jobs))
    assert made.choose_victim(at, running[0]) == "c"
    assert made.choose_victim(at, running[2]) == "c"


def test_what_a_job_did_is_counted_anew_when_it_enters_or_leaves() -> None:
    made = make_policy("fastserve_mlfq")
    for event in ("admitted", "resumed", "preempted"):
        memory = made.observe(Queues(1, {"r": Job(1, 2, 0, 0.0, 5, 6)}), event, decode(), 3.0)
        assert memory.jobs["r"] == Job(1, 2, 0, 0.0)
    memory = made.observe(Queues(1, {"r": Job(1, 2, 0, 0.0, 5, 6)}), "rebuilt", decode(), 3.0, 4)
    assert memory.jobs["r"] == Job(1, 2, 0, 3.0, 5, 10)
    for event in ("finished", "cancelled", "failed"):
        both = Queues(1, {"r": Job(1, 2, 0, 0.0), "x": Job(0, 0, 0, 0.0)})
        assert list(made.observe(both, event, decode(), 3.0).jobs) == ["x"]


@pytest.mark.parametrize(("most", "together"), [(None, 3), (1, 1), (2, 2)])
def test_a_batch_of_jobs_is_bounded(most: int | None, together: int) -> None:
    three = [session(1, 4, first_token=1000 * (i + 1)) for i in range(3)]
    played = play(*three, policy="fastserve_mlfq", options={"max_batch": most})
    assert len(rows_per_step(played)[0]) == together


# -- VTC


def test_a_client_is_lifted_to_the_least_of_those_that_wait_and_keeps_a_larger_counter() -> None:
    memory = Counters(counters={"a": 5, "b": 3, "idle": 1, "rich": 9}, waiting={"a": 1, "b": 1, "idle": 0})
    assert memory.lifted("new").counters["new"] == 3
    assert memory.lifted("rich").counters["rich"] == 9
    assert memory.lifted("a").counters["a"] == 5
    again = Counters(counters={"poor": 1, "b": 3}, waiting={"poor": 1, "b": 1}).lifted("poor")
    assert again.counters["poor"] == 1  # it waits already: no lift
    assert again.waiting["poor"] == 2


def test_the_last_to_leave_the_queue_is_who_has_nothing_more_waiting() -> None:
    memory = Counters(waiting={"a": 2, "b": 1}, last_left="x")
    assert memory.left("a").last_left == "x"
    assert memory.left("b").last_left == "b"


@pytest.mark.parametrize("policy", ["vtc", "vtc_completed"])
@pytest.mark.parametrize(("client_state", "waiting"), [(WAITING, 1), (RUNNING, 2)])
def test_an_end_takes_a_waiting_request_out_of_the_queue_and_no_other(
    policy: str, client_state: SessionState, waiting: int
) -> None:
    made = make_policy(policy)
    for event in ("cancelled", "failed"):
        memory = Counters(counters={"default": 1}, waiting={"default": 2}, live={"default": 3})
        after = made.observe(memory, event, view(state=client_state), 0.0)
        assert (after.waiting["default"], after.live["default"]) == (waiting, 2)


@pytest.mark.parametrize(
    ("counters", "first"), [({"a": 2, "b": 1}, "s1"), ({"a": 1, "b": 1}, "s0"), ({"a": 1, "b": 2}, "s0")]
)
def test_the_least_served_client_is_next_and_of_equals_the_one_of_the_smaller_name(
    counters: dict[str, int], first: str
) -> None:
    made = make_policy("vtc")
    waiting = [view("s0", index=0, client_id="a"), view("s1", index=1, client_id="b")]
    at = state(*waiting, policy_memory=Counters(counters=counters))
    assert next(made.waiting_order(at)).request_id == first


def test_a_client_whose_request_is_not_ready_does_not_hold_its_others_up() -> None:
    made = make_policy("vtc")
    waiting = [view("s0", client_id="a", ready=False), view("s1", index=1, client_id="a")]
    at = state(*waiting, policy_memory=Counters(counters={"a": 0}))
    assert [item.request_id for item in made.waiting_order(at)] == ["s1"]


def test_a_provisional_charge_is_the_prompt_rows_that_are_left_to_compute() -> None:
    made = make_policy("vtc_completed", input_weight=3)
    for item, charge in (
        (view(state=RUNNING, prompt=9), 27),
        (view(state=RUNNING, prompt=9, computed=4), 15),
        (view(state=RUNNING, prompt=9, emitted=1, computed=9, last_ms=0.0), 0),
    ):
        memory = Counters(counters={"default": 0}, waiting={"default": 1}, live={"default": 1})
        after = made.observe(memory, "resumed", item, 0.0)
        assert (after.counters["default"], after.charged["r"]) == (charge, charge)
        assert after.waiting == {"default": 1}
        assert made.observe(memory, "admitted", item, 0.0).waiting == {"default": 0}


# -- least slack


def test_slack_counts_what_a_waiting_session_would_share_and_a_running_one_has() -> None:
    """Two rows a tick of 10 ms, due at 10: four rows are late by one tick, two are not."""
    made = make_policy("least_slack", tokens_per_tick=2)
    waiting, running = view("w", slo=SOON), view("r", state=RUNNING, slo=SOON)
    at = state(waiting, running, memory=Facts(cached={"w": 2, "r": 2}))
    assert [made.order_key(at, item)[0] for item in (waiting, running)] == [0.0, -10.0]


# -- Preble


@pytest.mark.parametrize(("cached", "group"), [(0, 2), (3, 2), (4, 1), (7, 1), (8, 0), (12, 0)])
def test_a_group_begins_at_its_fraction_of_the_prompt_exactly(cached: int, group: int) -> None:
    """Three groups of a prompt of twelve."""
    assert make_policy("preble_quota", quotas=[1, 1, 1]).group(cached, 12) == group


def test_a_pick_uses_its_groups_quota_and_a_spent_group_begins_a_cycle() -> None:
    made = make_policy("preble_quota", quotas=[2, 1])
    assert made._picked((2, 1), 0) == (1, 1)
    assert made._picked((0, 1), 1) == (0, 0)
    assert made._picked((0, 1), 0) == (1, 1)
    assert made.observe((2, 1), "submitted", view(), 0.0) == (2, 1)


# -- SARATHI


def test_sarathi_goes_on_with_the_oldest_partial_prompt_and_admits_nobody_meanwhile() -> None:
    two = session(9, 2), session(9, 2, first_token=3000)
    played = play(*two, policy="sarathi", options={"chunk_tokens": 4})
    assert intervals(played)[:3] == [[("s0", 0, 4)], [("s0", 4, 8)], [("s0", 8, 9)]]


def test_sarathi_resumes_the_suspended_before_it_admits() -> None:
    case = workload(
        session(6, 3),
        session(4, 1, at=1, first_token=3000),
        policy="sarathi",
        options={"chunk_tokens": 4},
        max_num_seqs=1,
        faults=(Fault(kind=FaultKind.PREEMPT, step=1, session=0),),
    )
    assert [name for name, _, _ in intervals(replay(case))[1]] == ["s0"]


@pytest.mark.parametrize(("level", "stamps", "first"), [(1, (7, 8), "a"), (1, (8, 7), "b"), (0, (8, 7), "b")])
def test_jobs_of_one_queue_are_served_in_the_order_in_which_they_came_to_it(
    level: int, stamps: tuple[int, ...], first: str
) -> None:
    made = make_policy("fastserve_mlfq")
    jobs = {name: Job(level, 0, stamp, 0.0) for name, stamp in zip("ab", stamps, strict=True)}
    for now_ms in (0.0, 300.0):  # a promoted job keeps its place among the promoted ones
        at = state(view("a"), view("b", index=1), now_ms=now_ms, policy_memory=Queues(9, jobs))
        assert min("ab", key=lambda name: made.order_key(at, at.views[name])) == first


# -- the warm and cold rule


def test_only_deferrals_are_counted_and_they_are_forgotten_with_the_entry_or_the_end() -> None:
    made = make_policy("sglang_adder", warm_cold=True, max_age_ms=0.0)
    at = state(view("a"), view("b", index=1), policy_memory={"b": 1}, memory=NoStops())
    plan = PlanBuilder(at, made)
    plan.defer(at.views["b"], "cold behind a warm-led batch")
    plan.reject(at.views["a"], "late")
    memory = made.planned(at, plan.build())
    assert memory == {"b": 2}
    for event in ("admitted", "cancelled", "failed"):
        assert made.observe({"b": 2, "c": 1}, event, at.views["b"], 0.0) == {"c": 1}
        assert made.observe({"c": 1}, event, at.views["b"], 0.0) == {"c": 1}
    assert made.observe({"b": 2}, "emitted", at.views["b"], 0.0) == {"b": 2}


@pytest.mark.parametrize(("limit", "joined"), [(198, True), (197, False)])
def test_cached_tokens_up_to_the_limit_exactly_may_join(limit: int, joined: bool) -> None:
    """Both share a prompt of which 100 - 1 tokens are resident; 99 + 99 are 198."""
    sessions = [session(100, 1, first_token=500)]
    sessions += [session(100, 1, at=2, first_token=500) for _ in range(2)]
    case = workload(
        *sessions,
        policy="sglang_adder",
        options={"max_cached_tokens": limit},
        prefix_cache=True,
        prefix_block_tokens=1,
        max_num_batched_tokens=512,
    )
    assert ("s2" in rows_per_step(replay(case))[2]) is joined
