"""Verdict by cause: what kind of fault made a case fail, from evidence that is gathered by running it again.

Evidence: margins, how far logits moved, the cell map, the session alone with the same chunk boundaries, the
case with its neighbours taken away one by one.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from parity.campaign.rerun import Rerun
from parity.cases.shrink import fault_signature, first_divergence, moved_by_rounding, without_sessions
from parity.checkers.ends import REPRODUCIBILITY
from parity.models.families import load_family
from parity.records import Case, Divergence, FaultKind, Outcome, Verdict


class Cause(Enum):
    """Kinds of fault."""

    NEAR_TIE = "near-tie"
    LAYOUT_NOISE = "layout noise"
    BLEED = "cross-session bleed"
    STATE_FAULT = "state fault"
    SCHEDULING_FAULT = "scheduling fault"
    ENGINE_CRASH = "engine crash"
    NOT_REPRODUCIBLE = "not reproducible"


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """``neighbours`` is the smallest set of other sessions found with which ``session`` still goes wrong.

    ``step`` counts its generated tokens, ``scheduler_step`` the scheduler's; None where no session diverged.
    """

    cause: Cause
    evidence: tuple[str, ...]
    session: int | None = None
    step: int | None = None
    scheduler_step: int | None = None
    neighbours: tuple[int, ...] = ()


def diagnose(case: Case, run: Rerun) -> Diagnosis | None:
    """Run a case again and again until its cause is known; None if it passes."""
    outcome = run(case)
    if outcome.verdict is Verdict.PASS:
        return None
    if outcome.crashed:
        return Diagnosis(cause=Cause.ENGINE_CRASH, evidence=(outcome.reason, *_last_lines(outcome.stderr)))
    again = run(case)
    unstable = any(finding.checker == REPRODUCIBILITY for finding in outcome.findings)
    if unstable or _facts(again) != _facts(outcome):
        return Diagnosis(
            cause=Cause.NOT_REPRODUCIBLE, evidence=(*outcome.problems, "two runs of the case differ")
        )
    if outcome.problems or not outcome.divergences:
        return Diagnosis(cause=Cause.SCHEDULING_FAULT, evidence=outcome.problems or (outcome.reason,))
    return _diagnose_divergence(case, first_divergence(outcome), run)


def _facts(outcome: Outcome) -> tuple:
    return fault_signature(outcome), tuple((d.session, d.step, d.actual_token) for d in outcome.divergences)


def _last_lines(text: str) -> tuple[str, ...]:
    return tuple(text.strip().splitlines()[-3:])


def _diagnose_divergence(case: Case, first: Divergence, run: Rerun) -> Diagnosis:
    neighbours = minimal_neighbours(case, first.session, run)
    others = set(range(len(case.sessions))) - {first.session}
    alone = without_sessions(case, others)
    boundaries = run(alone, first.chunks)
    evidence = [
        f"session {first.session} differs first at its token {first.step}, "
        f"scheduler step {first.scheduler_step}",
        f"logits moved by {first.distance:.3g}, reference margin {first.margin:.3g}",
        "alone with the same chunk boundaries it "
        + ("is right" if not boundaries.divergences else "is wrong too"),
        f"needs beside it: {f'sessions {list(neighbours)}' if neighbours else 'nobody'}",
    ]
    if len(first.distances) > 1:
        evidence.append(f"distance over steps: {', '.join(f'{moved:.3g}' for moved in first.distances)}")
    disorder = [(a, b) for a, b in zip(first.cells, first.cells[1:], strict=False) if 0 <= b <= a]
    if disorder:
        evidence.append(f"its cells are out of order: {disorder[0][1]} after {disorder[0][0]}")
    cause = _cause_of(case, first, bool(disorder), neighbours, alone_is_wrong=bool(boundaries.divergences))
    return Diagnosis(
        cause=cause,
        evidence=tuple(evidence),
        session=first.session,
        step=first.step,
        scheduler_step=first.scheduler_step,
        neighbours=neighbours,
    )


def _cause_of(
    case: Case, first: Divergence, disorder: bool, neighbours: tuple[int, ...], *, alone_is_wrong: bool
) -> Cause:
    """The rules, in order of what proves most."""
    rounding = moved_by_rounding(first)
    if rounding and first.expected_token != first.actual_token and first.margin <= 2 * first.distance:
        return Cause.NEAR_TIE
    same_token = first.expected_token == first.actual_token
    hybrid = load_family(case.family).is_hybrid
    if disorder or rounding or (alone_is_wrong and same_token and not hybrid):
        return Cause.LAYOUT_NOISE  # without a state, one session alone can only differ by which kernel ran
    replayed = any(start == 0 for start, _ in first.chunks[1:]) or any(
        fault.kind is FaultKind.PREEMPT and fault.session == first.session for fault in case.faults
    )
    taken_over = bool(first.chunks) and first.chunks[0][0] > 0
    if alone_is_wrong or not neighbours:
        return Cause.STATE_FAULT
    if hybrid and (taken_over or set(neighbours) - set(first.neighbours)):
        return Cause.STATE_FAULT  # what it went on from was left by somebody who is gone, or was shared
    return Cause.STATE_FAULT if replayed and not taken_over and not first.neighbours else Cause.BLEED


def minimal_neighbours(case: Case, session: int, run: Rerun) -> tuple[int, ...]:
    """Other sessions that ``session`` needs to go wrong; found by taking them away one by one."""
    kept = [index for index in range(len(case.sessions)) if index != session]
    if still_wrong(case, session, [], run):
        return ()
    for index in list(kept):
        fewer = [other for other in kept if other != index]
        if still_wrong(case, session, fewer, run):
            kept = fewer
    return tuple(kept)


def still_wrong(case: Case, session: int, neighbours: list[int], run: Rerun) -> bool:
    """Whether ``session`` diverges with just these neighbours."""
    dropped = set(range(len(case.sessions))) - {session, *neighbours}
    number = sum(index < session for index in neighbours)
    return any(d.session == number for d in run(without_sessions(case, dropped)).divergences)
