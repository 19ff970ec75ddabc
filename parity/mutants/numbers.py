"""Mutants of a policy's arithmetic and of the ledgers beside it: each is a number that an earlier version of
this repository had wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from typing import Any

import parity.suites.contracts as contracts_module
import scheduler.policies.orca as orca_module
from parity.checkers.claims import BoundClaim, Observed
from parity.checkers.outcomes import End, Served
from parity.mutants.mutant import Killer, Plant, Reach, mutant
from parity.mutants.policies import contract_trial
from parity.mutants.seam import in_method
from parity.suites.contracts import check_contract
from scheduler.policies.orca import Orca
from scheduler.policies.scorpio_guard import ScorpioGuard
from scheduler.policies.sglang_adder import AdderLimits, SglangAdder
from scheduler.policies.vtc import Counters
from scheduler.policy.base import Policy
from scheduler.policy.plan import PlanBuilder
from scheduler.policy.state import SchedulerState
from scheduler.records import IterationPlan, Refusal, Request


def numbers_mutant(plant: Callable[[Any], Plant], policy: str) -> Callable[[Any], Any]:
    """A mutant that the contract of a policy must kill."""
    trial = contract_trial(f"the contract of {policy}", policy, check_contract)
    return mutant(plant, part="numbers", killers=(Killer.CONTRACT,), trials=(trial,))


@numbers_mutant(in_method(orca_module, "declared_total"), "orca")
def orca_last_token_unreserved(original: Callable[..., Any], reach: Reach) -> Callable[..., Any]:
    """Orca reserves prompt and output less one, the rows of a session, instead of its declared total."""

    def declared_total(request: Request) -> int:
        reach()
        return original(request) - 1

    return declared_total


@numbers_mutant(in_method(Orca, "refuse"), "orca")
def orca_above_its_slots(original: Callable[..., Any], reach: Reach) -> Callable[..., Any]:
    """Orca takes a request whose declared total is more than its slots."""

    def refuse(self: Orca, state: SchedulerState, request: Request) -> Refusal | None:
        answer = Policy.refuse(self, state, request)
        if answer != original(self, state, request):
            reach()
        return answer

    return refuse


@numbers_mutant(in_method(PlanBuilder, "_enter_shard"), "fcfs")
def watermark_forgotten_in_a_burst(original: Callable[..., Any], reach: Reach) -> Callable[..., Any]:
    """The watermark does not hold among sessions that enter an idle server in one step.

    While nobody runs yet, those who entered in the same step do not count.
    """

    def enter(self: PlanBuilder, door: Any, *wish: Any) -> bool:
        hidden = 0
        if self.entered and not self.state.running and self.policy.watermark_rows():
            reach()
            hidden, door.num_sessions = door.num_sessions, 0
        entered = original(self, door, *wish)
        door.num_sessions += hidden
        return entered

    return enter


@numbers_mutant(in_method(ScorpioGuard, "planned"), "scorpio_guard")
def credits_capped_before_paid(original: Callable[..., Any], reach: Reach) -> Callable[..., Any]:
    """Scorpio's credits are cut to one step's worth before the step is paid."""

    def planned(self: ScorpioGuard, state: SchedulerState, plan: IterationPlan) -> Any:
        tightest, chosen = self._tightest(state), [chunk.request_id for chunk in plan.chunks]
        credits = {
            view.request_id: min(self._credit(state, view, tightest), Fraction(1))
            - (view.request_id in chosen)
            for view in self._decodes(state)
        }
        if credits != original(self, state, plan):
            reach()
        return credits

    return planned


@numbers_mutant(in_method(BoundClaim, "verdict"), "vtc")
def gap_not_compared(original: property, reach: Reach) -> Any:
    """A claim of VTC's bound holds whatever the gap is."""

    def verdict(self: BoundClaim) -> str:
        said = original.fget(self)
        if said == "violated":
            reach()
            return "holds"
        return said

    return property(verdict)


@numbers_mutant(in_method(Observed, "waits"), "vtc")
def running_taken_for_backlog(original: Callable[..., Any], reach: Reach) -> Callable[..., Any]:
    """VTC's bound is claimed for clients of which nobody waits."""

    def waits(self: Observed, client_id: str) -> list[tuple[float, float]]:
        spans = self.ledger.backlog(client_id)
        if spans != original(self, client_id):
            reach()
        return spans

    return waits


@numbers_mutant(in_method(AdderLimits, "paged"), "sglang_adder")
def extend_limit_in_tokens(original: Callable[..., Any], reach: Reach) -> Callable[..., Any]:
    """The extend limit of sglang_adder counts tokens instead of whole pages."""

    def paged(self: AdderLimits, rows: int) -> int:
        if original(self, rows) != rows:
            reach()
        return rows

    return paged


@numbers_mutant(in_method(SglangAdder, "_fits"), "sglang_adder")
def request_limit_ignored(original: Callable[..., Any], reach: Reach) -> Callable[..., Any]:
    """sglang_adder puts any number of requests into a batch."""

    def fits(self: SglangAdder, batch: Any, *rest: Any) -> bool:
        said = original(self, replace(batch, requests=0), *rest)
        if said != original(self, batch, *rest):
            reach()
        return said

    return fits


@numbers_mutant(in_method(Counters, "ended"), "vtc")
def departed_clients_kept(original: Callable[..., Any], reach: Reach) -> Callable[..., Any]:
    """VTC keeps the counters of clients that have left for ever."""

    def ended(self: Counters, client: str) -> Counters:
        after = original(self, client)
        if len(after.counters) < len(self.counters):
            reach()
        return replace(after, counters=self.counters)

    return ended


@numbers_mutant(in_method(contracts_module, "served_sessions"), "least_slack")
def rejected_after_the_window(original: Callable[..., Any], reach: Reach) -> Callable[..., Any]:
    """A rejection after the window counts inside it.

    What is rejected after the window has closed counts as rejected within it.
    """

    def served_sessions(run: Any, *, until_ms: float = float("inf")) -> list[Served]:
        whole = {item.session: item for item in original(run) if item.end is End.REJECTED}
        served = original(run, until_ms=until_ms)
        for index, item in enumerate(served):
            if item.end is End.OPEN and item.session in whole:
                reach()
                served[index] = whole[item.session]
        return served

    return served_sessions
