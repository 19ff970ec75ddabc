"""``parity check``: exit codes, the JSON file, and one clear line for bad input."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from parity.cases.files import load_case
from parity.cli import commands, main
from parity.commands import check
from parity.engines.numerics import NumericsProfile
from parity.errors import ExitCode, UsageError
from parity.models.families import load_family
from parity.records import Case
from parity.store import REPOSITORY


def run_main(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    return int(caught.value.code), capsys.readouterr().err


@pytest.mark.family_llama
def test_check_writes_its_counts_and_exits_with_its_verdict(tmp_path: Path) -> None:
    path = tmp_path / "check.json"

    code = (
        CliRunner()
        .invoke(
            commands,
            [
                "check",
                "--family",
                "llama",
                "--layout",
                "unified",
                "--sessions",
                "20",
                "--jobs",
                "1",
                "--json",
                str(path),
            ],
            standalone_mode=False,
        )
        .return_value
    )

    data = json.loads(path.read_text())
    assert code is ExitCode.PASS and data["verdict"] == "pass"
    counts = data["families"]["llama"]["unified"]
    assert counts["sessions"] == counts["bit_identical"] == counts["byte_identical"] >= 20
    assert counts["crashes"] == 0 and counts["marks"]["mixed_step"] > 0
    assert counts["model_sha256"] == load_family("llama").row("tiny").sha256
    assert NumericsProfile.from_json(json.dumps(counts["numerics"]))
    assert "" not in data["provenance"].values()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["check", "--family", "mistral"], "unknown family"),
        (["check", "--model", "no-such-model"], "unknown model"),
        (["check", "--family", "llama", "--model", "gemma2"], "is of family gemma2"),
        (["check", "--sessions", "0"], "sessions"),
        (["check", "--layout", "paged"], "layout"),
        (["replay", "no-such-file.json"], "cannot be read"),
        (["check", "--policy", "nosuch"], "'nosuch' is not one of"),
        (["doctor", "no-such-file.gguf"], "no-such-file.gguf"),
    ],
)
def test_bad_input_costs_one_line_and_exit_64(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, error = run_main(arguments, capsys)

    assert code == ExitCode.USAGE
    assert says in error and error.count("\n") == 1


def test_truncated_model_is_refused_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "cut.gguf"
    path.write_bytes(b"GGUF\x03\x00\x00\x00")

    code, error = run_main(["check", "--model", str(path)], capsys)

    assert code == ExitCode.USAGE
    assert str(path) in error and error.count("\n") == 1


CASE = {
    "format": 1,
    "family": "llama",
    "model": "llama",
    "layout": "unified",
    "kv_type": "f16",
    "pool_cells": 100,
    "num_sequences": 8,
    "max_num_batched_tokens": 8,
    "max_num_seqs": 4,
    "max_chunk_tokens": 8,
    "max_waiting": 9,
    "prefix_cache": True,
    "prefix_block_tokens": 4,
    "policy": "fcfs",
    "policy_options": [],
    "faults": [],
    "split": None,
    "stage_cells": [],
    "ms_per_step": 10.0,
    "sessions": [
        {
            "prompt": [5, 6],
            "max_tokens": 2,
            "arrival_step": 0,
            "priority": 0,
            "client_id": "c",
            "sampling": {"temperature": 0.0, "seed": 0, "top_k": 0, "top_p": 1.0},
            "slo": {"ttft_ms": None, "tbt_ms": None},
            "stop_token_ids": [],
            "hidden_output_tokens": None,
        }
    ],
}


@pytest.mark.parametrize("command", [["replay"], ["bisect", "--exact"], ["trace", "--html", "out.html"]])
@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"policy": "nosuch"}, "unknown policy 'nosuch'"),
        ({"policy_options": [["nosuch", 1]]}, "nosuch"),
        ({"kv_type": "q1"}, "kv_type: 'q1' is not one of"),
        ({"num_sequences": 0}, "num_sequences: 0 is less than the minimum of 1"),
        ({"pool_cells": 0}, "pool_cells: 0 is less than the minimum of 1"),
        ({"sessions": []}, "sessions: [] should be non-empty"),
    ],
)
def test_case_that_cannot_be_run_costs_one_line_and_exit_64(
    command: list[str], changed: dict, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "case.json"
    path.write_text(json.dumps({**CASE, **changed}), encoding="utf-8")

    code, error = run_main([*command, str(path)], capsys)

    assert code == ExitCode.USAGE
    assert says in error and error.count("\n") == 1


def test_case_file_is_read_as_utf_8_or_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "case.json"
    path.write_bytes(json.dumps({**CASE, "model": "modèle.gguf"}, ensure_ascii=False).encode("utf-8"))
    assert load_case(path).model == "modèle.gguf"

    path.write_bytes(b"\xff\xfe")
    for command in (["replay"], ["bisect"], ["trace", "--html", "out.html"]):
        code, error = run_main([*command, str(path)], capsys)
        assert code == ExitCode.USAGE
        assert "cannot be read" in error and error.count("\n") == 1


def test_bug_of_ours_prints_its_traceback_and_exits_70(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*arguments: Any, **options: Any) -> None:
        raise KeyError("a bug")

    monkeypatch.setattr(check, "run_suites", broken)
    code, error = run_main(["check", "--family", "llama", "--sessions", "1"], capsys)

    assert code == ExitCode.INTERNAL == 70
    assert "Traceback" in error and "KeyError: 'a bug'" in error


def test_case_file_round_trips() -> None:
    case = Case.from_json(json.dumps(CASE))

    assert Case.from_json(case.to_json()) == case


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("format", 99, "format"),
        ("layout", "paged", "paged"),
        ("max_num_batched_tokens", 0, "max_num_batched_tokens"),
        ("sessions", [{}], "prompt"),
        ("unknown_key", 1, "unknown_key"),
    ],
)
def test_case_file_with_a_wrong_value_is_refused_with_its_reason(key: str, value: object, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        Case.from_json(json.dumps({**CASE, key: value}), where="case.json")


def test_replay_on_the_exact_engine_passes_and_fails_as_the_case_does(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = str(REPOSITORY / "tests" / "regressions" / "livelock_falcon_h1.json")
    assert run_main(["replay", "--exact", file], capsys)[0] == ExitCode.PASS
    monkeypatch.setattr("scheduler.memory.Memory.has_room", lambda self, rows: True)
    monkeypatch.setattr("scheduler.policy.plan._Door.has_room", lambda self, places, rows: True)
    assert run_main(["replay", "--exact", file], capsys)[0] == ExitCode.FAIL
    assert run_main(["replay", "--exact", "--scheduler", "a:b", file], capsys)[0] == ExitCode.USAGE
