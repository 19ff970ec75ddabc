"""Campaigns: cases explored from a seed, in batches that any ``concurrent.futures.Executor`` can run.

Batch number b of a seed holds the same cases on every machine and for every number of jobs or shards; shard I
of N takes the batches with b % N == I - 1.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings

from parity.contained import run_case
from parity.records import Case, FaultKind, Outcome, Verdict
from parity.rerun import Rerun
from parity.scenario_list import SCENARIOS
from parity.signature import fault_signature
from parity.steady import steady_backend
from parity.strategies import FEATURES, cases, landmark
from scheduler.limits import Layout
from scheduler.policies import policy_names

BATCH_CASES = 12
DEFAULT_LAYOUTS = (Layout.UNIFIED, Layout.STREAMS)
FEATURE_PAIRS = tuple(combinations(FEATURES, 2))
_KIND_OF_FEATURE = {
    "cancel": {FaultKind.CANCEL},
    "preempt": {FaultKind.PREEMPT},
    "failures": {FaultKind.DECODE_ERROR, FaultKind.NO_SLOT, FaultKind.WORKER_KILLED, FaultKind.OUT_OF_MEMORY},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a campaign explores. Families take turns; layout, policy and template are drawn.

    No ``policies`` are all of them, and then a template that is about a policy keeps it.
    """

    families: tuple[str, ...]
    policies: tuple[str, ...] = ()
    layouts: tuple[Layout, ...] = DEFAULT_LAYOUTS
    seed: int = 0
    exact: bool = False
    mutant: str | None = None

    def batch(self, number: int) -> dict[str, Any]:
        """The order for batch ``number``: JSON-able, so that it can be sent anywhere."""
        rng = random.Random(f"{self.seed}/{number}")
        layout = rng.choice(self.layouts)
        templates = [s for s in SCENARIOS if layout in s.layouts and (s.on_exact or not self.exact)]
        # Every other batch is general: templates are narrow on purpose.
        template = rng.choice(templates) if rng.random() < 0.5 else None
        drawn = rng.choice(self.policies or policy_names())
        own = template.policy if template is not None and not self.policies else None
        return {
            "number": number,
            "seed": self.seed,
            "family": self.families[number % len(self.families)],
            "layout": layout.value,
            "policy": own or drawn,
            "template": template.name if template is not None else "",
            "exact": self.exact,
            "mutant": self.mutant,
        }


def draw_batch(order: dict[str, Any]) -> list[Case]:
    """The cases of a batch: the same for the same order, whatever ran before."""
    family, layout, policy = order["family"], Layout(order["layout"]), order["policy"]
    drawn: list[Case] = []
    if order["template"]:
        scenario = next(s for s in SCENARIOS if s.name == order["template"])
        strategy = scenario.at(family, layout, policy=policy)
    else:
        strategy = cases(family, layout, policy=policy)
        drawn.append(landmark(family, layout, policy=policy))

    @seed(order["seed"] * 1_000_003 + order["number"])
    @settings(
        max_examples=BATCH_CASES,
        deadline=None,
        database=None,
        backend=steady_backend(),
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def take(case: Case) -> None:
        if case not in drawn:
            drawn.append(case)

    take()
    return drawn


def run_batch(order: dict[str, Any]) -> dict[str, Any]:
    """Draw and run a batch; what an executor is given. JSON-able in and out.

    ``failures`` holds, per failing case, its text, its signature, the first thing that was wrong, and
    the last that its worker said.
    """
    marks: dict[str, int] = {}
    pairs: dict[str, int] = {}
    failures: list[dict[str, Any]] = []
    drawn = draw_batch(order)
    sessions = 0
    for case in drawn:
        outcome = _run(case, order)
        sessions += outcome.sessions
        for name, count in outcome.marks.items():
            marks[name] = marks.get(name, 0) + count
        for pair in combinations(features_of(case), 2):
            name = "+".join(pair)
            pairs[name] = pairs.get(name, 0) + 1
        if outcome.verdict is Verdict.FAIL:
            failures.append(
                {
                    "case": case.to_json(),
                    "signature": list(fault_signature(outcome)),
                    "text": first_complaint(outcome),
                    "stderr": outcome.stderr,
                }
            )
    return {
        "number": order["number"],
        "cases": len(drawn),
        "sessions": sessions,
        "marks": marks,
        "pairs": pairs,
        "failures": failures,
    }


def _run(case: Case, order: dict[str, Any]) -> Outcome:
    if not order["exact"]:
        return run_case(case, mutant=order["mutant"])
    return Rerun(exact=True, mutant=order["mutant"])(case)


def features_of(case: Case) -> list[str]:
    """Which features a case has, in the order of ``FEATURES``, read off the case."""
    sessions = case.sessions
    need = sum(len(session.prompt) + session.max_tokens - 1 for session in sessions)
    longest = max(len(session.prompt) + session.max_tokens - 1 for session in sessions)
    room = longest if case.layout is Layout.STREAMS else need
    kinds = {fault.kind for fault in case.faults}
    has = {
        "shared": case.prefix_cache and _share(sessions),
        "arrivals": any(session.arrival_step for session in sessions),
        "tight_pool": case.pool_cells <= room,
        "few_lanes": case.max_num_seqs <= 3,
        "seeded": any(session.sampling.temperature for session in sessions),
        "stops": any(session.stop_token_ids for session in sessions),
        **{feature: bool(kinds & some) for feature, some in _KIND_OF_FEATURE.items()},
    }
    return [feature for feature in FEATURES if has[feature]]


def _share(sessions: Sequence[Any]) -> bool:
    first = [session.prompt[0] for session in sessions]
    return len(set(first)) < len(first)


def first_complaint(outcome: Outcome) -> str:
    """One line: the first thing that was wrong."""
    if outcome.crashed:
        return f"crash: {outcome.reason}"
    if outcome.problems:
        return outcome.problems[0]
    if outcome.divergences:
        first = outcome.divergences[0]
        return f"session {first.session} differs from its token {first.step} on"
    return outcome.reason
