"""Quantised variants: made once by llama.cpp's own quantiser, kept, verified, loadable."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from parity.engines.llama import ContextSettings, LlamaContext, LlamaModel, quantise_model
from parity.errors import UsageError
from parity.models import resolve_model
from parity.models.facts import read_facts
from parity.models.families import load_families
from parity.models.quantise import FILE_TYPES
from parity.store import file_sha256, sidecar, verified_sha256

MAIN_TYPE = {"q8_0": "Q8_0", "q4_0": "Q4_0", "q4_k_m": "Q4_K"}


@pytest.mark.quantised
@pytest.mark.parametrize("file_type", FILE_TYPES)
@pytest.mark.parametrize("family", load_families())
def test_variant_has_its_types_and_runs(family: str, file_type: str) -> None:
    model_file = resolve_model(f"{family}:{file_type}")
    facts = read_facts(model_file.path)
    assert MAIN_TYPE[file_type] in facts.tensor_types
    assert facts.has_k_quants is ("Q4_K" in facts.tensor_types or "Q6_K" in facts.tensor_types)
    assert facts.layers == read_facts(resolve_model(f"{family}:wide").path).layers
    model = LlamaModel(model_file.path, use_extra_bufts=False)
    context = LlamaContext(model, ContextSettings(n_ctx=256, n_seq_max=1, n_threads=1))
    logits = context.decode_rows(range(20, 50), range(30), [[0]] * 30, [0] * 29 + [1])
    context.close()
    model.close()
    assert np.isfinite(logits).all() and logits.std() > 0.5


def test_variant_is_made_once_and_its_digest_recorded() -> None:
    first = resolve_model("llama:q4_0")
    made_ns = first.path.stat().st_mtime_ns
    assert resolve_model("llama:q4_0") == first
    assert first.path.stat().st_mtime_ns == made_ns
    note = json.loads(sidecar(first.path).read_text())
    assert note["sha256"] == first.sha256 == file_sha256(first.path)
    assert note["source_sha256"] == load_families()["llama"].row("wide").sha256


def test_changed_variant_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAMEBYTES_CACHE", str(tmp_path))
    path = resolve_model("llama:q4_0").path
    data = bytearray(path.read_bytes())
    data[-100] ^= 1
    path.write_bytes(data)
    with pytest.raises(UsageError, match="quantised model has changed"):
        resolve_model("llama:q4_0")


def test_variant_without_its_record_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAMEBYTES_CACHE", str(tmp_path))
    first = resolve_model("llama:q4_0")
    sidecar(first.path).unlink()  # as if the process had died between the two
    first.path.write_bytes(b"half")
    assert resolve_model("llama:q4_0") == first


def test_quantiser_gives_the_same_bytes_with_any_number_of_threads(tmp_path: Path) -> None:
    source = resolve_model("llama:wide").path
    for n_threads in (1, 2):
        quantise_model(source, tmp_path / str(n_threads), int(FILE_TYPES["q4_k_m"]), n_threads)
    assert (tmp_path / "1").read_bytes() == (tmp_path / "2").read_bytes()


def test_quantiser_refuses_what_is_no_model(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x.gguf").write_bytes(b"no model")
    with pytest.raises(UsageError, match="could not quantise"):
        quantise_model(tmp_path / "x.gguf", tmp_path / "y.gguf", int(FILE_TYPES["q8_0"]), 1)
    capfd.readouterr()


def test_resolving_a_made_variant_never_loads_llama_cpp() -> None:
    resolve_model("llama:q4_0")
    code = (
        "import sys; from parity.models import resolve_model; resolve_model('llama:q4_0');"
        "sys.exit('llama_cpp' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_digest_of_a_large_file_is_remembered_until_the_file_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SAMEBYTES_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("parity.store.ALWAYS_HASHED_BYTES", 10)
    path = tmp_path / "large"
    path.write_bytes(b"a" * 100)
    first = verified_sha256(path)
    with monkeypatch.context() as patch:
        patch.setattr("parity.store.file_sha256", lambda path: pytest.fail("read again"))
        assert verified_sha256(path) == first
    path.write_bytes(b"b" * 101)
    assert verified_sha256(path) == file_sha256(path) != first
