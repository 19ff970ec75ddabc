"""What the contract of each policy says in numbers: small workloads on the exact engine under a virtual
clock, and what a right implementation makes of them, worked out by hand from the source document.

A check yields one sentence for every number that is another one. ``parity policies --check``, the gate and
the tests call the same functions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from fractions import Fraction
from itertools import pairwise
from typing import Any

from parity.checkers.claims import PREMISES, BoundClaim, claim_vtc_bound
from parity.checkers.outcomes import ledger_of, served_sessions
from parity.checkers.rows import (
    causal_pairs,
    check_partition,
    chunk_bounds,
    equal_chunk_history,
    frozen_batch,
    history_bytes,
    history_rows,
    piggybacked_decodes,
    prefill_chunks,
    slots_of,
    total_pairs,
    unavoidable_rows,
)
from parity.checkers.service import service_of, starved_clients
from parity.records import Finding
from parity.run.runner import Replay, replay
from parity.suites.workloads import TICK_MS, intervals, play, rows_per_step, session, workload
from scheduler.limits import Layout
from scheduler.policies.vtc import MAX_DEPARTED, Counters
from scheduler.policy.goodput import sweep_goodput
from scheduler.policy.reservation import (
    Recovery,
    Reservation,
    answer_allocation,
    estimate_reservation,
    recovery_for,
    request_allocation,
    reservation_error,
)
from scheduler.records import (
    Allocation,
    Request,
    ReservationEstimate,
    ServiceLevel,
    SessionState,
    SessionView,
)

Check = Callable[[], Iterable[str]]
CONTRACT_CHECKS: dict[str, list[Check]] = {}


def contract_of(*policies: str) -> Callable[[Check], Check]:
    """Decorator: the check belongs to the contract of these policies."""

    def register(check: Check) -> Check:
        for policy in policies:
            CONTRACT_CHECKS.setdefault(policy, []).append(check)
        return check

    return register


def check_contract(policy: str) -> list[Finding]:
    """What a policy's contract is broken by, under the name of its check. A workload that
    cannot be served at all breaks it, too.
    """
    findings: list[Finding] = []
    for check in CONTRACT_CHECKS.get(policy, ()):
        try:
            findings += [Finding(check.__name__, text) for text in check()]
        except Exception as error:  # a policy that breaks off has not kept its contract
            findings.append(Finding(check.__name__, f"{type(error).__name__}: {error}"))
    return findings


def differs(what: str, found: object, right: object) -> Iterator[str]:
    """One sentence if two values differ."""
    if found != right:
        yield f"{what} is {found}, not {right}"


# -- refill


def refill(policy: str, *sessions: int) -> Replay:
    """A has 2 outputs and B 8, both at once; C has 3 and comes at cut 2. Nobody declares its true length."""
    three = [session(1, 20, hidden=2), session(1, 20, hidden=8), session(1, 20, hidden=3, at=2)]
    return play(*(three[index] for index in sessions or range(3)), policy=policy, max_num_seqs=2)


@contract_of("fixed_batch")
def a_frozen_cohort_wastes_its_slots() -> Iterator[str]:
    slots = slots_of(refill("fixed_batch").run, slots=2)
    yield from differs("iterations, useful of available", astuple_of(slots), (11, 13, 22))
    alone = slots_of(refill("fixed_batch", 0, 1).run, slots=2)
    yield from differs("the cohort of 2 and 8 outputs", alone, frozen_batch((2, 8)))
    yield from differs("its idle slots", (alone.idle, alone.utilization), (6, Fraction(10, 16)))


@contract_of("fcfs")
def a_slot_is_refilled_when_it_is_free() -> Iterator[str]:
    slots = slots_of(refill("fcfs").run, slots=2)
    yield from differs("iterations, useful of available", astuple_of(slots), (8, 13, 16))


@contract_of("single_lane")
def one_session_has_the_lane() -> Iterator[str]:
    sizes = [len(step) for step in rows_per_step(refill("single_lane"))]
    yield from differs("sessions by step", sizes, [1] * 13)


def astuple_of(slots: Any) -> tuple[int, int, int]:
    return slots.iterations, slots.useful, slots.available


# -- ORCA and SARATHI


@contract_of("orca")
def the_declared_total_is_reserved() -> Iterator[str]:
    pair = session(4, 9), session(4, 9, first_token=2000)
    for slots, first in ((26, ["s0", "s1"]), (25, ["s0"])):
        played = play(*pair, policy="orca", options={"slots": slots})
        yield from differs(f"the first batch of {slots} slots", sorted(rows_per_step(played)[0]), first)


@contract_of("orca")
def a_request_above_the_slots_is_refused() -> Iterator[str]:
    for slots, refused in ((12, [0]), (13, [])):
        played = play(session(4, 9), policy="orca", options={"slots": slots})
        yield from differs(f"who is refused by {slots} slots", list(played.run.refusals), refused)


@contract_of("orca")
def the_first_misfit_ends_the_batch() -> Iterator[str]:
    three = session(4, 5), session(4, 5, first_token=2000), session(1, 2, first_token=3000)
    steps = [sorted(step) for step in rows_per_step(play(*three, policy="orca", options={"slots": 12}))]
    yield from differs("the batches", steps[:6], [["s0"]] * 5 + [["s1", "s2"]])


@contract_of("sarathi")
def chunks_keep_the_causal_triangle() -> Iterator[str]:
    for size in (1, 2, 3, 4, 5, 6, 12):
        chunks = prefill_chunks(play(session(12, 1), policy="sarathi", options={"chunk_tokens": size}).run, 0)
        yield from check_partition(chunks, 12)
        yield from differs(f"chunks of {size}", chunks, chunk_bounds(12, size))
        yield from differs("causal pairs", sum(causal_pairs(*chunk) for chunk in chunks), total_pairs(12))


@contract_of("sarathi")
def decodes_ride_with_every_chunk() -> Iterator[str]:
    decodes = [session(1, 20, first_token=2000 + 100 * i) for i in range(4)]
    limits = {"max_num_batched_tokens": 8, "max_num_seqs": 8}
    played = play(*decodes, session(16, 1, at=4), policy="sarathi", options={"chunk_tokens": 4}, **limits)
    chunks = prefill_chunks(played.run, 4)
    riders = [len(step) - 1 for step in rows_per_step(played) if "s4" in step]
    right = piggybacked_decodes(4, chunk=4, prompt=16, budget=8, seqs=8)
    yield from differs("riders", riders, [right] * 4)
    yield from differs("riders by hand", right, 4)
    yield from differs("pairs of 16 rows by 4", sum(causal_pairs(*chunk) for chunk in chunks), 136)
    yield from differs("rows read again", history_rows(chunks), 24)
    yield from differs("rows read again, of equal chunks", equal_chunk_history(4, 4), 24)
    yield from differs("bytes exposed again", history_bytes(chunks, row_bytes=131_072), 3 << 20)


@contract_of("sarathi_serve")
def decodes_come_first_then_the_partial_prefill_within_tau() -> Iterator[str]:
    decodes = [session(1, 20, first_token=2000 + 100 * i) for i in range(3)]
    late = session(10, 2, at=3, first_token=4000), session(4, 1, at=3, first_token=5000)
    steps = rows_per_step(play(*decodes, *late, policy="sarathi_serve", options={"tau": 8}))
    three = {"s0": 1, "s1": 1, "s2": 1}
    right = [{**three, "s3": 5}, {**three, "s3": 5}, {**three, "s3": 1, "s4": 4}]
    yield from differs("rows by step", steps[3:6], right)


# -- vLLM


def crowded(policy: str) -> Replay:
    """Running [A (priority 10), B (priority 1)] fill eight cells; both want one row more in step 2."""
    pair = session(3, 5, priority=10), session(4, 5, at=1, priority=1, first_token=3000)
    return play(*pair, policy=policy, pool_cells=8)


def first_preemption(played: Replay) -> tuple[int, list[str]]:
    """Its step, and who ran in it."""
    step = next(i for i, record in enumerate(played.run.records) if record.preempted)
    return step, [name for name, _, _ in intervals(played)[step]]


@contract_of("vllm_fcfs")
def the_tail_of_the_running_queue_is_preempted() -> Iterator[str]:
    yield from differs("who runs on", first_preemption(crowded("vllm_fcfs"))[1], ["s0"])


@contract_of("vllm_priority")
def the_least_favoured_is_preempted_though_it_asks() -> Iterator[str]:
    played = crowded("vllm_priority")
    step, ran = first_preemption(played)
    yield from differs("who runs on", ran, [])
    yield from differs("who runs next", [name for name, _, _ in intervals(played)[step + 1]], ["s1"])


@contract_of("vllm_fcfs", "vllm_priority")
def running_sessions_come_before_waiting_ones() -> Iterator[str]:
    arrivals = session(4, 4), session(20, 2, at=1, first_token=3000), session(4, 2, at=2, first_token=5000)
    steps = rows_per_step(play(*arrivals, policy="vllm_fcfs", max_num_batched_tokens=8, max_num_seqs=8))
    right = [{"s0": 4}, {"s0": 1, "s1": 7}, {"s0": 1, "s1": 7}, {"s0": 1, "s1": 6, "s2": 1}]
    yield from differs("rows by step", steps[:4], right)


# -- sglang


def prefills(*lengths: int, **options: object) -> list[dict[str, int]]:
    prompts = [session(rows, 1, first_token=1000 * (i + 1)) for i, rows in enumerate(lengths)]
    return rows_per_step(play(*prompts, policy="sglang_adder", options=options, max_num_batched_tokens=512))


@contract_of("sglang_adder")
def a_chunked_request_stays_alone_unless_mixing_is_on() -> Iterator[str]:
    alone = prefills(160, 8, 8, chunk_tokens=64)
    yield from differs("batches", alone[:4], [{"s0": 64}, {"s0": 64}, {"s0": 32}, {"s1": 8, "s2": 8}])
    mixed = prefills(160, 8, 8, chunk_tokens=64, mix_chunked=True)
    yield from differs("the tail's batch", mixed[2], {"s0": 32, "s1": 8, "s2": 8})


@contract_of("sglang_adder")
def the_extend_limit_counts_whole_pages() -> Iterator[str]:
    yield from differs("24 + 24 tokens under 63", prefills(24, 24, max_extend_tokens=63)[0], {"s0": 24})
    both = {"s0": 24, "s1": 24}
    yield from differs("24 + 24 tokens under 64", prefills(24, 24, max_extend_tokens=64)[0], both)
    yield from differs("one request a batch", prefills(24, 24, max_requests=1)[0], {"s0": 24})


# -- objectives

SLO = ServiceLevel(ttft_ms=30.0, tbt_ms=20.0)


@contract_of("least_slack")
def a_burst_over_capacity_is_late_or_refused_at_equal_goodput() -> Iterator[str]:
    six = [session(1, 2, slo=SLO, first_token=1000 * (i + 1)) for i in range(6)]
    rates = []
    for options, right in (({}, (4, 2, 0)), ({"overload": {"kind": "bounded", "max_live": 4}}, (4, 0, 2))):
        played = play(*six, policy="least_slack", options=options, max_num_batched_tokens=2)
        ledger = ledger_of(served_sessions(played.run), window_ms=60.0)
        found = (ledger.valid, ledger.missed, ledger.rejected)
        yield from differs(f"valid, missed, rejected with {options}", found, right)
        rates.append(ledger.figure("request_goodput").value)
    yield from differs("goodput of the two", rates[0], rates[1])


@contract_of("least_slack")
def a_saturated_window_closes_its_partition() -> Iterator[str]:
    many = [session(1, 2, at=i // 2, slo=SLO, first_token=1000 + 10 * i) for i in range(240)]
    limits = {"max_num_batched_tokens": 2, "max_num_seqs": 256, "num_sequences": 256}
    options = {"overload": {"kind": "bounded", "max_live": 4}}
    played = play(*many, policy="least_slack", options=options, pool_cells=1000, **limits)
    ledger = ledger_of(served_sessions(played.run, until_ms=1300.0), window_ms=1300.0)
    found = (ledger.valid, ledger.missed, ledger.rejected, ledger.open)
    yield from differs("valid, missed, rejected, open", found, (122, 0, 118, 0))
    yield from differs("unavoidable rows", unavoidable_rows(240 * 2, 130 * 2), 220)


@contract_of("least_slack")
def a_rejection_after_the_window_is_open_in_it() -> Iterator[str]:
    """The lane is taken for 8 ticks; whoever waits for its first token is given up when that is too late."""
    pair = session(1, 8, slo=ServiceLevel(ttft_ms=30.0)), session(1, 1, slo=SLO, first_token=2000)
    options = {"overload": {"kind": "reject_infeasible"}}
    run = play(*pair, policy="least_slack", options=options, max_num_seqs=1).run
    for window_ms, right in ((20.0, (0, 2)), (80.0, (1, 0))):
        ledger = ledger_of(served_sessions(run, until_ms=window_ms), window_ms=window_ms)
        found = (ledger.rejected, ledger.open)
        yield from differs(f"rejected and open after {window_ms:g} ms", found, right)


@contract_of("scorpio_guard")
def credits_give_each_session_its_limit_in_the_mean() -> Iterator[str]:
    for limit_ms in (30.0, 40.0, 50.0, 70.0, 100.0):
        played = play(
            session(1, 60, slo=ServiceLevel(tbt_ms=20.0)),
            session(1, 7, slo=ServiceLevel(tbt_ms=limit_ms), first_token=3000),
            policy="scorpio_guard",
            ms_per_step=20.0,
        )
        at = played.run.emitted_at
        gaps = [20.0 * (later - earlier) for earlier, later in pairwise(at[1])]
        yield from differs(f"mean gap at {limit_ms:g} ms", sum(gaps) / len(gaps), limit_ms)
        yield from differs("steps of the tight session", at[0], list(range(60)))


@contract_of("scorpio_guard")
def what_cannot_be_in_time_is_rejected() -> Iterator[str]:
    six = [session(1, 2, slo=SLO, first_token=1000 * (i + 1)) for i in range(6)]
    played = play(*six, policy="scorpio_guard", options={"tick_ms": TICK_MS}, max_num_batched_tokens=2)
    served = served_sessions(played.run)
    late = [item.ttft_ms for item in served if item.emissions_ms and item.ttft_ms > 30.0]
    yield from differs("first tokens after 30 ms", late, [])
    if not any(item.end.value == "rejected" for item in served):
        yield "nobody was rejected"


@contract_of("dist_goodput")
def goodput_is_the_last_rate_before_attainment_falls() -> Iterator[str]:
    def attainment(rate: float) -> float:
        arrivals = [session(1, 2, at=int(i / rate), slo=SLO, first_token=1000 + 10 * i) for i in range(60)]
        played = play(*arrivals, policy="least_slack", max_num_batched_tokens=2, max_num_seqs=64)
        return float(ledger_of(served_sessions(played.run), window_ms=1e6).figure("offered_attainment").value)

    sweep = sweep_goodput(attainment, [0.5, 1.0, 1.5, 2.0], alpha=0.9)
    yield from differs("goodput in requests a tick", sweep.rate, 1.0)  # two rows a tick are one request
    yield from differs("rates tried", [rate for rate, _ in sweep.points], [0.5, 1.0, 1.5])


# -- reservation

# Total outputs of three resume-ready requests that have each emitted one: maximum, point, p90, realised.
TOTALS = {"A:0": (11, 5, 8, 9), "B:0": (10, 4, 7, 7), "C:0": (10, 4, 6, 8)}
USED_ROWS, HARD_ROWS, WATERMARK_ROWS = 8, 28, 4


def planned_reservations(reservation: Reservation) -> list[ReservationEstimate]:
    """The estimates that fit, one after the other, each beside those before it."""
    reserved, fitting = USED_ROWS, []
    for index, (name, (most, *_)) in enumerate(TOTALS.items()):
        request = Request(request_id=name, prompt=(1, 2), max_tokens=most)
        view = SessionView(request, index, SessionState.SUSPENDED, 1, 0, 2, 0, 0, 1, True, 0.0, 1.0, 1.0)
        estimate = estimate_reservation(reservation, view, reserved_rows=reserved, hard_rows=HARD_ROWS)
        wish = request_allocation(estimate, epoch=1)
        if wish is None:
            continue
        answer = answer_allocation(wish, available_rows=HARD_ROWS - reserved, total_rows=HARD_ROWS)
        if answer.allocation is Allocation.GRANTED:
            reserved += wish.rows
            fitting.append(estimate)
    return fitting


@contract_of("fcfs")
def each_reservation_admits_what_its_forecast_allows() -> Iterator[str]:
    forecasts = {name: {"point": point, "p90": p90} for name, (_, point, p90, _) in TOTALS.items()}
    kinds = {
        "maximum": (Reservation(), ("AB", 27, 22, Recovery.NONE)),
        "point": (Reservation(kind="point", forecasts=forecasts), ("ABC", 18, 29, Recovery.PREEMPT)),
        "quantile": (Reservation(kind="quantile", forecasts=forecasts), ("ABC", 26, 29, Recovery.PREEMPT)),
        "watermark": (
            Reservation(kind="watermark", watermark_rows=WATERMARK_ROWS, forecasts=forecasts),
            ("AB", 21, 22, Recovery.EXTEND),
        ),
    }
    for kind, (reservation, (names, reserved, realised, recovery)) in kinds.items():
        estimates = planned_reservations(reservation)
        admitted = [item.request_id for item in estimates]
        rows = USED_ROWS + sum(item.rows for item in estimates)
        true = USED_ROWS + sum(TOTALS[name][3] - 1 for name in admitted)
        yield from differs(f"{kind} admits", admitted, [f"{letter}:0" for letter in names])
        yield from differs(f"{kind} reserves", rows, reserved)
        yield from differs(f"{kind} meets", true, realised)
        yield from differs(f"the error of {kind}", reservation_error(rows, true), reserved - realised)
        asked = recovery_for(reserved_rows=rows, realised_rows=true, hard_rows=HARD_ROWS)
        yield from differs(f"{kind} asks for", asked, recovery)


@contract_of("fcfs")
def a_watermark_holds_within_a_burst() -> Iterator[str]:
    burst = [session(3, 7, first_token=1000 * (i + 1)) for i in range(5)]
    option = {"reservation": {"kind": "watermark", "watermark_rows": 8}}
    first = sorted(rows_per_step(play(*burst, options=option, pool_cells=40))[0])
    yield from differs("who enters 40 rows of which 8 stay free", first, ["s0", "s1", "s2"])


# -- fairness

ONE_EVENT = {"max_num_batched_tokens": 1, "max_num_seqs": 1}
EVEN = {"input_weight": 1, "output_weight": 1}  # one prompt row and one output: cost two


def check_flood(policy: str, gap: int) -> Iterator[str]:
    """A offers eight events of cost two, B four, all at once; one event a tick."""
    events = [session(1, 1, client_id="A", first_token=1000 + i) for i in range(8)]
    events += [session(1, 1, client_id="B", first_token=2000 + i) for i in range(4)]
    options = EVEN if policy.startswith("vtc") else {}
    ledger = service_of(play(*events, policy=policy, options=options, **ONE_EVENT).run, **EVEN)
    yield from differs("the largest gap", ledger.gap("A", "B"), gap)
    yield from differs("the totals", ledger.totals(), {"A": 16, "B": 8})


@contract_of("fcfs")
def fifo_lets_the_gap_reach_16() -> Iterable[str]:
    return check_flood("fcfs", 16)


@contract_of("vtc")
def least_service_keeps_the_gap_at_2() -> Iterable[str]:
    return check_flood("vtc", 2)


@contract_of("vtc_completed")
def least_completed_service_keeps_the_gap_at_2() -> Iterable[str]:
    return check_flood("vtc_completed", 2)


@contract_of("vtc")
def the_bound_holds_where_it_is_claimed() -> Iterator[str]:
    eight = [session(7, 1, client_id="fg"[i // 4], first_token=1000 * (i + 2)) for i in range(8)]
    heavy = {"input_weight": 2, "output_weight": 1}
    case = workload(*eight, policy="vtc", options=heavy, max_num_batched_tokens=7, max_num_seqs=1)
    window = {"start_ms": 0.0, "stop_ms": 30.0, "max_input_tokens": 7, "max_running_tokens": 8}
    claim = claim_vtc_bound(replay(case).run, "f", "g", **window, **heavy)
    yield from differs("the claim", claim.line, "holds: gap 15, bound 28, all premises observed")


@contract_of("vtc")
def a_gap_over_the_bound_violates_it() -> Iterator[str]:
    claims = {
        gap: BoundClaim(premises=dict.fromkeys(PREMISES, True), gap=gap, bound=28) for gap in (28, 29, 33)
    }
    said = {gap: claim.verdict for gap, claim in claims.items()}
    yield from differs("what is said", said, {28: "holds", 29: "violated", 33: "violated"})


@contract_of("vtc")
def nothing_is_claimed_of_clients_of_which_nobody_waits() -> Iterator[str]:
    pair = session(7, 5, client_id="f"), session(7, 5, client_id="g", first_token=2000)
    window = {"start_ms": 0.0, "stop_ms": 30.0, "max_input_tokens": 7, "max_running_tokens": 24}
    weights = {"input_weight": 1, "output_weight": 2}
    claim = claim_vtc_bound(play(*pair, policy="vtc").run, "f", "g", **window, **weights)
    yield from differs("the claim", claim.line, "not claimed: without both_backlogged; gap 0")


@contract_of("vtc")
def of_departed_clients_the_largest_counters_are_remembered() -> Iterator[str]:
    names = [f"c{index:04}" for index in range(MAX_DEPARTED + 9)]
    before = Counters(
        counters={name: index for index, name in enumerate(names)} | {"last": 0},
        live={"last": 1},
        waiting={"last": 0},
        last_left="last",
    )
    after = before.ended("last").counters
    yield from differs("how many are remembered", len(after), MAX_DEPARTED + 1)
    yield from differs("the least of them", min(set(after) - {"last"}), "c0009")


def under_pressure(policy: str, options: dict | None = None) -> Replay:
    """One low-priority request at tick 0, one high-priority request every tick, one event a tick."""
    low = session(1, 1, priority=4, client_id="low", first_token=900)
    high = [session(1, 1, at=t, client_id="high", first_token=2000 + t) for t in range(12)]
    return play(low, *high, policy=policy, options=options, **ONE_EVENT)


@contract_of("static_priority")
def a_low_priority_starves() -> Iterator[str]:
    ledger = service_of(under_pressure("static_priority").run, until_ms=12 * TICK_MS)
    starved = starved_clients(ledger, start_ms=0.0, stop_ms=12 * TICK_MS)
    yield from differs("who starves", starved, ["low"])


@contract_of("aging")
def age_wins_at_tick_8() -> Iterator[str]:
    played = under_pressure("aging", {"quantum_ms": 2 * TICK_MS})
    yield from differs("the low request's tick", played.run.emitted_at[0], [8])


@contract_of("preble_quota")
def a_quota_of_two_to_one_completes_eight_hot_and_one_cold() -> Iterator[str]:
    resident = session(16, 1, first_token=500)
    cold = session(16, 1, at=2, first_token=9000, client_id="cold")
    hot = [session(16, 1, at=2 + t, first_token=500, client_id="hot") for t in range(9)]
    case = workload(
        resident,
        cold,
        *hot,
        policy="preble_quota",
        options={"quotas": [2, 1]},
        layout=Layout.STOCK,
        prefix_cache=True,
        max_num_batched_tokens=16,
        max_num_seqs=1,
        pool_cells=400,
        prefix_block_tokens=1,
    )
    events = service_of(replay(case).run, until_ms=11 * TICK_MS).events
    done = {name: sum(e.outputs for e in events if e.client_id == name) for name in ("hot", "cold")}
    yield from differs("completed by tick 11", done, {"hot": 8, "cold": 1})


@contract_of("fastserve_mlfq")
def a_long_first_step_skips_down_and_is_promoted_when_it_starves() -> Iterator[str]:
    for promote_after_ms, tick in ((1e9, 20), (5 * TICK_MS, 6)):
        short = [session(1, 1, at=t, client_id="short", first_token=2000 + t) for t in range(20)]
        played = play(
            session(4, 1, client_id="long", first_token=900),
            *short,
            policy="fastserve_mlfq",
            options={"quantum_rows": 1, "levels": 4, "promote_after_ms": promote_after_ms},
            max_num_batched_tokens=4,
            max_num_seqs=1,
        )
        yield from differs(
            f"its tick, promoted after {promote_after_ms:g} ms", played.run.emitted_at[0], [tick]
        )


@contract_of("layer_ready")
def a_session_enters_when_its_layers_will_be_there() -> Iterator[str]:
    for second, step in ((["inflight", 5.0], 0), (["inflight", 5.1], 1), (["ready", 0], 0)):
        played = play(
            session(1, 9),
            session(2, 1, first_token=3000),
            policy="layer_ready",
            options={"facts": {"s1": [["ready", 0], second]}, "layer_ms": 5.0},
        )
        entered = next(i for i, rows in enumerate(rows_per_step(played)) if "s1" in rows)
        yield from differs(f"its step with {second}", entered, step)
