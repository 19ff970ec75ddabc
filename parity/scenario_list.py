"""All scenario templates by their ids, with the marks that each must hit: a template
that hits none proves nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hypothesis import strategies as st

from parity import scenarios, scenarios_pressure
from parity.families import load_family
from parity.records import Case
from parity.scenarios import Place
from scheduler.limits import Layout

BOTH = (Layout.UNIFIED, Layout.STREAMS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One template: ``cases`` draws from it, ``marks`` are what some of its cases must exercise."""

    name: str
    title: str
    cases: Callable[[Place], st.SearchStrategy[Case]]
    marks: tuple[str, ...]
    layouts: tuple[Layout, ...] = BOTH
    on_exact: bool = True
    policy: str | None = None  # the policy that it is about, if there is one

    def at(
        self, family: str, layout: Layout = Layout.UNIFIED, *, policy: str | None = None
    ) -> st.SearchStrategy[Case]:
        """Its cases for one family and layout, under ``policy``, its own policy or FCFS."""
        load_family(family)
        return self.cases(Place(family=family, layout=layout, policy=policy or self.policy or "fcfs"))


def _scenario(name: str, cases: Callable[[Place], st.SearchStrategy[Case]], *marks: str, **more) -> Scenario:
    title = (cases.__doc__ or "").partition(": ")[2].split(";")[0].rstrip(".")
    return Scenario(name=name, title=title, cases=cases, marks=marks, **more)


SCENARIOS: tuple[Scenario, ...] = (
    _scenario("S1", scenarios.identical_prompts, "concurrent", "shared"),
    _scenario("S2", scenarios.reused_ids, "id_reused", "cancelled", "mixed_step"),
    _scenario("S3", scenarios.alternating_steps, "preempted", "resumed"),
    _scenario("S4", scenarios.edited_prompts, "shared", "chunked"),
    _scenario("S5", scenarios.donors, "shared", "chunked", "cancelled", "cancelled_in_flight"),
    _scenario("S6", scenarios.chunk_grid, "chunked", "one_token_chunk", "mixed_step"),
    _scenario("S7", scenarios.mixed_steps, "mixed_step", "chunked", "concurrent"),
    _scenario("S8", scenarios.forced_preemptions, "preempted", "resumed", "rebuilt"),
    _scenario("S9", scenarios_pressure.cancellations, "cancelled", "cancelled_in_flight", "preempted"),
    _scenario("S10", scenarios_pressure.full_pools, "pool_full", "refused", layouts=(Layout.UNIFIED,)),
    _scenario("S11", scenarios_pressure.contention, "mixed_step", "chunked", policy="aging"),
    _scenario(
        "S13", scenarios_pressure.stages, "mixed_step", "chunked", on_exact=False, layouts=(Layout.UNIFIED,)
    ),
    _scenario("S14", scenarios_pressure.failures, "engine_failed", "rebuilt"),
    _scenario("S15", scenarios_pressure.past_the_window, "concurrent"),
)  # S12 is no case of the scheduler: ``parity.state_checks`` runs it
