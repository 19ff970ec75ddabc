"""Numbers of virtual token counters: the bound and its premises, the lift, charges that fail."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import scheduler.policies.vtc as vtc_module
from parity.checkers.claims import claim_vtc_bound
from parity.checkers.service import service_of
from parity.records import Fault, FaultKind
from parity.run.runner import replay
from parity.suites.workloads import TICK_MS, play, session, workload
from scheduler.policies import make_policy
from scheduler.policies.vtc import Vtc
from scheduler.records import Request, SessionState, SessionView

# ---------------------------------------------------------------------------------------------------------


def backlogged(**fields: Any) -> Any:
    """Two clients with more than they get: prompts of up to 8, at most 4 tokens running."""
    sessions = []
    for i in range(12):
        for client, prompt in (("f", 1 + i % 3), ("g", 1)):
            sessions.append(session(prompt, 1, client_id=client, first_token=1000 * (len(sessions) + 2)))
    return workload(
        *sessions,
        policy="vtc",
        options={"input_weight": 1, "output_weight": 2},
        max_num_batched_tokens=4,
        max_num_seqs=1,
        **fields,
    )


CLAIM = {
    "start_ms": 0.0,
    "stop_ms": 10 * TICK_MS,
    "max_input_tokens": 8,
    "max_running_tokens": 4,
    "input_weight": 1,
    "output_weight": 2,
}


def test_vtc_bound_is_16_for_weights_1_and_2_inputs_of_8_and_4_running() -> None:
    claim = claim_vtc_bound(replay(backlogged()).run, "f", "g", **CLAIM)
    assert claim.premises == dict.fromkeys(claim.premises, True)
    assert claim.bound == 16
    assert 0 < claim.gap <= claim.bound


@pytest.mark.parametrize(
    ("premise", "change"),
    [
        ("algorithm", {"input_weight": 3}),
        ("both_backlogged", {"stop_ms": 1e6}),
        ("bounds", {"max_input_tokens": 2}),
    ],
)
def test_vtc_bound_is_not_claimed_without_a_premise(premise: str, change: dict[str, float]) -> None:
    claim = claim_vtc_bound(replay(backlogged()).run, "f", "g", **{**CLAIM, **change})
    assert claim.premises[premise] is False
    assert claim.bound is None


def at_once(**fields: Any) -> Any:
    """Four prompts of seven of each client; w_p = 2 is above w_q = 1; nobody has to wait but the last."""
    sessions = [session(7, 1, client_id="fg"[i // 4], first_token=1000 * (i + 2)) for i in range(8)]
    weights = {"input_weight": 2, "output_weight": 1}
    return workload(*sessions, policy="vtc", options=weights, **fields)


HEAVY_INPUT = {
    "start_ms": 0.0,
    "max_input_tokens": 7,
    "max_running_tokens": 28,
    "input_weight": 2,
    "output_weight": 1,
}


def test_vtc_bound_is_not_claimed_for_clients_of_which_nothing_waits() -> None:
    """What runs is no backlog: four of f's prompts run at once, 4 * (2 * 7 + 1) = 60 over 2U = 56."""
    case = at_once(max_num_batched_tokens=28)
    only_f = replace(case, sessions=case.sessions[:4] + (replace(case.sessions[4], arrival_step=1),))
    claim = claim_vtc_bound(replay(only_f).run, "f", "g", stop_ms=20.0, **HEAVY_INPUT)
    assert (claim.gap, claim.bound, claim.premises["both_backlogged"]) == (60, None, False)
    assert claim.verdict == "not claimed"


class Favouring(Vtc):
    """Says that it is ``vtc``, and lets f in first whatever the counters say."""

    def waiting_order(self, state: Any) -> Any:
        waiting = map(state.views.__getitem__, state.waiting)
        return iter(sorted(waiting, key=lambda view: (view.request.client_id, view.index)))


def test_a_gap_over_the_bound_with_all_premises_is_a_violation() -> None:
    """One request a step: by 30 ms f got three prompts, 3 * 15 = 45 over 2 * max(2 * 7, 1 * 8) = 28."""
    case = at_once(max_num_batched_tokens=7, max_num_seqs=1)
    bounds = {**HEAVY_INPUT, "max_running_tokens": 8, "stop_ms": 30.0}
    right = claim_vtc_bound(replay(case).run, "f", "g", **bounds)
    assert (right.gap, right.bound, right.verdict) == (15, 28, "holds")
    wrong = claim_vtc_bound(replay(case, Favouring(input_weight=2, output_weight=1)).run, "f", "g", **bounds)
    assert (wrong.gap, wrong.bound, wrong.verdict) == (45, 28, "violated")
    assert wrong.line == "violated: gap 45, bound 28, all premises observed"


def test_vtc_bound_is_not_claimed_when_prompts_are_cut() -> None:
    """A cut prompt is served later than it is charged."""
    claim = claim_vtc_bound(
        replay(at_once(max_num_batched_tokens=4, max_num_seqs=1)).run, "f", "g", stop_ms=20.0, **HEAVY_INPUT
    )
    assert claim.premises["whole_prompts"] is False
    assert claim.line.startswith("not claimed: without ")


def test_vtc_bound_is_not_claimed_after_a_preemption() -> None:
    case = backlogged(faults=(Fault(kind=FaultKind.PREEMPT, step=1, session=2),))
    two_steps = workload(
        *[session(2, 3, client_id=c, first_token=1000 * (i + 2)) for i, c in enumerate("fgfgfgfg")],
        policy="vtc",
        faults=(Fault(kind=FaultKind.PREEMPT, step=1, session=0),),
        max_num_seqs=1,
    )
    assert case.faults
    claim = claim_vtc_bound(replay(two_steps).run, "f", "g", **{**CLAIM, "stop_ms": 50.0})
    assert claim.premises["no_preemption"] is False
    assert claim.bound is None


def view_of(client: str, name: str = "r", prompt_tokens: int = 4, **fields: Any) -> SessionView:
    request = Request(request_id=name, prompt=tuple(range(prompt_tokens)), max_tokens=1, client_id=client)
    values = {
        "state": SessionState.WAITING,
        "emitted": 0,
        "computed": 0,
        "committed": 0,
        "cached": 0,
        **fields,
    }
    return SessionView(
        request,
        0,
        values["state"],
        values["emitted"],
        values["computed"],
        values["committed"],
        values["cached"],
        0,
        0,
        True,
        0.0,
        None,
        None,
    )


def test_a_client_that_becomes_active_is_lifted_from_0_to_the_active_minimum_of_4() -> None:
    policy = make_policy("vtc", input_weight=1, output_weight=2)
    memory = policy.observe(policy.start(), "submitted", view_of("A", "a0"), 0.0)
    memory = policy.observe(memory, "submitted", view_of("A", "a1"), 0.0)
    memory = policy.observe(memory, "admitted", view_of("A", "a0"), 0.0)
    memory = policy.observe(memory, "submitted", view_of("B", "b0"), 0.0)
    assert memory.counters == {"A": 4, "B": 4}


def test_a_client_that_comes_to_an_empty_queue_is_lifted_to_the_last_leavers_counter() -> None:
    policy = make_policy("vtc", input_weight=1, output_weight=2)
    memory = policy.observe(policy.start(), "submitted", view_of("A", "a0"), 0.0)
    memory = policy.observe(memory, "admitted", view_of("A", "a0"), 0.0)
    memory = policy.observe(memory, "submitted", view_of("B", "b0"), 0.0)
    assert memory.counters["B"] == 4


def test_vtc_charges_the_prompt_when_it_enters_and_each_output_when_it_comes() -> None:
    played = play(session(5, 3, client_id="A"), policy="vtc", options={"input_weight": 1, "output_weight": 2})
    assert played.scheduler.policy_memory.counters == {"A": 5 + 3 * 2}


def failed_then_completed(policy: str) -> Any:
    case = workload(
        session(4, 1, client_id="A"),
        policy=policy,
        options={"input_weight": 1, "output_weight": 0},
        faults=(Fault(kind=FaultKind.DECODE_ERROR, step=0),),
    )
    return replay(case)


def test_a_failed_charge_goes_0_4_0_and_publishes_nothing_then_the_retry_publishes_4() -> None:
    policy = make_policy("vtc_completed", input_weight=1, output_weight=0)
    selected: list[tuple[int, int]] = []

    class Watched(type(policy)):
        identity = policy.identity

        def observe(self, memory: Any, event: Any, view: Any, now_ms: Any, amount: Any = 0) -> Any:
            memory = super().observe(memory, event, view, now_ms, amount)
            if event in ("submitted", "admitted", "preempted", "resumed", "prefilled"):
                selected.append((memory.counters["A"], memory.done.get("A", 0)))
            return memory

    case = workload(session(4, 1, client_id="A"), faults=(Fault(kind=FaultKind.DECODE_ERROR, step=0),))
    played = replay(case, Watched(input_weight=1, output_weight=0))
    assert played.run.problems == []
    assert selected == [(0, 0), (4, 0), (0, 0), (4, 0), (4, 4)]


def test_vtc_completed_publishes_exactly_the_completed_service() -> None:
    played = failed_then_completed("vtc_completed")
    memory = played.scheduler.policy_memory
    assert (
        played.scheduler.policy.published_service(memory)
        == service_of(played.run, input_weight=1, output_weight=0).totals()
        == {"A": 4}
    )
    assert memory.counters == {"A": 4}


def test_charges_count_within_one_plan_before_anything_is_done() -> None:
    """One of A's prompts is worth two of B's: after it B enters twice, all in the same step."""
    sessions = [session(4, 1, client_id="A", first_token=1000 * (i + 1)) for i in range(3)]
    sessions += [session(2, 1, client_id="B", first_token=9000 + 100 * i) for i in range(4)]
    played = play(*sessions, policy="vtc", options={"input_weight": 1, "output_weight": 0})
    intents = [intent.request_id for intent in played.run.trace[0].flight.plan.intents]
    assert intents == ["s0", "s3", "s4", "s1", "s5", "s6", "s2"]


@pytest.mark.parametrize("policy", ["vtc", "vtc_completed"])
def test_counters_of_departed_clients_are_bounded_and_the_largest_are_kept(
    policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vtc_module, "MAX_DEPARTED", 3)
    visits = [
        session(1 + i % 7, 1, at=2 * i, client_id=f"c{i}", first_token=1000 + 10 * i) for i in range(40)
    ]
    memory = play(*visits, policy=policy).scheduler.policy_memory
    assert memory.live == memory.waiting == memory.charged == {}
    assert len(memory.counters) <= 4  # the last one to leave the queue is needed for the lift
    assert len(memory.done) <= 4


def test_a_client_with_a_live_request_is_never_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vtc_module, "MAX_DEPARTED", 1)
    policy = make_policy("vtc", input_weight=1, output_weight=2)
    memory = policy.start()
    for name in "ABC":
        memory = policy.observe(memory, "submitted", view_of(name, name), 0.0)
        memory = policy.observe(memory, "admitted", view_of(name, name), 0.0)
    running = {"state": SessionState.RUNNING}
    for name in "AB":
        memory = policy.observe(memory, "emitted", view_of(name, name, **running), 0.0)
    memory = policy.observe(memory, "finished", view_of("A", "A", **running), 0.0)
    assert memory.live == {"B": 1, "C": 1}
    memory = policy.observe(memory, "finished", view_of("B", "B", **running), 0.0)
    # A: 4 + 2. B: lifted to 4, 4 + 2 more. C, the last to leave the queue: lifted to 8, 4 more.
    assert memory.counters == {"B": 10, "C": 12}
