"""What kind of failure an outcome is: equal signatures are taken for the same fault."""

from __future__ import annotations

import re

from parity.records import Outcome, Verdict


def fault_signature(outcome: Outcome) -> tuple[str, ...]:
    """Empty for a pass; else where it failed, by which check, with numbers and names of sessions left out.

    Ordered by what says most: a crash, then broken laws, then differing answers.
    """
    if outcome.verdict is Verdict.PASS:
        return ()
    if outcome.crashed:
        return ("crash", _shape(outcome.reason))
    if outcome.problems:
        return ("problem", _shape(outcome.problems[0].partition(":")[0]))
    if outcome.divergences:
        return ("divergence",)
    return ("unknown", _shape(outcome.reason))


def _shape(text: str) -> str:
    return re.sub(r"[-+]?\d+(\.\d+)?|s\d+|/\S+", "#", text.partition(";")[0])[:120]
