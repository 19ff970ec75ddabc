"""From an outcome to text that a person can act on: what differs first, what was
around it, how to see it again.
"""

from __future__ import annotations

from pathlib import Path

from parity.checkers.conservation import ranges_of
from parity.records import Divergence, Outcome

MOST_IN_FULL = 4  # differing sessions whose surroundings are told; the others get a line each


def explain_divergence_text(divergence: Divergence) -> list[str]:
    """One divergence as indented lines."""
    d = divergence
    tokens = (
        f"token {d.actual_token} instead of {d.expected_token}"
        if d.actual_token != d.expected_token
        else f"same token {d.expected_token}, other logits"
    )
    return [
        f"session {d.session} differs first at its generated token {d.step} "
        f"(scheduler step {d.scheduler_step}): {tokens}",
        f"  logits moved by {d.distance:.3g}; reference margin top-1 to top-2 {d.margin:.3g}",
        f"  in that batch: sessions {list(d.neighbours) or 'nobody else'}",
        f"  its chunks so far: {' '.join(f'[{a},{b})' for a, b in d.chunks)}",
        f"  its cells: {_ranges(d.cells)}",
    ]


def explain_outcome(outcome: Outcome, *, case_file: Path | None = None, options: str = "") -> str:
    """Everything that makes a verdict understandable, and the command that replays it with ``options``."""
    case = outcome.case
    lines = [
        f"{outcome.verdict.value}: {case.family} {case.layout.value}, model {case.model}, "
        f"policy {case.policy}"
        f"{f', split {case.split}' if case.split else ''}: "
        f"{outcome.bit_identical} of {outcome.sessions} sessions bit-identical, "
        f"{outcome.byte_identical} byte-identical"
    ]
    if outcome.crashed:
        lines.append(f"crash: {outcome.reason}")
    elif outcome.reason:
        lines.append(outcome.reason)
    told = [(f.data.get("step", float("inf")), [f"problem: {f}"]) for f in outcome.findings if f.is_law]
    for number, d in enumerate(outcome.divergences):
        text = explain_divergence_text(d)
        told.append((d.scheduler_step, text if number < MOST_IN_FULL else text[:1]))
    lines += [line for _, text in sorted(told, key=lambda item: item[0]) for line in text]
    lines += [f"  | {line}" for line in outcome.stderr.splitlines()[-12:]]
    if case_file is not None:
        lines.append(f"replay: parity replay {case_file}{options}")
    return "\n".join(lines)


def _ranges(cells: tuple[int, ...]) -> str:
    """Cell indices with runs written as a-b."""
    if cells and min(cells) < 0:
        return "placed by the engine"
    return ranges_of(cells)
