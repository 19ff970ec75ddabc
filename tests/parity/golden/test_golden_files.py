"""Goldens as files: what is compared when, what may be written, and that no run
touches another family's files.
"""

from __future__ import annotations

import functools
import json
import operator
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from parity.errors import UsageError
from parity.golden.cases import GOLDEN_DIR, GoldenMode, golden_path, load_prompts
from parity.golden.extension import DIRECTORY_VARIABLE, REASON_VARIABLE, save_golden
from parity.golden.record import (
    Golden,
    GoldenProvenance,
    GoldenSession,
    ReferenceAnswer,
    describe_context,
    find_differences,
)
from parity.golden.regenerate import ModeChange, check_engine_is_locked, locked_engine_version, save_changes
from parity.records import Tier, Verdict
from parity.store import REPOSITORY

PROVENANCE = GoldenProvenance(
    model="a" * 64, engine="llama-cpp-python 0.3.36", build="AVX2 = 1", cpu="one", numerics="{}"
)
SESSION = GoldenSession(
    prompt="Number 1",
    tokens=(5, 6, 7),
    text="\\x80é\n",
    data="80c3a90a",
    digests=("00", "11", "22"),
    margin=0.4375,
    reference=ReferenceAnswer(tokens=(5, 6, 7), margin=0.5),
)
GOLDEN = Golden(
    family="llama", mode="short", reason="first", provenance=PROVENANCE, sessions=(SESSION, SESSION)
)


def with_session(golden: Golden, **changes: Any) -> Golden:
    """``golden`` with its second session changed."""
    return replace(golden, sessions=(golden.sessions[0], replace(golden.sessions[1], **changes)))


def test_golden_reads_what_it_writes() -> None:
    assert Golden.from_text(GOLDEN.to_text(), where="x") == GOLDEN
    assert '"tokens": [5, 6, 7]' in GOLDEN.to_text()  # a list a line, for readable diffs


def leaves(data: Any, path: tuple = ()) -> Iterator[tuple]:
    """Paths of all values below ``data`` that are no containers."""
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, value in items:
        if not isinstance(value, dict | list):
            yield (*path, key)
        yield from leaves(value, (*path, key))


def other(value: Any) -> Any:
    """A value of the same type, near by."""
    if isinstance(value, str):
        return value[:-1] + ("0" if value[-1:] != "0" else "1")
    return value + 1 if isinstance(value, int) else value * 1.01


@pytest.mark.parametrize("mode", [mode.value for mode in GoldenMode])
def test_every_edit_of_a_field_is_noticed(mode: str) -> None:
    text = golden_path("llama", GoldenMode(mode)).read_text(encoding="utf-8")
    data = json.loads(text)
    assert in_place(data) == text
    paths = list(leaves(data))
    assert len(paths) > 30 and ("provenance", "cpu") in paths and ("digest",) in paths
    for path in paths:
        changed = json.loads(text)
        *outer, last = path
        inner = functools.reduce(operator.getitem, outer, changed)
        inner[last] = other(inner[last])
        for edited in (json.dumps(changed, indent=1, ensure_ascii=False), in_place(changed)):
            with pytest.raises(UsageError, match="golden cannot be read"):
                Golden.from_text(edited, where="x")


def in_place(data: dict) -> str:
    """Changed data in the form of a golden's file, with the digest that it says it has."""
    text = json.dumps(data, indent=1, ensure_ascii=False)
    return LIST.sub(lambda m: "[" + re.sub(r"\s*\n\s*", " ", m[1]) + "]", text) + "\n"


LIST = re.compile(r"\[\s+([^\[\]{}]*?)\s+\]")


@pytest.mark.parametrize(
    "edit",
    [
        lambda text: text.replace("\n", "\r\n"),
        lambda text: text + "\n",
        lambda text: text.replace('"format": 2', '"format":  2'),
        lambda text: text.replace('"mode": "short"', '"mode": "long", "mode": "short"'),
        lambda text: text.replace('"margin": 0.4375', '"margin": 0.43750000001'),
    ],
)
def test_other_form_of_the_same_golden_is_refused(edit: Callable[..., Any]) -> None:
    edited = edit(GOLDEN.to_text())
    assert edited != GOLDEN.to_text()
    with pytest.raises(UsageError, match="golden cannot be read"):
        Golden.from_text(edited, where="x")


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": 1}', '{"format": 2, "family": "x"}'])
def test_broken_golden_costs_one_clear_line(text: str) -> None:
    with pytest.raises(UsageError, match="golden cannot be read in golden/x.json"):
        Golden.from_text(text, where="golden/x.json")


def test_tokens_and_bytes_are_compared_whatever_the_processor() -> None:
    elsewhere = replace(GOLDEN, provenance=replace(PROVENANCE, cpu="another"))
    assert find_differences(GOLDEN, elsewhere) == []
    lines = find_differences(GOLDEN, with_session(elsewhere, tokens=(5, 9, 7), text="x"))
    assert lines[0] == "session 1: tokens differ from generated token 1 on"
    assert "[5 6 7] -> [5 9 7]" in lines[1]
    assert find_differences(GOLDEN, with_session(elsewhere, data="00")) == [
        "session 1: same tokens, other bytes: 80c3a90a -> 00"
    ]
    assert find_differences(GOLDEN, with_session(elsewhere, tokens=(5, 6)))[0].endswith("token 2 on")


def test_what_the_reference_says_is_compared_whatever_the_processor() -> None:
    elsewhere = replace(GOLDEN, provenance=replace(PROVENANCE, cpu="another"))

    def said(tokens: tuple[int, ...] = (5, 6, 7), margin: float = 0.5, *ties: str) -> list[str]:
        answer = ReferenceAnswer(tokens=tokens, margin=margin, ties=ties)
        return find_differences(GOLDEN, with_session(elsewhere, reference=answer))

    assert said() == said(margin=0.500001) == []
    assert said(margin=0.501) == ["session 1: the reference's margin 0.5 -> 0.501"]
    assert said((5, 9, 7)) == ["session 1: the reference picks [5 6 7] -> [5 9 7]"]
    assert said((5, 9, 7), 0.5, "near") == ["session 1: the reference picks [5 6 7] -> [5 9 7] (tie: near)"]


@pytest.mark.parametrize("key", ["cpu", "build", "numerics", "engine"])
def test_digests_are_compared_only_where_the_provenance_matches(key: str) -> None:
    moved = with_session(GOLDEN, digests=("00", "12", "22"))
    assert find_differences(GOLDEN, moved) == [
        "session 1: logits differ in bits from generated token 1 on, same build, numerics and CPU"
    ]
    elsewhere = replace(moved, provenance=replace(PROVENANCE, **{key: "other"}))
    assert find_differences(GOLDEN, elsewhere) == []
    assert describe_context(GOLDEN, elsewhere) == [f"{key}: {getattr(PROVENANCE, key)} -> other"]


def test_other_bits_with_the_same_bytes_are_no_difference_for_tier_bytes() -> None:
    moved = with_session(GOLDEN, digests=("00", "12", "22"))
    assert find_differences(GOLDEN, moved) and not find_differences(GOLDEN, moved, tier=Tier.BYTES)
    assert find_differences(GOLDEN, with_session(GOLDEN, tokens=(5, 9, 7)), tier=Tier.BYTES)


def test_other_model_or_session_count_is_a_difference() -> None:
    assert find_differences(GOLDEN, replace(GOLDEN, provenance=replace(PROVENANCE, model="b" * 64)))
    assert find_differences(GOLDEN, replace(GOLDEN, sessions=(SESSION,))) == ["sessions: 2 -> 1"]


def test_golden_is_never_written_without_a_reason(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="only with a reason"):
        save_golden(GOLDEN, reason="  ", directory=tmp_path)
    assert list(tmp_path.iterdir()) == []
    path = save_golden(GOLDEN, reason="the kernel\nchanged", directory=tmp_path)
    assert Golden.from_text(path.read_text(), where="x").reason == "the kernel changed"


def test_one_wrong_mode_keeps_a_family_from_being_written(tmp_path: Path) -> None:
    def change(mode: GoldenMode, *problems: str) -> ModeChange:
        golden = None if problems else replace(GOLDEN, mode=mode.value)
        return ModeChange(
            family="llama",
            mode=mode,
            path=golden_path("llama", mode, tmp_path),
            golden=golden,
            is_new=True,
            differences=(),
            context=(),
            problems=problems,
        )

    good, bad = change(GoldenMode.SHORT), change(GoldenMode.LONG, "concurrent differs from solo")
    assert (good.verdict, bad.verdict) == (Verdict.UNKNOWN, Verdict.FAIL)
    with pytest.raises(UsageError, match="concurrent differs from solo"):
        save_changes([good, bad], {}, reason="why", directory=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_other_engine_than_the_locked_one_needs_its_own_reason() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+", locked_engine_version())
    assert check_engine_is_locked("") == ""
    with pytest.raises(UsageError, match="9.9.9 is locked"):
        check_engine_is_locked(" ", locked="9.9.9")
    assert "instead of the locked 9.9.9: trying a fix" in check_engine_is_locked(
        "trying a fix", locked="9.9.9"
    )


# -- whole runs


@pytest.fixture(scope="module")
def goldens_of_this_machine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The project's goldens with llama's accepted anew, so that no provenance differs from this machine's."""
    goldens = Path(shutil.copytree(GOLDEN_DIR, tmp_path_factory.mktemp("here") / "golden"))
    done = run(goldens, *REGEN, "--directory", str(goldens), "--accept", "--reason", "another machine")
    assert done.returncode == 0, done.stdout + done.stderr
    return goldens


@pytest.fixture
def goldens(goldens_of_this_machine: Path, tmp_path: Path) -> Path:
    """Goldens that a run may change."""
    return Path(shutil.copytree(goldens_of_this_machine, tmp_path / "golden"))


def contents(directory: Path) -> dict[str, str]:
    return {str(p.relative_to(directory)): p.read_text() for p in sorted(directory.rglob("*")) if p.is_file()}


def run(goldens: Path, *words: str, reason: str = "", **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, DIRECTORY_VARIABLE: str(goldens), REASON_VARIABLE: reason, **variables}
    for name in [name for name in environment if name.startswith("PYTEST_")]:
        del environment[name]
    return subprocess.run(
        [sys.executable, "-m", *words],
        cwd=REPOSITORY,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def spoil(goldens: Path, family: str) -> Path:
    """Change one token in a golden; returns its path."""
    path = golden_path(family, GoldenMode.SHORT, goldens)
    golden = Golden.from_text(path.read_text(), where="x")
    wrong = replace(golden.sessions[0], tokens=(*golden.sessions[0].tokens[:-1], 1))
    path.write_text(replace(golden, sessions=(wrong, *golden.sessions[1:])).to_text())
    return path


REGEN = ("parity.cli", "regen", "--family", "llama")

# No path on the command line: with one, syrupy keeps to the files below it.
UPDATE = (
    "pytest",
    "-o",
    "testpaths=tests/families/test_golden.py",
    "-q",
    "-p",
    "no:cacheprovider",
    "-n",
    "0",
)
UPDATE += ("--snapshot-update",)

# Deselects before syrupy sees what was collected, so that syrupy takes the selection for everything there is.
EARLY_DESELECTION = """
import pytest

@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    items[:] = [item for item in items if "outputs_are" in item.name and "[llama-" in item.name]
"""


@pytest.mark.parametrize("early", [False, True], ids=["by marker", "before syrupy"])
@pytest.mark.parametrize("reason", ["because it was spoilt", ""])
def test_snapshot_update_of_one_family_touches_no_other_file(
    goldens: Path, tmp_path: Path, reason: str, early: bool
) -> None:
    before = contents(goldens)
    spoil(goldens, "llama")
    spoil(goldens, "gemma2")
    stray = goldens / "llama" / "old_mode.json"
    stray.write_text("{}")
    spoilt = contents(goldens)
    (tmp_path / "early_deselection.py").write_text(EARLY_DESELECTION)
    words = ("-p", "early_deselection") if early else ("-m", "family_llama")
    done = run(goldens, *UPDATE, *words, reason=reason, PYTHONPATH=str(tmp_path))
    assert done.returncode == (0 if reason else 1), done.stdout + done.stderr
    after = contents(goldens)
    changed = {name for name in after if after[name] != spoilt[name]}
    assert after.keys() == spoilt.keys()  # nothing was deleted, whatever syrupy thinks is unused
    assert changed == ({"llama/short.json"} if reason else set())
    if reason:
        written = Golden.from_text(after["llama/short.json"], where="x")
        assert written.reason == reason
        assert replace(written, reason="") == replace(
            Golden.from_text(before["llama/short.json"], where="x"), reason=""
        )
    else:
        assert "a golden is written only with a reason" in done.stdout


def test_regen_prints_the_difference_and_writes_only_when_accepted(goldens: Path) -> None:
    before = contents(goldens)
    spoil(goldens, "llama")
    spoil(goldens, "gemma2")
    spoilt = contents(goldens)
    done = run(goldens, *REGEN, "--directory", str(goldens))
    assert done.returncode == 1, done.stdout + done.stderr
    assert "llama short: differs" in done.stdout
    assert "tokens differ from generated token 11 on" in done.stdout
    assert "gemma2" not in done.stdout
    assert contents(goldens) == spoilt
    done = run(goldens, *REGEN, "--directory", str(goldens), "--accept", "--reason", "spoilt by a test")
    assert done.returncode == 0, done.stdout + done.stderr
    after = contents(goldens)
    assert {name for name in after if after[name] != spoilt[name]} == {"llama/short.json"}
    written = Golden.from_text(after["llama/short.json"], where="x")
    assert written.reason == "spoilt by a test"
    assert written == replace(
        Golden.from_text(before["llama/short.json"], where="x"), reason="spoilt by a test"
    )


@pytest.mark.parametrize("accept", [(), ("--accept", "--reason", "looks right")], ids=["shown", "accepted"])
def test_regen_refuses_a_golden_that_was_edited_by_hand(tmp_path: Path, accept: tuple[str, ...]) -> None:
    goldens = Path(shutil.copytree(GOLDEN_DIR, tmp_path / "golden"))
    path = golden_path("llama", GoldenMode.SHORT, goldens)
    text = path.read_text(encoding="utf-8")
    path.write_text(re.sub(r'"margin": 0', '"margin": 1', text, count=1), encoding="utf-8")
    edited = contents(goldens)
    assert edited["llama/short.json"] != text
    done = run(goldens, *REGEN, "--directory", str(goldens), *accept)
    assert done.returncode == 64, done.stdout + done.stderr
    assert "short.json: its content is not what its digest was made of: it was edited" in done.stderr
    assert contents(goldens) == edited


def test_regen_accepts_nothing_without_a_reason(goldens: Path) -> None:
    done = run(goldens, *REGEN, "--directory", str(goldens), "--accept")
    assert done.returncode == 64
    assert "--accept needs --reason" in done.stderr


def test_missing_prompts_cost_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="has no golden prompts"):
        load_prompts("llama", tmp_path)
    done = run(tmp_path, *REGEN, "--directory", str(tmp_path))
    assert (done.returncode, done.stderr.count("\n")) == (64, 1)
    assert "--search" in done.stderr
