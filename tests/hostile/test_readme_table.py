"""The README's table of request fields is the code's."""

from __future__ import annotations

import re

from parity.serve.requests import NEUTRAL, WITHOUT_EFFECT, ChatFields, CompletionFields
from parity.store import REPOSITORY


def named(row: str) -> set[str]:
    """Fields of the table's row that ends with a text, without what is below them."""
    text = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    fields = next(line for line in text.splitlines() if line.startswith("| `") and row in line).split("|")[1]
    return {name.partition(".")[0] for name in re.findall(r"`([\w.]+)`", fields)}


def test_readme_lists_every_field_and_no_other() -> None:
    fields = {*ChatFields.model_fields, *CompletionFields.model_fields}

    assert named("honoured; type and range") | named("told to the policy") == fields
    assert named("only the neutral value") == set(NEUTRAL)
    assert named("without effect by nature") == WITHOUT_EFFECT
