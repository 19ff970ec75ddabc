"""Variant rows: found by name, and refused with one line where nobody writes them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from parity.errors import UsageError
from parity.models import resolve_model
from parity.models.catalogue import build_row
from parity.models.families import load_families, load_family
from parity.models.tiny import find_builder
from parity.models.tiny.variants import VARIANTS


def test_every_variant_is_a_row_and_every_variant_row_has_a_writer() -> None:
    rows = {(family.name, row.variant) for family in load_families().values() for row in family.rows.values()}
    assert {row for row in rows if row[1]} == {(f, name) for f, names in VARIANTS.items() for name in names}
    assert resolve_model("gemma2:capped").row == "capped"


def test_unknown_variant_costs_one_clear_line(tmp_path: Path) -> None:
    family = load_family("llama")
    row = replace(family.row("scaled"), variant="curled")
    assert find_builder("llama", "curled") is None and find_builder("mamba") is None
    with pytest.raises(UsageError, match="family llama has no model writer for the variant 'curled'"):
        build_row(family, row, tmp_path / "model.gguf")
    assert not list(tmp_path.iterdir())
