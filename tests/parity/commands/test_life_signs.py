"""A check is seen to live, keeps what it has when it is cut off, and loses nothing to another's fault."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from parity.commands.check import LifeSigns, load_state, run_suites, save_state, unfinished
from parity.records import Tier, Verdict
from parity.run.under_test import Brought
from parity.store import PROJECT_VARIABLE
from parity.suites.suite import SuiteResult, run_suite
from scheduler.limits import Layout

BROUGHT = Brought(engine="tests.machine.examples:make_engine")
OPTIONS = {"model": None, "min_sessions": 9, "tier": Tier.BYTES, "brought": BROUGHT, "until": None}


def test_a_suite_whose_time_is_up_says_what_it_did_not_reach(tmp_path: Path) -> None:
    result = run_suite(
        "llama", Layout.UNIFIED, tier=Tier.BYTES, brought=BROUGHT, until=0.0, failures=tmp_path
    )
    assert result.verdict is Verdict.UNKNOWN and result.sessions == 0
    assert "time was up after 0 of 200 sessions, never mixed_step, chunked" in result.reason


def test_a_suite_that_was_ready_in_time_passes(tmp_path: Path) -> None:
    told: list[int] = []
    result = run_suite(
        "llama",
        Layout.UNIFIED,
        tier=Tier.BYTES,
        min_sessions=9,
        brought=BROUGHT,
        until=float("inf"),
        failures=tmp_path,
        on_case=lambda result: told.append(result.cases),
    )
    assert result.verdict is Verdict.PASS and result.reason == ""
    assert told == list(range(result.cases + 1))  # before the first, then after each


def test_a_suite_that_was_cut_off_keeps_its_counts(tmp_path: Path) -> None:
    so_far = SuiteResult("llama", Layout.UNIFIED, "llama", cases=3, sessions=20, bit_identical=19)
    so_far.marks["shared"] = 4
    save_state(tmp_path / "0", so_far)
    state = load_state(tmp_path / "0")
    result = unfinished("llama", Layout.UNIFIED, OPTIONS, reason="interrupted", state=state)
    assert (result.verdict, result.reason) == (Verdict.UNKNOWN, "interrupted")
    assert (result.cases, result.sessions, result.bit_identical, result.marks["shared"]) == (3, 20, 19, 4)


def test_a_line_says_what_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("parity.commands.check.LINE_EVERY_S", 0.0)
    text = io.StringIO()
    suites = [("llama", Layout.UNIFIED), ("gemma2", Layout.STREAMS)]
    states = [tmp_path / "0", tmp_path / "1"]
    save_state(states[0], SuiteResult("llama", Layout.UNIFIED, "llama", cases=3, sessions=20))
    save_state(states[1], SuiteResult("gemma2", Layout.STREAMS, "gemma2"))
    with LifeSigns(Console(file=text), suites) as signs:
        signs.look(states, {})
    assert (
        "0 of 2 suites: llama unified 20 sessions, gemma2 streams self-test and first case" in text.getvalue()
    )


def test_one_bad_manifest_is_that_rows_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "manifests").mkdir()
    (tmp_path / "manifests" / "bad.yaml").write_text("family: bad\n")
    monkeypatch.setenv(PROJECT_VARIABLE, str(tmp_path))
    text = io.StringIO()
    suites = [("bad", Layout.UNIFIED), ("llama", Layout.UNIFIED)]

    bad, good = run_suites(suites, OPTIONS, jobs=1, console=Console(file=text))

    assert bad.verdict is Verdict.UNKNOWN and "bad.yaml" in bad.reason
    assert good.verdict is Verdict.PASS and good.sessions >= 9
    assert text.getvalue().startswith("bad unified: unknown, manifest is not valid")
