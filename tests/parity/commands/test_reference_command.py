"""``parity reference``: table, JSON, picture, exit codes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from parity.cli import commands, main
from parity.gate.jobs import run_job
from parity.gate.plan import GateJob
from parity.gate.result import CheckKind
from parity.models import resolve_model
from parity.models.families import load_families
from parity.records import Verdict
from parity.suites import truth


def run(*words: str) -> tuple[int, str]:
    done = CliRunner().invoke(commands, ["reference", *words], standalone_mode=False)
    assert done.exception is None, done.exception
    return int(done.return_value), done.output


@pytest.fixture
def wrong_unified(monkeypatch: pytest.MonkeyPatch) -> None:
    """llama.cpp's row kernel answers as if one logit of position 4 were larger by 3."""
    true_answers = truth.answers_alone

    def spoilt(model: str, way: truth.Way, prompts: Any, **rest: Any) -> list[np.ndarray]:
        answers = [answer.copy() for answer in true_answers(model, way, prompts, **rest)]
        if way.name == "unified":
            answers[-1][4, 7] += 3
        return answers

    monkeypatch.setattr(truth, "answers_alone", spoilt)


def test_json_has_a_distance_for_each_way_and_the_picture_is_drawn(tmp_path: Path) -> None:
    picture = tmp_path / "new" / "truth.svg"
    code, text = run("llama", "--prompt-tokens", "1,12", "--json", "--out", str(picture))
    assert code == 0
    rows = {row["way"]: row for row in json.loads(text)}
    assert list(rows) == ["plain", "streams", "unified", "stock"]
    assert [row["verdict"] for row in rows.values()] == ["pass", "pass", "pass", "unknown"]
    assert all(row["positions"] == 13 and row["model"] == "llama" for row in rows.values())
    assert rows["plain"]["same_bits"] and rows["unified"]["same_bits"]
    assert 0 < rows["plain"]["rms"] < 1e-4 < rows["unified"]["rms"] < 0.1
    assert rows["stock"]["worst_of_bound"] is None and not rows["stock"]["beyond"]
    assert picture.read_text().count("<svg") == 1


def test_path_of_a_file_is_a_model_too() -> None:
    code, text = run(str(resolve_model("llama:scaled").path), "--prompt-tokens", "5", "--way", "plain")
    assert code == 0 and "yes" in text


def test_variants_are_every_small_model_beside_the_tiny_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(
        "parity.commands.reference.measure_distances", lambda model, **rest: asked.append(model) or []
    )
    assert run("--variants")[0] == 0
    generated = {
        f"{family.name}:{name}"
        for family in load_families().values()
        for name, row in family.rows.items()
        if row.variant
    }
    assert len(asked) == len(set(asked)) == 3 * len(generated) + 3 * len(load_families()) == 45
    assert set(asked[: len(generated)]) == generated
    assert {"llama:scaled:q8_0", "qwen3next:slow:q4_0", "gemma2:q4_k_m"} <= set(asked)


def test_wrong_answer_is_named_with_its_position_and_fails(wrong_unified: None) -> None:
    code, text = run("llama", "--prompt-tokens", "3,9", "--way", "plain", "--way", "unified")
    assert code == 1
    (line,) = [line for line in text.splitlines() if "from the reference, at most" in line]
    assert line.startswith("llama unified: prompt of 9, position 4: ")


def test_gate_check_fails_with_the_position_and_passes_without(
    wrong_unified: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "parity.gate.jobs.measure_distances", lambda model: truth.measure_distances(model, prompt_tokens=(9,))
    )
    job = GateJob(kind=CheckKind.TRUTH, name="llama truth", family="llama", model="llama")
    check = run_job(job)
    assert check.verdict is Verdict.FAIL
    assert "unified: prompt of 9, position 4" in check.reason
    monkeypatch.undo()
    monkeypatch.setattr(
        "parity.gate.jobs.measure_distances", lambda model: truth.measure_distances(model, prompt_tokens=(9,))
    )
    check = run_job(replace(job, family="gemma2", model="gemma2"))
    assert check.verdict is Verdict.PASS and not check.reason
    assert check.marks["positions"] == 27 and "plain: same bits in other chunks" in check.explanation


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nobody"], "unknown model 'nobody'"),
        (["llama", "--prompt-tokens", "0"], "needs numbers from 1 on"),
        (["llama", "--prompt-tokens", "seven"], "needs numbers from 1 on"),
        (["llama", "--variants"], "--variants names its models itself"),
        (["llama", "--out", "x.jpg"], "end --out in .png or .svg"),
    ],
)
def test_bad_input_costs_one_line(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["reference", *words])
    captured = capsys.readouterr()
    assert caught.value.code == 64 and said in captured.err and captured.err.count("\n") == 1


def test_model_that_does_not_fit_into_memory_is_refused_before_it_is_read(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(truth.psutil, "virtual_memory", lambda: SimpleNamespace(available=1_000_000))
    monkeypatch.setattr(truth, "load_weights", lambda path: pytest.fail("read"))
    with pytest.raises(SystemExit) as caught:
        main(["reference", "llama"])
    assert caught.value.code == 64
    assert "its weights need 0.0 GB, 0.0 GB are free" in capsys.readouterr().err
