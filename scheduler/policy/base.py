"""The seams of a policy (ordering, admission, batching, preemption, overload) and
the default behind each: FCFS.

A policy is pure: it reads a ``SchedulerState`` and returns a plan. What it must remember between
decisions is a value that the loop keeps for it (``start``, ``observe``, ``planned``) and hands
back as ``state.policy_memory``.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

from scheduler.limits import StepLimits
from scheduler.policy.contract import Contract
from scheduler.policy.overload import QUEUE, Overload
from scheduler.policy.plan import PlanBuilder
from scheduler.policy.reservation import MAXIMUM, Reservation
from scheduler.policy.state import SchedulerState
from scheduler.records import (
    IterationPlan,
    Phase,
    PolicyIdentity,
    Refusal,
    Request,
    SessionState,
    SessionView,
)


class Policy:
    """FCFS continuous batching: running decodes, then what they left of the budget
    to prefills, then new sessions.

    Subclasses override single seams. ``identity`` and ``contract`` are part of
    every plan and of the registry.
    """

    identity: ClassVar[PolicyIdentity] = PolicyIdentity("fcfs")
    contract: ClassVar[Contract]

    def __init__(self, *, reservation: Reservation = MAXIMUM, overload: Overload = QUEUE) -> None:
        self.reservation, self.overload = reservation, overload

    def check_limits(self, steps: StepLimits, *, max_session_tokens: int) -> None:
        """Raise ValueError for limits of the step, or of a session's prompt and output together, that
        contradict the policy or each other.
        """

    # -- memory of the policy

    def start(self) -> Any:
        """The policy's memory before the first decision: an immutable value."""
        return None

    def observe(self, memory: Any, event: str, view: SessionView, now_ms: float, amount: int = 0) -> Any:
        """The policy's memory after an event.

        Events: ``submitted``, ``admitted``, ``resumed``, ``preempted``, ``prefilled`` and ``decoded``
        (``amount`` completed rows), ``rebuilt``, ``emitted``, ``finished``, ``cancelled``, ``failed``.
        """
        return memory

    def planned(self, state: SchedulerState, plan: IterationPlan) -> Any:
        """The policy's memory after its plan was accepted.

        A plan is an intent: no service is charged here.
        """
        return state.policy_memory

    def published_service(self, memory: Any) -> dict[str, int] | None:
        """Service by client that the policy claims was completed, or None if it claims nothing."""
        return None

    # -- overload

    def refuse(self, state: SchedulerState, request: Request) -> Refusal | None:
        """The answer to a request that is turned away at the door, or None.

        The loop bounds the queue and refuses what the pool could never hold.
        """
        return self.overload.refuse(state, request)

    def rejects(self, state: SchedulerState, view: SessionView) -> str | None:
        """Why a waiting session is given up, or None."""
        return self.overload.rejects(state, view)

    # -- ordering

    def order_key(self, state: SchedulerState, view: SessionView) -> tuple:
        """Comparable key; a plan lists its chunks in increasing order of it."""
        if view.state is SessionState.RUNNING:
            return (0 if view.phase is Phase.DECODE else 1, view.index)
        return (2 if view.state is SessionState.SUSPENDED else 3, view.index)

    def waiting_order(self, state: SchedulerState) -> Iterable[SessionView]:
        """Waiting sessions in the order in which they are considered; the
        default is submission order, lazily.
        """
        return (state.views[request_id] for request_id in state.waiting)

    # -- admission

    def future_rows(self, state: SchedulerState, view: SessionView) -> int:
        """Rows that the policy keeps free for a session beyond those it has now;
        the default is its whole need.
        """
        if self.reservation is MAXIMUM:
            return view.future_rows
        return self.reservation.future_rows(view)

    @property
    def reserves_whole_need(self) -> bool:
        """Whether admission keeps free all rows that running sessions may still write, so that none of them
        ever lacks a cell: in every layout, beside any prefix.
        """
        return self.reservation.kind == "maximum"

    def reserved_rows(self, state: SchedulerState, plan: PlanBuilder) -> int:
        """Available rows that an entering session may not take; asked once a
        plan, when somebody wants to enter.
        """
        return sum(self.future_rows(state, state.views[request_id]) for request_id in state.running)

    def watermark_rows(self) -> int:
        """Rows that admission leaves free unless nobody else runs: the soft ceiling
        lies so far below the hard one.
        """
        return self.reservation.watermark_rows

    def keeps_scanning(self, state: SchedulerState, view: SessionView) -> bool:
        """Whether the scan goes on past a session that does not fit; the default stops: nobody is overtaken.

        One that is not ready waits for a foreign owner, not for room, so it blocks nobody.
        """
        return not view.ready

    def can_run(self, state: SchedulerState, view: SessionView) -> bool:
        """Whether a live session could run if it had the pool to itself: one that waits for a foreign owner
        cannot, and its waiting is no lack of progress.
        """
        return view.ready

    # -- batching

    def chunk_tokens(self, state: SchedulerState, view: SessionView, available: int) -> int:
        """Tokens that one session gets of ``available`` in this step; 0 leaves it out."""
        return available

    def plan_iteration(self, state: SchedulerState) -> IterationPlan:
        """One step's plan: running sessions by key, then suspended ones, then waiting ones while they fit."""
        plan = PlanBuilder(state, self)
        views = state.views
        running = sorted(
            (self.order_key(state, view), view.index, view) for view in map(views.__getitem__, state.running)
        )
        for key, _, view in running:
            plan.add(view, key=key)
        self.fill(
            plan, sorted(map(views.__getitem__, state.suspended), key=lambda v: self.order_key(state, v))
        )
        if not plan.closed:
            self.fill(plan, plan.while_open(self.waiting_order(state)))
        return plan.build()

    def fill(self, plan: PlanBuilder, views: Iterable[SessionView]) -> None:
        """Consider sessions in the given order: running ones get a chunk, others
        enter until the scan is closed.
        """
        state = plan.state
        for view in views:
            if view.state is SessionState.RUNNING:
                plan.add(view)
                continue
            if plan.closed:
                continue
            reason = self.rejects(state, view) if view.state is SessionState.WAITING else None
            if reason is not None:
                plan.reject(view, reason)
            elif not plan.enter(view) and not self.keeps_scanning(state, view):
                plan.closed = True

    # -- preemption

    victim_tie_break: ClassVar[str] = "none needed: numbers of submission differ"

    def victim_key(self, state: SchedulerState, view: SessionView) -> tuple:
        """Score inputs of a candidate for giving way, comparable; the greatest is the victim. They are
        recorded with every preemption. The default is the number of submission: the newest.
        """
        return (view.index,)

    def choose_victim(self, state: SchedulerState, requester: SessionView) -> str | None:
        """Who gives up its rows for ``requester``: a running session, possibly
        itself; None parks the requester.

        The default takes the greatest ``victim_key``, the requester's own included: whoever comes last waits.
        """
        running = map(state.views.__getitem__, state.running)
        return max(running, key=lambda view: self.victim_key(state, view)).request_id

    def unwind(self, plan: IterationPlan, blocked: int, victim: str | None) -> list[str]:
        """Who leaves the plan when the rows of chunk ``blocked`` cannot be had and
        ``victim`` was suspended for it.
        """
        return [plan.chunks[blocked].request_id if victim is None else victim]
