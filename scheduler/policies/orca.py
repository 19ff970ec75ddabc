"""``orca``: iteration-level first come, first served with whole reservations
(ORCA, OSDI 2022, Algorithm 1).
"""

from __future__ import annotations

from scheduler.policy.base import PlanBuilder, Policy
from scheduler.policy.contract import CELLS, HIDDEN_LENGTH, TOKENS, Contract
from scheduler.policy.overload import QUEUE, Overload
from scheduler.policy.state import SchedulerState
from scheduler.records import IterationPlan, PolicyIdentity, Refusal, Request, SessionState, SessionView


class Orca(Policy):
    """``Select``: sessions by arrival; a first selection reserves the declared total, prompt and
    ``max_tokens``; stop at the first misfit.

    ``n_rsrv`` is the sum of the reservations of sessions that were selected before and have not ended,
    suspended ones included; ``slots`` (default: as many rows as the pool has) bounds it. A request above
    ``slots`` is refused at the door; one that takes the whole pool by the default, whose last token needs
    no row, reserves it whole. A prompt runs in one iteration unless it exceeds the token budget or the
    memory asks for a stop within it.
    """

    identity = PolicyIdentity("orca")
    contract = Contract(
        scheduling_unit="one model iteration of each selected request",
        protected_identity="request, in order of arrival",
        visible_state=("arrival", "phase", "declared maximum", "reserved slots"),
        decision="the batch of the next iteration: at most max_num_seqs requests",
        unknown_future=HIDDEN_LENGTH + ": max_tokens is reserved at first selection and kept to the end",
        objective="no deadlock for lack of K/V slots, no older request overtaken",
        metric="reserved slots",
        denominator="slots of the pool",
        assumptions=(
            "prompt + max_tokens bounds the rows of a request",
            "nothing is preempted by this policy",
        ),
        foreign_owners=(CELLS, TOKENS),
        not_reproduced=(
            "pipelining of n_workers batches",
            "selective batching: the engine's",
            "prefix sharing lowers no reservation",
            "prompts longer than the token budget, which are cut",
        ),
        starvation_free=True,
        progress="everybody: the oldest misfit stops the scan until it fits",
        source="ORCA, Algorithm 1; M5.2 0x03",
    )

    def __init__(self, *, slots: int | None = None, overload: Overload = QUEUE) -> None:
        super().__init__(overload=overload)
        if slots is not None and slots < 1:
            raise ValueError(f"{slots} slots: must be at least 1")
        self.slots = slots

    def refuse(self, state: SchedulerState, request: Request) -> Refusal | None:
        total = declared_total(request)
        if self.slots is not None and total > self.slots:
            why = f"declares {total} tokens in all, the policy has {self.slots} slots"
            return Refusal(request.request_id, why, False, total, self.slots)
        return super().refuse(state, request)

    def order_key(self, state: SchedulerState, view: SessionView) -> tuple:
        return (view.request.arrival_ms, view.index)

    def future_rows(self, state: SchedulerState, view: SessionView) -> int:
        return view.future_rows

    def plan_iteration(self, state: SchedulerState) -> IterationPlan:
        plan = PlanBuilder(state, self)
        slots = state.memory.total_rows() if self.slots is None else self.slots
        selected = (*state.running, *state.suspended)
        reserved = sum(min(declared_total(state.views[name].request), slots) for name in selected)
        eligible = sorted(
            (view for view in state.views.values() if view.ready),
            key=lambda view: self.order_key(state, view),
        )
        for view in eligible:
            if plan.closed and view.state is not SessionState.RUNNING:
                continue  # a misfit stops entries behind it, not those who hold what it waits for
            if view.state is SessionState.RUNNING:
                if not self._whole(state, view, view.computed, plan) or not plan.add(view):
                    break
                continue
            reason = self.rejects(state, view) if view.state is SessionState.WAITING else None
            if reason is not None:
                plan.reject(view, reason)
                continue
            new = min(declared_total(view.request), slots) if view.state is SessionState.WAITING else 0
            fits = reserved + new <= slots
            fits = fits and self._whole(state, view, plan.cached_tokens(view), plan)
            if not fits or not plan.enter(view):
                plan.closed = True
                continue
            reserved += new
        return plan.build()

    def _whole(self, state: SchedulerState, view: SessionView, start: int, plan: PlanBuilder) -> bool:
        """Whether the rows up to the phase's end can go in this plan, or could never go in one plan."""
        rows = max(view.committed, view.num_prompt_tokens if view.emitted == 0 else 0) - start
        most = min(state.max_num_batched_tokens, state.max_chunk_tokens)
        return rows > most or rows <= plan.tokens_left


def declared_total(request: Request) -> int:
    """The paper's ``max_tokens``: prompt and output together, of which the last needs no row."""
    return len(request.prompt) + request.max_tokens
