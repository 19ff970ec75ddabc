"""Makes a failing case small: fewer sessions, fewer faults, shorter prompts and outputs, simpler settings.

Structural and deterministic, and it asks at most ``max_runs`` times. A smaller case counts only if it fails
as the larger did (``is_same_fault``), so that one fault does not slip into another.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from time import monotonic

from parity.records import Case, Divergence, Outcome, Verdict
from scheduler.records import SamplingParams

# -- What kind of failure an outcome is: equal signatures are taken for the same fault.

ROUNDING = (
    0.05  # logits that moved less than this share of a typical top margin moved by rounding, not by content
)
_HEAD = 3  # parts of a signature that a smaller case must have as well; what follows are traits


def fault_signature(outcome: Outcome) -> tuple[str, ...]:
    """Empty for a pass; else where it failed, by which check, with numbers and names of sessions left out.

    Ordered by what says most: a crash, then broken laws, then differing answers. A differing answer is told
    from others by family, layout, how far it moved, and by traits of the session that went wrong first.
    """
    if outcome.verdict is Verdict.PASS:
        return ()
    if outcome.crashed:
        return ("crash", _shape(outcome.reason))
    if broken := [finding for finding in outcome.findings if finding.is_law]:
        return ("problem", broken[0].checker)
    if outcome.divergences:
        case, first = outcome.case, first_divergence(outcome)
        kind = "rounding" if moved_by_rounding(first) else "content"
        return ("divergence", f"{case.family} {case.layout.value}", kind, *_traits(case, first))
    return ("unknown", _shape(outcome.reason))


def is_same_fault(wanted: tuple[str, ...], found: tuple[str, ...]) -> bool:
    """Whether a smaller case fails as the larger did.

    It may lose traits, which its fault did not need then, and never gets any, which would be another fault's.
    """
    return bool(found) and found[:_HEAD] == wanted[:_HEAD] and set(found[_HEAD:]) <= set(wanted[_HEAD:])


def first_divergence(outcome: Outcome) -> Divergence:
    """The divergence that came first; the others may follow from it."""
    return min(outcome.divergences, key=lambda d: (d.scheduler_step, d.session))


def moved_by_rounding(divergence: Divergence) -> bool:
    """Whether logits moved by no more than another order of summation can do."""
    return divergence.distance <= ROUNDING * max(divergence.margin, 1.0)


def _traits(case: Case, divergence: Divergence) -> list[str]:
    """What the session had behind it when it went wrong."""
    chunks = divergence.chunks
    prefills = [chunk for chunk in chunks if chunk[0] < len(case.sessions[divergence.session].prompt)]
    has = {
        "later token": divergence.step > 0,
        "shared prefix": bool(chunks) and chunks[0][0] > 0,
        "rebuilt": any(after[0] < before[1] for before, after in pairwise(chunks)),
        "chunked": len(prefills) > 1,
        "neighbours": bool(divergence.neighbours),
    }
    return [trait for trait, there in has.items() if there]


def _shape(text: str) -> str:
    return re.sub(r"[-+]?\d+(\.\d+)?|s\d+|/\S+", "#", text.partition(";")[0])[:120]


MAX_RUNS = 600
SECONDS = 120.0


def size_of(case: Case) -> tuple[int, int, int, int]:
    """What shrinking makes small, most important first: sessions, tokens, faults, steps waited for."""
    tokens = sum(len(session.prompt) + session.max_tokens for session in case.sessions)
    waits = sum(session.arrival_step for session in case.sessions) + sum(fault.step for fault in case.faults)
    return len(case.sessions), tokens, len(case.faults), waits


def shrink_case(
    case: Case,
    run: Callable[[Case], Outcome],
    *,
    max_runs: int = MAX_RUNS,
    seconds: float = SECONDS,
    clock: Callable[[], float] = monotonic,
) -> Case:
    """The smallest case found that fails like ``case``; ``case`` itself if it does not fail.

    Ends after ``max_runs`` runs, or with the first that ends after ``seconds``: a case that hangs
    would be waited for every time.
    """
    stop = clock() + seconds
    wanted = fault_signature(run(case))
    if not wanted:
        return case
    left = max_runs
    seen = {case}
    improved = True
    while improved and left > 0 and clock() < stop:
        improved = False
        for candidate in _candidates(case):
            if candidate in seen:
                continue
            seen.add(candidate)
            left -= 1
            signature = fault_signature(run(candidate))
            if is_same_fault(wanted, signature):
                case, wanted, improved = candidate, signature, True
                break
            if left == 0 or clock() >= stop:
                break
    return case


def without_sessions(case: Case, dropped: set[int]) -> Case:
    """The case less some sessions, their faults gone and the others renumbered."""
    kept = [index for index in range(len(case.sessions)) if index not in dropped]
    number = {old: new for new, old in enumerate(kept)}
    aimed = ("cancel", "preempt", "resubmit")
    faults = tuple(
        replace(fault, session=number.get(fault.session, 0))
        for fault in case.faults
        if fault.kind.value not in aimed or fault.session in number
    )
    return replace(case, sessions=tuple(case.sessions[index] for index in kept), faults=faults)


def _candidates(case: Case) -> Iterator[Case]:
    """Smaller cases, those that lose most first."""
    yield from _fewer_sessions(case)
    yield from _fewer_faults(case)
    yield from _fewer_tokens(case)
    yield from _simpler(case)


def _fewer_sessions(case: Case) -> Iterator[Case]:
    count = len(case.sessions)
    width = count // 2
    while width:
        for start in range(0, count, width):
            dropped = set(range(start, min(start + width, count)))
            if len(dropped) < count:
                yield without_sessions(case, dropped)
        width //= 2


def _fewer_faults(case: Case) -> Iterator[Case]:
    if len(case.faults) > 1:
        yield replace(case, faults=())
    for index in range(len(case.faults)):
        yield replace(case, faults=case.faults[:index] + case.faults[index + 1 :])


def _fewer_tokens(case: Case) -> Iterator[Case]:
    """Cut all sessions alike, so that what they share stays shared, then each alone."""
    longest = max(len(session.prompt) for session in case.sessions)
    for width in _halves(longest - 1):
        for start in range(0, longest, width):
            cut = tuple(s.prompt[:start] + s.prompt[start + width :] for s in case.sessions)
            if all(cut) and cut != tuple(s.prompt for s in case.sessions):
                sessions = (replace(s, prompt=p) for s, p in zip(case.sessions, cut, strict=True))
                yield replace(case, sessions=tuple(sessions))
    for index, session in enumerate(case.sessions):
        for width in _halves(session.max_tokens - 1):
            yield _with(case, index, max_tokens=session.max_tokens - width)
        for width in _halves(len(session.prompt) - 1):
            yield _with(case, index, prompt=session.prompt[:-width])
            yield _with(case, index, prompt=session.prompt[width:])


def _simpler(case: Case) -> Iterator[Case]:
    for index, session in enumerate(case.sessions):
        for width in _halves(session.arrival_step):
            yield _with(case, index, arrival_step=session.arrival_step - width)
        if session.sampling.temperature:
            yield _with(case, index, sampling=SamplingParams())
        if session.stop_token_ids and session.hidden_output_tokens is None:
            yield _with(case, index, stop_token_ids=())
    for index, fault in enumerate(case.faults):
        for width in _halves(fault.step):
            faults = list(case.faults)
            faults[index] = replace(fault, step=fault.step - width)
            yield replace(case, faults=tuple(faults))
    if case.policy != "fcfs":
        yield replace(case, policy="fcfs", policy_options=())
    if case.prefix_cache:
        yield replace(case, prefix_cache=False)
    if case.steps_in_flight > 1:
        yield replace(case, steps_in_flight=1)
    if case.shards > 1:
        yield replace(case, shards=1)
        yield replace(case, shards=case.shards - 1)
    for width in _halves(case.max_num_batched_tokens - 1):
        yield replace(case, max_num_batched_tokens=case.max_num_batched_tokens - width)


def _halves(most: int) -> Iterator[int]:
    """``most``, half of it, and so on down to 1."""
    while most > 0:
        yield most
        most //= 2


def _with(case: Case, index: int, **changes: object) -> Case:
    sessions = list(case.sessions)
    sessions[index] = replace(sessions[index], **changes)
    return replace(case, sessions=tuple(sessions))
