"""Names of models: what they mean, and what a name that means nothing costs: one line, exit code 64."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from parity.cli import main
from parity.errors import ExitCode, UsageError
from parity.models import resolve_model
from parity.models.catalogue import check_file_is_row
from parity.models.families import load_families
from parity.models.gguf import read_header


@pytest.fixture(scope="module")
def tiny_llama() -> Path:
    return resolve_model("llama").path


@pytest.mark.parametrize("name", load_families())
def test_family_name_means_its_tiny_row(name: str) -> None:
    model = resolve_model(name)
    assert (model.family, model.row) == (name, "tiny")
    assert model == resolve_model(f"{name}:tiny")
    assert read_header(model.path).architecture == load_families()[name].architecture


def test_wide_row_has_the_name_of_what_it_is() -> None:
    assert resolve_model("gemma2:f32_256") == resolve_model("gemma2:wide")


def test_generated_row_is_quantised_by_name() -> None:
    quantised = resolve_model("llama:scaled:q8_0")
    assert (quantised.family, quantised.row) == ("llama", "scaled-q8_0")
    types = {tensor.type.name for tensor in read_header(quantised.path).tensors}
    assert types == {"F32", "Q8_0"}  # norms and biases stay
    assert resolve_model("llama:scaled:f32") == resolve_model("llama:scaled")
    assert resolve_model("llama:wide:q4_0") == resolve_model("llama:q4_0")


def test_path_belongs_to_the_family_of_its_architecture(tmp_path: Path) -> None:
    target = tmp_path / "mine.gguf"
    target.write_bytes(resolve_model("falcon_h1").path.read_bytes())
    model = resolve_model(str(target))
    assert (model.family, model.row, model.path) == ("falcon_h1", "mine", target)
    assert model.sha256 == load_families()["falcon_h1"].row("tiny").sha256


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("mamba", "unknown model 'mamba'"),
        ("llama:huge", "no model row 'huge'"),
        ("mid:q3_k", "unknown quantisation 'q3_k'"),
        ("llama:scaled:", "unknown quantisation ''"),
        ("llama:scaled:q8", "unknown quantisation 'q8'"),
        ("llama:huge:q8_0", "no model row 'huge'"),
        ("llama:real:q8_0", "'real' of llama is not quantised here: it has the quantisation of its file"),
        ("llama:real", "model llama:real is not here"),
        ("nowhere/model.gguf", "model not found"),
    ],
)
def test_name_without_a_model_costs_one_line(
    spec: str, said: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["slice", spec, "--layers", "0:1", "--out", str(tmp_path / "out.gguf")])
    assert stopped.value.code == ExitCode.USAGE
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1 and said in lines[0]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("keep", [0, 3, 40, 3_000, 500_000, -1], ids=lambda keep: f"{keep}-bytes")
def test_cut_file_is_refused_wherever_it_is_cut(keep: int, tiny_llama: Path, tmp_path: Path) -> None:
    target = tmp_path / "cut.gguf"
    target.write_bytes(tiny_llama.read_bytes()[:keep])
    with pytest.raises(UsageError, match=r"not a usable GGUF file in .*cut\.gguf"):
        resolve_model(str(target))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda data: b"GGML" + data[4:], "magic"),
        (lambda data: data[:4] + b"\x00\x00\x00\x03" + data[8:], "version"),
        (lambda data: data[:8] + b"\xff" * 8 + data[16:], "count"),
        (lambda data: data.replace(b"general.architecture", b"general.architectura"), "general.architecture"),
        (lambda data: data.replace(b"\x05\0\0\0\0\0\0\0llama", b"\x05\0\0\0\0\0\0\0mamba", 1), "no family"),
    ],
    ids=["magic", "version", "count", "architecture-missing", "architecture-unknown"],
)
def test_damaged_file_says_what_is_wrong(
    change: Callable[..., Any], said: str, tiny_llama: Path, tmp_path: Path
) -> None:
    target = tmp_path / "damaged.gguf"
    target.write_bytes(change(tiny_llama.read_bytes()))
    with pytest.raises(UsageError, match=said):
        resolve_model(str(target))


def test_models_command_lists_every_row_and_tells_the_unlocked(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["models", "--json"])
    assert stopped.value.code == ExitCode.PASS
    listed = {entry["spec"]: entry for entry in json.loads(capsys.readouterr().out)}
    rows = {
        f"{family.name}:{row.name}": row
        for family in load_families().values()
        for row in family.rows.values()
    }
    assert set(listed) == set(rows)
    for spec, row in rows.items():
        assert listed[spec]["locked"] is row.locked
        assert listed[spec]["state"] == "unlocked" or row.locked


def test_models_command_writes_the_tiny_models(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SAMEBYTES_CACHE", str(tmp_path))
    with pytest.raises(SystemExit):
        main(["models", "--write"])
    out = capsys.readouterr().out
    for family in load_families().values():
        name = f"{family.name}-tiny-{family.row('tiny').sha256[:12]}.gguf"
        assert (tmp_path / "models" / name).is_file() and name in out
    assert not list((tmp_path / "models").glob("*-wide-*.gguf"))


def test_models_command_refuses_an_unknown_family(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["models", "--family", "rwkv"])
    assert stopped.value.code == ExitCode.USAGE
    assert "unknown family 'rwkv'" in capsys.readouterr().err


def test_downloaded_file_must_have_its_rows_structure(tmp_path: Path) -> None:
    families = load_families()
    gemma2 = resolve_model("gemma2").path
    check_file_is_row(gemma2, families["gemma2"], families["gemma2"].row("tiny"))
    with pytest.raises(UsageError, match="its architecture is 'gemma2', the family's is 'llama'"):
        check_file_is_row(gemma2, families["llama"], families["llama"].row("tiny"))
    with pytest.raises(UsageError, match="it has 8 layers, the row says 26"):
        check_file_is_row(gemma2, families["gemma2"], families["gemma2"].row("real"))


def test_file_from_before_latent_caches_is_no_mla_row(tmp_path: Path) -> None:
    family = load_families()["deepseek2"]
    data = resolve_model("deepseek2").path.read_bytes()
    (tmp_path / "old.gguf").write_bytes(
        data.replace(b"attention.key_length_mla", b"attention.key_length_xxx")
    )
    with pytest.raises(UsageError, match="without the tensors for a latent cache"):
        check_file_is_row(tmp_path / "old.gguf", family, family.row("tiny"))
