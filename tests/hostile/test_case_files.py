"""Case files from outside: one line and exit 64, or a case that can run; never a traceback."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings

from parity.cases.files import load_case, read_case
from parity.cli import main
from parity.errors import ExitCode, UsageError
from parity.run.runner import check_case, run_exact_case
from tests.hostile.cases import GOOD, changed, hostile_texts

BAD = {
    "max_tokens of a billion": (("sessions", 0, "max_tokens"), 10**9),
    "max_tokens as text": (("sessions", 0, "max_tokens"), "3"),
    "max_tokens as truth": (("sessions", 0, "max_tokens"), True),
    "max_tokens as 3.0": (("sessions", 0, "max_tokens"), 3.0),
    "two billion cells": (("pool_cells",), 2 * 10**9),
    "no number of ms": (("ms_per_step",), float("nan")),
    "endless step": (("ms_per_step",), float("inf")),
    "negative token": (("sessions", 0, "prompt"), [-1]),
    "token beyond the vocabulary": (("sessions", 0, "prompt"), [264]),
    "stop token beyond the vocabulary": (("sessions", 0, "stop_token_ids"), [100_000]),
    "prompt as text": (("sessions", 0, "prompt"), "hello"),
    "empty prompt": (("sessions", 0, "prompt"), []),
    "no sessions": (("sessions",), []),
    "family of another model": (("family",), "gemma2"),
    "model of another family": (("model",), "gemma2:q8_0"),
    "unknown family": (("family",), "nobody"),
    "fault of nobody": (("faults", 0, "session"), 2),
    "unknown fault": (("faults", 0, "kind"), "earthquake"),
    "fault after a billion steps": (("faults", 0, "step"), 10**9),
    "arrival after a billion steps": (("sessions", 0, "arrival_step"), 10**9),
    "cache as a number": (("prefix_cache",), 1),
    "policy as a list": (("policy",), ["fcfs"]),
    "megabyte of policy": (("policy",), "x" * (1 << 20)),
    "unknown key": (("sessions", 0, "colour"), "red"),
    "other format": (("format",), 2),
    "cells of a stage as text": (("stage_cells",), ["5"]),
    "objective as text": (("sessions", 0, "slo", "ttft_ms"), "5"),
    "temperature below zero": (("sessions", 0, "sampling", "temperature"), -1),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_case_is_refused_in_a_line_that_says_where(name: str, tmp_path: Path) -> None:
    path, value = BAD[name]
    file = tmp_path / "case.json"
    file.write_text(changed(path, value))
    with pytest.raises(UsageError) as refused:
        load_case(file)

    assert str(file) in refused.value.line and len(refused.value.line) < 600


@pytest.mark.parametrize("command", [["replay"], ["bisect", "--exact"], ["trace", "--html", "out.html"]])
def test_commands_exit_with_64(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "case.json").write_text(changed(("family",), "gemma2"))
    with pytest.raises(SystemExit) as end:
        main([command[0], "case.json", *command[1:]])

    assert end.value.code == ExitCode.USAGE
    assert capsys.readouterr().err.count("\n") == 1


def test_key_that_is_given_twice_is_refused() -> None:
    text = GOOD.to_json().replace('"pool_cells": 1000', '"pool_cells": 5, "pool_cells": 1000')
    with pytest.raises(UsageError, match="'pool_cells' is given twice"):
        read_case(text, where="here")


def test_good_case_is_read_as_it_was() -> None:
    assert read_case(GOOD.to_json(), where="here") == GOOD


@pytest.mark.parametrize("path", ["/dev/zero", "/proc/self/mem", "nul\x00l", "."])
def test_what_is_no_file_of_text_is_refused(path: str) -> None:
    with pytest.raises(UsageError):
        load_case(Path(path))


def read_or_refuse(text: str) -> None:
    """What is read can run, on the exact engine at least, or is refused before it runs."""
    try:
        case = read_case(text, where="here")
        check_case(case)
    except UsageError as error:
        assert len(error.line) < 1000 and "\n" not in error.line
        return
    outcome = run_exact_case(case)
    assert not outcome.crashed and not outcome.stderr, (outcome.reason, outcome.problems)


@settings(max_examples=300, deadline=None)
@given(hostile_texts())
def test_hostile_case_is_refused_or_runs(text: str) -> None:
    read_or_refuse(text)


@pytest.mark.nightly
@settings(max_examples=10_000, deadline=None)
@given(hostile_texts())
def test_ten_thousand_hostile_cases(text: str) -> None:
    read_or_refuse(text)
