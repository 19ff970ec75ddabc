"""Who gave way, when, and whether the policy's contract allows it, from the records of preemptions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from parity.checkers.checker import Expectation
from parity.history import Run, TraceStep
from parity.records import Finding
from scheduler.flight import ENTRIES
from scheduler.limits import Layout
from scheduler.policies import make_policy
from scheduler.policy.base import Policy
from scheduler.records import Allocation, IntentKind, Phase, Preemption, PreemptionMode, PreemptionReason

CONTRACT = "contract"
IN_ORDER = ("fcfs", "fixed_batch", "orca", "single_lane")  # nobody who waits is overtaken
LACK = (PreemptionReason.NO_CELLS, PreemptionReason.OWN_CELLS_TOO_HIGH)


def preemptions_of(run: Run) -> list[Preemption]:
    """All of them, in order."""
    return [item for traced in run.trace for item in traced.flight.preemptions]


class GivingWayChecker:
    """What every policy owes, and what its reservation promises, in every layout and with every prefix.

    - The victim of a lack of cells is the candidate with the greatest of the policy's scores.
    - A session that is rebuilt lower is its own requester; nobody was chosen.
    - Nobody enters in a step in which somebody gave way for cells, nor without an estimate that fits below
      the soft ceiling and the memory's grant of it.
    - Where the whole need of every running session is kept free, nobody ever lacks cells, and the escalation
      is never needed.
    - Policies that promise it admit in the order of submission; under fcfs the oldest gives way to nobody.
    - A policy that preempts by intent alone rebuilds at most twice the rows that it computes anew.
    """

    name = CONTRACT

    def check(self, run: Run, expectation: Expectation) -> Iterable[Finding]:
        policy = make_policy(run.case.policy, **dict(run.case.policy_options))
        decided = dict.fromkeys(traced.flight.plan.policy for traced in run.trace)
        if any(identity != policy.identity for identity in decided):
            return []  # a brought scheduler that decides by itself owes nobody's contract
        return check_giving_way(run, policy)


def check_giving_way(run: Run, policy: Policy) -> list[Finding]:
    """What ``GivingWayChecker`` looks for, under a policy as it was made."""
    return [Finding(CONTRACT, f"giving way: {problem}") for problem in _problems(run, policy)]


def _problems(run: Run, policy: Policy) -> Iterator[str]:
    lacking: dict[int, list[Preemption]] = {}  # by the decision in which they were found to be needed
    for item in preemptions_of(run):
        if item.reason in LACK:
            lacking.setdefault(item.decision_id, []).append(item)
            yield from _check_victim(item, run.case.layout)
    for traced in run.trace:
        gave_way = lacking.get(traced.flight.plan.decision_id, ())
        entered = [intent.request_id for intent in traced.flight.plan.intents if intent.kind in ENTRIES]
        if gave_way and entered:
            yield f"step {traced.step}: {entered[0]} entered although {gave_way[0].victim} gave way"
        yield from _check_entries(traced)
        if gave_way and policy.reserves_whole_need:
            yield f"step {traced.step}: {gave_way[0].victim} lacked cells that were kept free for it"
    yield from _check_order(run, policy.identity.policy_id)
    if not policy.reserves_whole_need:
        return
    escalations = sum(record.escalations for record in run.records)
    if escalations:
        yield f"{escalations} escalations although all rows to come were kept free"
    yield from _check_rebuilds(run)


def _check_entries(traced: TraceStep) -> Iterator[str]:
    granted = [
        item.request.request_id for item in traced.flight.allocations if item.allocation is Allocation.GRANTED
    ]
    for intent in traced.flight.plan.intents:
        if intent.kind not in ENTRIES:
            continue
        if intent.estimate is None or not intent.estimate.fits:
            yield f"step {traced.step}: {intent.request_id} entered on an estimate of {intent.estimate}"
        if intent.request_id not in granted:
            yield f"step {traced.step}: {intent.request_id} entered without a grant"


def _check_order(run: Run, policy: str) -> Iterator[str]:
    last = -1
    for traced in run.trace if policy in IN_ORDER else ():
        for intent in traced.flight.plan.intents:
            if intent.kind is not IntentKind.ADMIT:
                continue
            index = traced.flight.views[intent.request_id].index
            if index < last:
                yield f"step {traced.step}: {intent.request_id} was overtaken"
            last = max(last, index)
    for item in preemptions_of(run) if policy == "fcfs" else ():
        if item.reason is PreemptionReason.NO_CELLS and item.victim != item.requester:
            if item.scores[item.candidates.index(item.victim)] == min(item.scores):
                yield f"{item.victim} is the oldest and gave way to {item.requester}"


def _check_victim(item: Preemption, layout: Layout) -> Iterator[str]:
    if item.reason is PreemptionReason.OWN_CELLS_TOO_HIGH:
        if layout is not Layout.UNIFIED:
            yield f"{item.victim} was rebuilt lower where cells have no order"
        if item.available_rows < item.wanted_rows:
            yield f"{item.victim} was rebuilt lower, {item.available_rows} of {item.wanted_rows} rows left"
        if item.victim != item.requester:
            yield f"{item.victim} was rebuilt lower for {item.requester}"
        return
    if item.mode is not PreemptionMode.RECOMPUTE or item.victim not in item.candidates:
        yield f"{item.victim} was no candidate of {item.candidates}"
    elif item.scores[item.candidates.index(item.victim)] != max(item.scores):
        yield f"{item.victim} gave way, the policy's scores {item.scores} say another of {item.candidates}"


def _check_rebuilds(run: Run) -> Iterator[str]:
    """Intents of a policy cost at most twice the rows that are computed anew; what was asked from
    outside, or failed, is not counted.
    """
    reasons = {item.reason: None for item in preemptions_of(run)}
    if list(reasons) != [PreemptionReason.POLICY_INTENT]:
        return
    rows = {Phase.REBUILD: 0, Phase.PREFILL: 0, Phase.DECODE: 0}
    for traced in run.trace:
        for item in traced.result.chunks if traced.result is not None else ():
            phase = traced.flight.views[item.request_id].phase_at(item.before)
            rows[phase] += item.after - item.before
    new = rows[Phase.PREFILL] + rows[Phase.DECODE]
    if rows[Phase.REBUILD] > 2 * new:
        yield f"{rows[Phase.REBUILD]} rows were computed again for {new} new ones"
