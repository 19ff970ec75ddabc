"""Generated models: the same bytes every time, and nothing else is accepted under their names."""

from __future__ import annotations

import dataclasses
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from parity.errors import UsageError
from parity.models import resolve_model
from parity.models.builder import ModelBuilder, ModelSize
from parity.models.catalogue import build_row, generated_path
from parity.models.families import Family, ModelRow, RowSource, load_families
from parity.models.tiny import BUILDERS
from parity.models.weights import bell_weights, even_weights, raw_stream
from parity.store import file_sha256

FAMILIES = load_families()
GENERATED = [
    pytest.param(
        family, row, id=f"{family.name}-{row.name}", marks=[pytest.mark.nightly] * (row.name == "mid")
    )
    for family in FAMILIES.values()
    for row in family.rows.values()
    if row.source is RowSource.GENERATED
]
RACE = "from parity.models import resolve_model; print(resolve_model('qwen3next').path)"


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SAMEBYTES_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.mark.parametrize(("family", "row"), GENERATED)
def test_writer_gives_the_pinned_bytes(family: Family, row: ModelRow, tmp_path: Path) -> None:
    build_row(family, row, tmp_path / "model.gguf")
    assert file_sha256(tmp_path / "model.gguf") == row.sha256
    assert (tmp_path / "model.gguf").stat().st_size == row.size_bytes


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_writer_gives_the_same_bytes_twice_in_one_process(family: Family, tmp_path: Path) -> None:
    for name in ("first", "second"):
        build_row(family, family.row("tiny"), tmp_path / name)
    assert (tmp_path / "first").read_bytes() == (tmp_path / "second").read_bytes()


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_tiny_model_stays_about_a_megabyte(family: Family) -> None:
    assert family.row("tiny").size_bytes < 2.5e6


def test_every_family_has_a_writer_and_every_writer_a_family() -> None:
    assert set(BUILDERS) == set(FAMILIES)


def test_weights_depend_on_seed_and_name_only() -> None:
    one = bell_weights(raw_stream(1, "a"), (4, 8), deviation=0.5)
    assert one.dtype == np.float32
    assert np.array_equal(one, bell_weights(raw_stream(1, "a"), (4, 8), deviation=0.5))
    assert not np.array_equal(one, bell_weights(raw_stream(2, "a"), (4, 8), deviation=0.5))
    assert not np.array_equal(one, bell_weights(raw_stream(1, "b"), (4, 8), deviation=0.5))


def test_bell_weights_have_the_deviation_asked_for() -> None:
    sample = bell_weights(raw_stream(3, "x"), (100_000,), deviation=0.25).astype(np.float64)
    assert abs(sample.mean()) < 0.005 and abs(sample.std() - 0.25) < 0.005
    assert np.abs(sample).max() <= 0.25 * 2 * math.sqrt(3)  # four uniforms end at twice the root of three


def test_even_weights_stay_in_their_range() -> None:
    sample = even_weights(raw_stream(3, "x"), (100_000,), low=-0.5, high=-0.05)
    assert sample.min() >= -0.5 and sample.max() < -0.05
    assert sample.max() - sample.min() > 0.449


def test_changed_weight_is_refused_with_both_digests(empty_cache: Path) -> None:
    path = resolve_model("llama").path
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    pinned = FAMILIES["llama"].row("tiny").sha256
    with pytest.raises(UsageError, match=f"wrong digest.*{pinned}") as caught:
        resolve_model("llama")
    assert file_sha256(path) in caught.value.line and "\n" not in caught.value.line


def test_writer_that_drifted_from_its_pin_leaves_no_file(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def drifted(size: ModelSize) -> ModelBuilder:
        model = build_llama(size)
        model.writer.add_description("another model")
        return model

    build_llama = BUILDERS["llama"]
    monkeypatch.setitem(BUILDERS, "llama", drifted)
    with pytest.raises(UsageError, match="writer and the manifest disagree"):
        resolve_model("llama")
    assert [path.suffix for path in (empty_cache / "models").iterdir()] == [".lock"]


def test_new_pin_never_meets_an_old_file() -> None:
    family = FAMILIES["llama"]
    row = family.row("tiny")
    assert generated_path(family, row) != generated_path(family, dataclasses.replace(row, sha256="0" * 64))


def test_parallel_processes_make_one_whole_file(empty_cache: Path) -> None:
    racers = [subprocess.Popen([sys.executable, "-c", RACE], stdout=subprocess.PIPE) for _ in range(4)]
    paths = {racer.communicate()[0].decode().strip() for racer in racers}
    assert [racer.returncode for racer in racers] == [0] * 4
    assert len(paths) == 1
    (path,) = paths
    assert file_sha256(Path(path)) == FAMILIES["qwen3next"].row("tiny").sha256
    assert {entry.suffix for entry in (empty_cache / "models").iterdir()} == {".gguf", ".lock"}
