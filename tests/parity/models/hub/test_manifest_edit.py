"""replace_scalars: the asked values change, every other byte stays."""

from __future__ import annotations

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from parity.errors import UsageError
from parity.models.families import family_names, manifests_dir
from parity.models.manifest_edit import replace_scalars

REAL = ("rows", "real")
HEX = st.text("0123456789abcdef", min_size=40, max_size=40)


@pytest.mark.parametrize("name", family_names())
def test_edit_of_every_manifest_touches_three_lines(name: str):
    text = (manifests_dir() / f"{name}.yaml").read_text()
    changes = {(*REAL, "revision"): "ab" * 20, (*REAL, "sha256"): "cd" * 32, (*REAL, "size_bytes"): 7}
    edited = replace_scalars(text, changes, where=name)
    pairs = zip(text.splitlines(), edited.splitlines(), strict=True)
    changed = [new.strip() for old, new in pairs if old != new]
    assert changed == [f"revision: {'ab' * 20}", f"sha256: {'cd' * 32}", "size_bytes: 7"]


@given(revision=HEX)
def test_edit_reads_back_as_text_whatever_the_digits(revision: str):
    edited = replace_scalars("a:\n  b: null # keep\n", {("a", "b"): revision}, where="x")
    assert yaml.safe_load(edited) == {"a": {"b": revision}}
    assert edited.endswith(" # keep\n")


@pytest.mark.parametrize(
    "text, edited",
    [
        ("a: {b: null, c: ~}   # flow\n", "a: {b: new, c: ~}   # flow\n"),
        ("a:\n    b:\n    c: 1\n", "a:\n    b: new\n    c: 1\n"),
        ("a:\n  b: 'old'   # quoted\n", "a:\n  b: 'new'   # quoted\n"),
        ('a: {"b": "old"}', 'a: {"b": "new"}'),
        (
            "# é comes before\na:\r\n  b: null\r\n  c: 'x'\r\n",
            "# é comes before\na:\r\n  b: new\r\n  c: 'x'\r\n",
        ),
        ("a:\n  c:   [1,   2]\n\n\n  b: ~\n", "a:\n  c:   [1,   2]\n\n\n  b: new\n"),
    ],
)
def test_edit_keeps_layout_quotes_comments_and_line_ends(text: str, edited: str):
    assert replace_scalars(text, {("a", "b"): "new"}, where="x") == edited


@pytest.mark.parametrize(
    "text, word",
    [
        ("a: {c: 1}", "missing"),
        ("a: 1", "missing"),
        ("a: {b: [1]}", "one value"),
        ("z: &shared null\na: {b: *shared}", "edited in place"),
        ("a: {b: [", "not valid YAML"),
    ],
)
def test_edit_refuses_what_it_cannot_change_alone(text: str, word: str):
    with pytest.raises(UsageError, match=word):
        replace_scalars(text, {("a", "b"): "new"}, where="x.yaml")
