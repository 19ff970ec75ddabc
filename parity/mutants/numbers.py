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
from parity.mutants.policies import contract_trial
from parity.mutants.records import Killer, Mutant, Plant, Reach
from parity.mutants.seam import method_plant
from parity.suites.contracts import check_contract
from scheduler.policies.orca import Orca
from scheduler.policies.scorpio_guard import ScorpioGuard
from scheduler.policies.sglang_adder import AdderLimits, SglangAdder
from scheduler.policies.vtc import Counters
from scheduler.policy.base import Policy
from scheduler.policy.plan import PlanBuilder
from scheduler.policy.state import SchedulerState
from scheduler.records import IterationPlan, Refusal, Request, SessionView

Make = Callable[[Callable[..., Any], Reach], Callable[..., Any]]


def last_token_unreserved(original: Callable[..., Any], reach: Reach) -> Callable[..., Any]:
    def declared_total(request: Request) -> int:
        reach()
        return original(request) - 1

    return declared_total


def no_bound_at_the_door(original: Callable[..., Any], reach: Reach) -> Callable[..., Any]:
    def refuse(self: Orca, state: SchedulerState, request: Request) -> Refusal | None:
        answer = Policy.refuse(self, state, request)
        if answer != original(self, state, request):
            reach()
        return answer

    return refuse


def watermark_of_the_idle(original: Callable[..., Any], reach: Reach) -> Callable[..., Any]:
    """While nobody runs yet, those who entered in the same step do not count."""

    def enter(self: PlanBuilder, view: SessionView, **named: Any) -> bool:
        hidden: list[SessionView] = []
        if self.entered and not self.state.running and self.policy.watermark_rows():
            reach()
            hidden, self.entered = self.entered, []
        entered = original(self, view, **named)
        self.entered = hidden + self.entered
        return entered

    return enter


def capped_before_paid(original: Callable[..., Any], reach: Reach) -> Callable[..., Any]:
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


def any_gap_holds(original: property, reach: Reach) -> Any:
    def verdict(self: BoundClaim) -> str:
        said = original.fget(self)
        if said == "violated":
            reach()
            return "holds"
        return said

    return property(verdict)


def what_runs_is_backlog(original: Callable[..., Any], reach: Reach) -> Callable[..., Any]:
    def waits(self: Observed, client_id: str) -> list[tuple[float, float]]:
        spans = self.ledger.backlog(client_id)
        if spans != original(self, client_id):
            reach()
        return spans

    return waits


def tokens_not_pages(original: Callable[..., Any], reach: Reach) -> Callable[..., Any]:
    def paged(self: AdderLimits, rows: int) -> int:
        if original(self, rows) != rows:
            reach()
        return rows

    return paged


def requests_uncounted(original: Callable[..., Any], reach: Reach) -> Callable[..., Any]:
    def fits(self: SglangAdder, batch: Any, *rest: Any) -> bool:
        said = original(self, replace(batch, requests=0), *rest)
        if said != original(self, batch, *rest):
            reach()
        return said

    return fits


def everybody_is_remembered(original: Callable[..., Any], reach: Reach) -> Callable[..., Any]:
    def ended(self: Counters, client: str) -> Counters:
        after = original(self, client)
        if len(after.counters) < len(self.counters):
            reach()
        return replace(after, counters=self.counters)

    return ended


def rejected_before_its_time(original: Callable[..., Any], reach: Reach) -> Callable[..., Any]:
    """What is rejected after the window has closed counts as rejected within it."""

    def served_sessions(run: Any, *, until_ms: float = float("inf")) -> list[Served]:
        whole = {item.session: item for item in original(run) if item.end is End.REJECTED}
        served = original(run, until_ms=until_ms)
        for index, item in enumerate(served):
            if item.end is End.OPEN and item.session in whole:
                reach()
                served[index] = whole[item.session]
        return served

    return served_sessions


def _mutant(name: str, fault: str, plant: Plant, policy: str) -> Mutant:
    trial = contract_trial(f"the contract of {policy}", policy, check_contract)
    return Mutant(
        name=name, fault=fault, part="numbers", killers=(Killer.CONTRACT,), plant=plant, trials=(trial,)
    )


MUTANTS = (
    _mutant(
        "orca_last_token_unreserved",
        "Orca reserves prompt and output less one, the rows of a session, instead of its declared total.",
        method_plant(orca_module, "declared_total", last_token_unreserved),
        "orca",
    ),
    _mutant(
        "orca_above_its_slots",
        "Orca takes a request whose declared total is more than its slots.",
        method_plant(Orca, "refuse", no_bound_at_the_door),
        "orca",
    ),
    _mutant(
        "watermark_forgotten_in_a_burst",
        "The watermark does not hold among sessions that enter an idle server in one step.",
        method_plant(PlanBuilder, "enter", watermark_of_the_idle),
        "fcfs",
    ),
    _mutant(
        "credits_capped_before_paid",
        "Scorpio's credits are cut to one step's worth before the step is paid.",
        method_plant(ScorpioGuard, "planned", capped_before_paid),
        "scorpio_guard",
    ),
    _mutant(
        "gap_not_compared",
        "A claim of VTC's bound holds whatever the gap is.",
        method_plant(BoundClaim, "verdict", any_gap_holds),
        "vtc",
    ),
    _mutant(
        "running_taken_for_backlog",
        "VTC's bound is claimed for clients of which nobody waits.",
        method_plant(Observed, "waits", what_runs_is_backlog),
        "vtc",
    ),
    _mutant(
        "extend_limit_in_tokens",
        "The extend limit of sglang_adder counts tokens instead of whole pages.",
        method_plant(AdderLimits, "paged", tokens_not_pages),
        "sglang_adder",
    ),
    _mutant(
        "request_limit_ignored",
        "sglang_adder puts any number of requests into a batch.",
        method_plant(SglangAdder, "_fits", requests_uncounted),
        "sglang_adder",
    ),
    _mutant(
        "departed_clients_kept",
        "VTC keeps the counters of clients that have left for ever.",
        method_plant(Counters, "ended", everybody_is_remembered),
        "vtc",
    ),
    _mutant(
        "rejected_after_the_window",
        "A rejection after the window counts inside it.",
        method_plant(contracts_module, "served_sessions", rejected_before_its_time),
        "least_slack",
    ),
)
