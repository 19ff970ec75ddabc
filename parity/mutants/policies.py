"""Mutants of policies: hidden lengths read, a set iterated, a session starved, planned work charged, a
clock restarted, cells in a plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import scheduler.policies.least_slack as least_slack_module
from parity.mutants.mutant import Complaint, Killer, Reach, Trial, mutant, replaced
from parity.mutants.seam import in_method
from parity.records import Finding
from parity.run.drive import Driver
from parity.run.runner import replay
from parity.suites.policies import (
    busy_case,
    check_clocks,
    check_hidden,
    check_plans,
    check_progress,
    check_service,
    print_digests,
    run_under_hash_seeds,
)
from scheduler.policies.aging import Aging
from scheduler.policies.vtc_completed import VtcCompleted
from scheduler.policy.base import PlanBuilder, Policy
from scheduler.policy.cost import ExclusiveCost
from scheduler.policy.state import SchedulerState
from scheduler.records import PlannedChunk, SessionState, SessionView


def contract_trial(name: str, policy: str, check: Callable[[str], Iterable[Finding]]) -> Trial:
    """One check of the battery on one policy."""
    return Trial(
        name=name, run=lambda: tuple(Complaint(Killer.CONTRACT, str(finding)) for finding in check(policy))
    )


def print_digest_of_set_order() -> None:
    """Entry point of another process, with the fault planted in it."""
    with in_method(Policy, "waiting_order")(policy_iterates_a_set)(Reach()):
        print_digests(["fcfs"])


def set_order_differs() -> tuple[Complaint, ...]:
    """Schedules in processes with other string hashes.

    They are new processes, so what is planted here is planted there again.
    """
    planted = Policy.waiting_order.__qualname__.startswith(policy_iterates_a_set.__name__)
    if planted:
        replay(busy_case("fcfs"))  # reaches the fault in this process, too
        code = f"from {__name__} import {print_digest_of_set_order.__name__} as show; show()"
    else:
        code = "from parity.suites.policies import print_digests; print_digests(['fcfs'])"
    if len(dict.fromkeys(run_under_hash_seeds(code))) == 1:
        return ()
    return (Complaint(Killer.CONTRACT, "schedules differ from process to process: a set was iterated"),)


@dataclass(frozen=True, slots=True)
class ChunkWithCells(PlannedChunk):
    """A chunk that says where its rows will lie."""

    cells: tuple[int, ...] = ()


@mutant(
    part="policies",
    killers=(Killer.CONTRACT,),
    trials=(contract_trial("equal plans after equal results", "fcfs", check_hidden),),
)
@contextmanager
def policy_reads_hidden_lengths(reach: Reach) -> Iterator[None]:
    """A policy orders waiting sessions by what they will really emit.

    Waiting sessions in order of their realised output lengths, which the policy was told behind its back.
    """

    truth: dict[str, int] = {}

    def told(original: Callable[..., None]) -> Callable[..., None]:
        def init(self: Driver, case: Any, *rest: Any, **named: Any) -> None:
            truth.update(
                {
                    f"s{index}": session.hidden_output_tokens or session.max_tokens
                    for index, session in enumerate(case.sessions)
                }
            )
            original(self, case, *rest, **named)

        return init

    def shortest_first(original: Callable[..., Any]) -> Callable[..., Any]:
        def waiting_order(self: Policy, state: SchedulerState) -> list[SessionView]:
            views = list(original(self, state))
            ordered = sorted(views, key=lambda view: truth[view.request_id])
            if ordered != views:
                reach()
            return ordered

        return waiting_order

    with ExitStack() as stack:
        stack.enter_context(replaced(Driver, "__init__", told))
        stack.enter_context(replaced(Policy, "waiting_order", shortest_first))
        yield


@mutant(
    in_method(Policy, "waiting_order"),
    part="policies",
    killers=(Killer.CONTRACT,),
    trials=(Trial(name="processes with other string hashes", run=set_order_differs),),
)
def policy_iterates_a_set(original: Callable[..., Any], reach: Reach) -> Callable[..., Any]:
    """Waiting sessions are considered in the order of a set."""

    def waiting_order(self: Policy, state: SchedulerState) -> list[SessionView]:
        reach()
        return [state.views[request_id] for request_id in frozenset(state.waiting)]

    return waiting_order


@mutant(
    in_method(Policy, "waiting_order"),
    part="policies",
    killers=(Killer.CONTRACT,),
    trials=(contract_trial("endless pressure", "fcfs", check_progress),),
)
def policy_starves(original: Callable[..., Any], reach: Reach) -> Callable[..., Any]:
    """The newest waiting session is always considered first."""

    def waiting_order(self: Policy, state: SchedulerState) -> list[SessionView]:
        if len(state.waiting) > 1:
            reach()
        return list(original(self, state))[::-1]

    return waiting_order


@mutant(
    in_method(VtcCompleted, "observe"),
    part="policies",
    killers=(Killer.CONTRACT,),
    trials=(contract_trial("failed steps and a preemption", "vtc_completed", check_service),),
)
def policy_charges_planned_work(original: Callable[..., Any], reach: Reach) -> Callable[..., Any]:
    """A prompt is published as service when its session enters."""

    def observe(
        self: VtcCompleted, memory: Any, event: str, view: SessionView, now_ms: float, amount: int = 0
    ) -> Any:
        before = memory.done
        memory = original(self, memory, event, view, now_ms, amount)
        if event in ("admitted", "resumed"):
            reach()
            return self._complete(memory, view.request.client_id, memory.charged[view.request_id])
        return replace(memory, done=before) if event == "prefilled" else memory

    return observe


@mutant(
    in_method(least_slack_module, "slack_ms"),
    part="policies",
    killers=(Killer.CONTRACT,),
    trials=(contract_trial("original clocks", "least_slack", check_clocks),),
)
def deadline_restarts(original: Callable[..., Any], reach: Reach) -> Callable[..., Any]:
    """A deadline counts from the decision instead of the arrival."""

    def slack_ms(view: SessionView, now_ms: float, cost: ExclusiveCost, cached: int = 0) -> float:
        slack = original(view, now_ms, cost, cached)
        if view.emitted == 0 and now_ms > view.request.arrival_ms:
            reach()
            return slack + now_ms - view.request.arrival_ms
        return slack

    return slack_ms


@mutant(
    in_method(Aging, "priority"),
    part="policies",
    killers=(Killer.CONTRACT,),
    trials=(contract_trial("original clocks", "aging", check_clocks),),
)
def aging_reset_by_preemption(original: Callable[..., Any], reach: Reach) -> Callable[..., Any]:
    """A preempted session's age counts from its preemption instead of its arrival."""

    def priority(self: Aging, state: SchedulerState, view: SessionView) -> int:
        restarted = vars(self).setdefault("restarted", {})
        if view.state is SessionState.SUSPENDED:
            restarted.setdefault(view.request_id, state.now_ms)
        aged = original(self, state, view)
        waited = state.now_ms - restarted.get(view.request_id, view.request.arrival_ms)
        young = view.request.priority - int(max(waited, 0.0) // self.quantum_ms)
        if young != aged:
            reach()
        return young

    return priority


@mutant(
    in_method(PlanBuilder, "build"),
    part="policies",
    killers=(Killer.CONTRACT,),
    trials=(contract_trial("logical plans", "fcfs", check_plans),),
)
def plan_holds_cells(original: Callable[..., Any], reach: Reach) -> Callable[..., Any]:
    """A plan says in which cells its rows will lie."""

    def build(self: PlanBuilder) -> Any:
        plan = original(self)
        if plan.chunks:
            reach()
        chunks = tuple(
            ChunkWithCells(c.request_id, c.generation, c.version, c.start, c.stop, (1, 2))
            for c in plan.chunks
        )
        return replace(plan, chunks=chunks)

    return build
