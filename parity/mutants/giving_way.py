"""Mutants of room, progress and victims: who may enter together, what is getting further, who gives way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from parity.cases.strategies import tokens_of
from parity.mutants.cases import case_of, session
from parity.mutants.mutant import Complaint, Killer, Reach, Trial, mutant
from parity.mutants.seam import in_method
from parity.mutants.trials import exact_trial
from parity.records import Case, Session
from parity.run.runner import replay
from scheduler.limits import Layout
from scheduler.loop import Scheduler
from scheduler.memory import Blocked, Memory
from scheduler.policies.fcfs import Fcfs
from scheduler.policies.vllm_priority import VllmPriority
from scheduler.policy.base import Policy
from scheduler.policy.plan import PlanBuilder
from scheduler.policy.state import SchedulerState
from scheduler.records import IterationPlan, Phase, SessionView
from scheduler.telemetry import StepRecord


def high_prefix(family: str, **settings: Any) -> Case:
    """Two followers share a prefix above which there are cells for one of them: four rows each to come beyond
    the shared four, in a pool of 18 of which most lies below.
    """
    tail = tokens_of(160, 4)
    sessions = (
        session(158, 4, 1),
        session(159, 4, 1),
        Session(prompt=(*tail, 12), max_tokens=1),
        Session(prompt=(*tail, 44), max_tokens=4, arrival_step=2),
        Session(prompt=(*tail, 54), max_tokens=4, arrival_step=2),
    )
    settings = {
        "pool_cells": 18,
        "num_sequences": 12,
        "max_num_seqs": 4,
        "prefix_block_tokens": 4,
        **settings,
    }
    return case_of(family, sessions, **settings)


def by_priority(layout: Layout) -> Case:
    """Three sessions of 8 tokens and 20 outputs in 47 cells, the oldest of them the least favoured."""
    sessions = tuple(session(140 + i, 8, 20, priority=p) for i, p in enumerate((9, 1, 5)))
    return case_of(
        "llama", sessions, pool_cells=47, policy="vllm_priority", prefix_cache=False, layout=layout
    )


class TakingTurns(Fcfs):
    """A policy that suspends every session before its next new row: nothing is ever done but rebuilds."""

    def plan_iteration(self, state: SchedulerState) -> IterationPlan:
        plan = PlanBuilder(state, self)
        for request_id in state.running:
            view = state.views[request_id]
            if view.phase is Phase.REBUILD:
                plan.add(view)
            else:
                plan.preempt(view, "the next one's turn")
        self.fill(plan, [state.views[request_id] for request_id in (*state.suspended, *state.waiting)])
        return plan.build()


def play_taking_turns() -> tuple[Complaint, ...]:
    """Two sessions under a policy that gets nothing done: the scheduler must end them all the same."""
    case = case_of("llama", (session(161, 3, 3), session(162, 3, 3)), prefix_cache=False, pool_cells=12)
    run = replay(case, TakingTurns()).run
    return tuple(Complaint(Killer.LIVENESS, problem) for problem in run.problems)


@mutant(
    in_method(Scheduler, "_rows_to_come"),
    part="admission",
    killers=(Killer.CONTRACT, Killer.LIVENESS),
    trials=(exact_trial(high_prefix("falcon_h1")), exact_trial(high_prefix("qwen3next"))),
)
def each_admitted_alone(original: Callable[..., Any], reach: Reach) -> Callable[..., Any]:
    """Each session that shares is admitted as if it had the cells above its prefix to itself."""

    def rows_to_come(self: Scheduler) -> dict[str, int]:
        rows = original(self)
        if rows:
            reach()
        return {}

    return rows_to_come


@mutant(
    in_method(Scheduler, "_judge_progress"),
    part="progress",
    killers=(Killer.LIVENESS,),
    trials=(Trial(name="a policy that gets nothing done", run=play_taking_turns),),
)
def resume_is_progress(original: Callable[..., Any], reach: Reach) -> Callable[..., Any]:
    """A resume counts as progress, so that sessions may take turns for ever."""

    def judge(self: Scheduler, record: StepRecord, *, progressed: bool, rebuilt: int, now_ms: float) -> None:
        if record.resumed and not progressed:
            reach()
        original(self, record, progressed=progressed or record.resumed > 0, rebuilt=rebuilt, now_ms=now_ms)

    return judge


@mutant(
    in_method(Memory, "place"),
    part="preemption",
    killers=(Killer.CONTRACT,),
    trials=tuple(exact_trial(by_priority(layout)) for layout in (Layout.STOCK,)),
)
def blocked_session_is_the_victim(original: Callable[..., Any], reach: Reach) -> Callable[..., Any]:
    """The session whose rows found no cells gives way, and the policy is not asked.

    The rows that earlier chunks of the step take are counted as left, so that the blocked session seems to
    have cells enough and gives way itself.
    """

    def place(self: Memory, chunks: Any) -> Blocked | None:
        blocked = original(self, chunks)
        if blocked is None:
            return None
        left = min(pool.num_available() for pool in self.pools)
        if left >= blocked.rows > blocked.available:
            reach()
        return blocked._replace(available=left)

    return place


@mutant(
    in_method(VllmPriority, "choose_victim"),
    part="preemption",
    killers=(Killer.CONTRACT,),
    trials=tuple(exact_trial(by_priority(layout)) for layout in (Layout.UNIFIED, Layout.STOCK)),
)
def newest_is_the_victim(original: Callable[..., Any], reach: Reach) -> Callable[..., Any]:
    """The newest session gives way whatever the policy says."""

    def choose_victim(self: VllmPriority, state: SchedulerState, requester: SessionView) -> str:
        newest = max((state.views[name] for name in state.running), key=lambda view: view.index).request_id
        if newest != original(self, state, requester):
            reach()
        return newest

    return choose_victim


@mutant(
    in_method(Policy, "waiting_order"),
    part="admission",
    killers=(Killer.CONTRACT,),
    trials=(exact_trial(case_of("llama", tuple(session(170 + i, 4, 3) for i in range(3)), max_num_seqs=1)),),
)
def head_of_the_queue_overtaken(original: Callable[..., Any], reach: Reach) -> Callable[..., Any]:
    """Under fcfs the newest waiting session enters first."""

    def waiting_order(self: Policy, state: SchedulerState) -> list[SessionView]:
        waiting = list(original(self, state))
        if len(waiting) > 1:
            reach()
        return waiting[::-1]

    return waiting_order
