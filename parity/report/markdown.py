"""The gate's summary as Markdown, for a job's page: verdict first, then a
table, then every failure in full.
"""

from __future__ import annotations

from parity.gate.result import CheckKind, GateCheck, GateResult
from parity.records import Verdict
from scheduler.limits import Layout

OF_NO_FAMILY = (CheckKind.POLICIES, CheckKind.MUTANTS, CheckKind.SYSTEM)
SIGNS = {Verdict.PASS: "✅ pass", Verdict.FAIL: "❌ **fail**", Verdict.UNKNOWN: "❔ **unknown**"}


def result_to_markdown(result: GateResult) -> str:
    """The whole summary."""
    counts = ", ".join(f"{result.count(verdict)} {verdict.value}" for verdict in Verdict)
    held = result.provenance
    lines = [
        f"# Parity gate: {result.verdict.value}",
        "",
        f"{len(result.checks)} checks: {counts}; {result.seconds:g} s. "
        f"Commit `{held.commit}`, {held.engine}, {held.cpu}.",
        "",
    ]
    lines += _family_table(result)
    lines += _distance_table(result)
    lines += _other_checks(result)
    wrong = [check for check in result.checks if check.verdict is not Verdict.PASS]
    if not result.checks:
        lines += ["", "Nothing was selected, so nothing was proved."]
    for verdict, title in ((Verdict.FAIL, "Failures"), (Verdict.UNKNOWN, "Unknown: neither pass nor fail")):
        if chosen := [check for check in wrong if check.verdict is verdict]:
            lines += ["", f"## {title}", "", *(line for check in chosen for line in _details(check))]
    return "\n".join(lines) + "\n"


def _family_table(result: GateResult) -> list[str]:
    if not result.options.families:
        return []
    layouts = [layout.value for layout in Layout]
    lines = [
        "| family | required | " + " | ".join(layouts) + " | splits | goldens | right |",
        "|---" * (5 + len(layouts)) + "|",
    ]
    for family in result.options.families:
        checks = result.of_family(family)
        cells = [
            _cell([c for c in checks if c.kind is CheckKind.SUITE and c.layout == layout])
            for layout in layouts
        ]
        cells += [
            _cell([c for c in checks if c.kind is kind])
            for kind in (CheckKind.SPLIT, CheckKind.GOLDEN, CheckKind.TRUTH)
        ]
        lines.append(f"| {family} | {result.options.tier_of(family).value} | " + " | ".join(cells) + " |")
    return lines


def _cell(checks: list[GateCheck]) -> str:
    """Verdict and, where sessions are compared, bit-identical of compared."""
    if not checks:
        return "not run"
    text = SIGNS[Verdict.merge(check.verdict for check in checks)]
    counts = [
        check.counts for check in checks if check.counts is not None and check.kind is not CheckKind.GOLDEN
    ]
    if counts:
        text += f" {sum(c.bit_identical for c in counts)}/{sum(c.sessions for c in counts)} bits"
    if any(check.measured for check in checks):
        text += f", {sum(c.byte_identical for c in counts)} bytes (measured)"
    return text


def _distance_table(result: GateResult) -> list[str]:
    """Exact to itself and right, two columns; the distance is a part of the deviation of logits."""
    distances = [distance for check in result.checks for distance in check.distances]
    if not distances:
        return []
    lines = [
        "",
        "| model | run | exact to itself | right | worst of bound | rms from truth |",
        "|---" * 6 + "|",
    ]
    for row in distances:
        itself, right = ("yes" if row.same_bits else "no"), row.right
        bound = "" if row.worst_of_bound is None else f"{row.worst_of_bound:.2f}"
        lines.append(f"| {row.model} | {row.way} | {itself} | {right} | {bound} | {row.rms:.1e} |")
    return lines


def _other_checks(result: GateResult) -> list[str]:
    shown = [check for check in result.checks if check.kind in OF_NO_FAMILY]
    lines = [""] if shown else []
    for check in shown:
        marks = ", ".join(f"{count} {mark}" for mark, count in check.marks.items())
        lines.append(f"- {check.name}: {SIGNS[check.verdict]}" + (f" ({marks})" if marks else ""))
    return lines


def _details(check: GateCheck) -> list[str]:
    lines = [f"### {check.name}", "", check.reason or check.verdict.value, ""]
    if check.divergence is not None:
        d = check.divergence
        lines += [
            f"- family `{check.family}`, layout `{check.layout}`"
            + (f", split `{check.split}`" * bool(check.split)),
            f"- session {d.session}, generated token {d.step}, scheduler step {d.scheduler_step}: token "
            f"{d.actual_token} instead of {d.expected_token}, reference margin {d.margin:.4g}",
        ]
    if check.replay:
        lines.append(f"- replay: `{check.replay}`")
    if check.explanation:
        fence = "~~~"
        lines += [
            "",
            "<details><summary>explanation</summary>",
            "",
            fence,
            check.explanation.replace(fence, "~ ~ ~"),
            fence,
            "",
            "</details>",
        ]
    return [*lines, ""]
