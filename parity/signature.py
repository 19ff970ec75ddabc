"""What kind of failure an outcome is: equal signatures are taken for the same fault."""

from __future__ import annotations

import re
from itertools import pairwise

from parity.records import Case, Divergence, Outcome, Verdict

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
    if outcome.problems:
        return ("problem", _shape(outcome.problems[0].partition(":")[0]))
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
