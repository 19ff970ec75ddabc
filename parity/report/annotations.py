"""GitHub annotations: one line per check that is not green, at the test that says the same."""

from __future__ import annotations

from parity.gate.result import GateCheck, GateResult
from parity.records import Verdict

MAX_MESSAGE_CHARACTERS = 3000


def annotations_of(result: GateResult) -> list[str]:
    """Workflow commands ``::error file=...,line=...,title=...::message``; unknown is an error as well."""
    lines = [annotation_of(check) for check in result.checks if check.verdict is not Verdict.PASS]
    if not result.checks:
        lines.append("::error title=parity gate::nothing was selected, so nothing was proved")
    return lines


def annotation_of(check: GateCheck) -> str:
    """One check's annotation: its headline, then the explanation."""
    message = "\n".join(filter(None, [check.headline, check.explanation]))[:MAX_MESSAGE_CHARACTERS]
    where = (
        f"file={escape_property(check.test_file)},line={check.test_line},title={escape_property(check.name)}"
    )
    return f"::error {where}::{escape_message(message)}"


def escape_message(text: str) -> str:
    """As GitHub's toolkit escapes the data of a workflow command."""
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def escape_property(text: str) -> str:
    """As GitHub's toolkit escapes a property of a workflow command."""
    return escape_message(text).replace(":", "%3A").replace(",", "%2C")
