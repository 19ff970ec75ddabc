"""Numbers of virtual token counters: the bound and its premises, the lift, charges that fail."""

from __future__ import annotations

import pytest

from parity.checkers.claims import claim_vtc_bound
from parity.checkers.service import service_of
from parity.records import Fault, FaultKind
from parity.run.runner import replay
from scheduler.policies import make_policy
from scheduler.records import Request, SessionState, SessionView
from tests.scheduler.policies.workloads import TICK_MS, play, session, workload

# ---------------------------------------------------------------------------------------------------------


def backlogged(**fields):
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


def test_vtc_bound_is_16_for_weights_1_and_2_inputs_of_8_and_4_running():
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
def test_vtc_bound_is_not_claimed_without_a_premise(premise, change):
    claim = claim_vtc_bound(replay(backlogged()).run, "f", "g", **{**CLAIM, **change})
    assert claim.premises[premise] is False
    assert claim.bound is None


def test_vtc_bound_is_not_claimed_after_a_preemption():
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


def view_of(client: str, name: str = "r", prompt_tokens: int = 4, **fields) -> SessionView:
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


def test_a_client_that_becomes_active_is_lifted_from_0_to_the_active_minimum_of_4():
    policy = make_policy("vtc", input_weight=1, output_weight=2)
    memory = policy.observe(policy.start(), "submitted", view_of("A", "a0"), 0.0)
    memory = policy.observe(memory, "submitted", view_of("A", "a1"), 0.0)
    memory = policy.observe(memory, "admitted", view_of("A", "a0"), 0.0)
    memory = policy.observe(memory, "submitted", view_of("B", "b0"), 0.0)
    assert memory.counters == {"A": 4, "B": 4}


def test_a_client_that_comes_to_an_empty_queue_is_lifted_to_the_last_leavers_counter():
    policy = make_policy("vtc", input_weight=1, output_weight=2)
    memory = policy.observe(policy.start(), "submitted", view_of("A", "a0"), 0.0)
    memory = policy.observe(memory, "admitted", view_of("A", "a0"), 0.0)
    memory = policy.observe(memory, "submitted", view_of("B", "b0"), 0.0)
    assert memory.counters["B"] == 4


def test_vtc_charges_the_prompt_when_it_enters_and_each_output_when_it_comes():
    played = play(session(5, 3, client_id="A"), policy="vtc", options={"input_weight": 1, "output_weight": 2})
    assert played.scheduler.policy_memory.counters == {"A": 5 + 3 * 2}


def failed_then_completed(policy: str):
    case = workload(
        session(4, 1, client_id="A"),
        policy=policy,
        options={"input_weight": 1, "output_weight": 0},
        faults=(Fault(kind=FaultKind.DECODE_ERROR, step=0),),
    )
    return replay(case)


def test_a_failed_charge_goes_0_4_0_and_publishes_nothing_then_the_retry_publishes_4():
    policy = make_policy("vtc_completed", input_weight=1, output_weight=0)
    selected: list[tuple[int, int]] = []

    class Watched(type(policy)):
        identity = policy.identity

        def observe(self, memory, event, view, now_ms, amount=0):
            memory = super().observe(memory, event, view, now_ms, amount)
            if event in ("submitted", "admitted", "preempted", "resumed", "prefilled"):
                selected.append((memory.counters["A"], memory.done.get("A", 0)))
            return memory

    case = workload(session(4, 1, client_id="A"), faults=(Fault(kind=FaultKind.DECODE_ERROR, step=0),))
    played = replay(case, Watched(input_weight=1, output_weight=0))
    assert played.run.problems == []
    assert selected == [(0, 0), (4, 0), (0, 0), (4, 0), (4, 4)]


def test_vtc_completed_publishes_exactly_the_completed_service():
    played = failed_then_completed("vtc_completed")
    memory = played.scheduler.policy_memory
    assert (
        played.scheduler.policy.published_service(memory)
        == service_of(played.run, input_weight=1, output_weight=0).totals()
        == {"A": 4}
    )
    assert memory.counters == {"A": 4}


def test_charges_count_within_one_plan_before_anything_is_done():
    """One of A's prompts is worth two of B's: after it B enters twice, all in the same step."""
    sessions = [session(4, 1, client_id="A", first_token=1000 * (i + 1)) for i in range(3)]
    sessions += [session(2, 1, client_id="B", first_token=9000 + 100 * i) for i in range(4)]
    played = play(*sessions, policy="vtc", options={"input_weight": 1, "output_weight": 0})
    intents = [intent.request_id for intent in played.run.trace[0].flight.plan.intents]
    assert intents == ["s0", "s3", "s4", "s1", "s5", "s6", "s2"]
