"""Pinned splits: they cover every kind of cut, llama.cpp runs the stages, what it aborts on is refused."""

from __future__ import annotations

import copy
import dataclasses
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from parity.engines.llama import ContextSettings, LlamaContext, LlamaModel
from parity.errors import UsageError
from parity.models import resolve_model
from parity.models.facts import ModelFacts, derive_facts, read_facts
from parity.models.families import family_names, load_families
from parity.models.gguf import read_header
from parity.models.slice import LayerRange, slice_model
from parity.models.splits import (
    Split,
    check_split_legal,
    explain_stage_fault,
    load_splits,
    split_at,
    splits_dir,
)

MADE_SPLITS = [split for name in load_families() for split in load_splits(name) if split.row != "real"]
REAL_SPLITS = [split for name in load_families() for split in load_splits(name) if split.row == "real"]
GOOD = yaml.safe_load((splits_dir() / "qwen3next.yaml").read_text())
DECODE = """
import sys
from parity.engines.llama import ContextSettings, LlamaContext, LlamaModel
model = LlamaModel(sys.argv[1], use_extra_bufts=False)
context = LlamaContext(model, ContextSettings(n_ctx=256, n_seq_max=2, n_threads=1))
context.decode_rows([5, 6], [0, 1], [[0], [0]], [0, 1])
"""


def by_label(split: Split) -> str:
    return split.label.replace(" ", "-")


def facts_of(name: str) -> ModelFacts:
    return read_facts(resolve_model(name).path)


def real_facts(family: str) -> ModelFacts:
    """Facts of the real row's layers: the tiny model's metadata with the real layer count and dense lead."""
    row = load_families()[family].row("real")
    header = read_header(resolve_model(family).path)
    arch, fields = header.architecture, dict(header.fields)
    for key, value in ((f"{arch}.block_count", row.n_layer), (f"{arch}.leading_dense_block_count", 1)):
        if key in fields:
            fields[key] = dataclasses.replace(fields[key], value=value)
    return derive_facts(dataclasses.replace(header, fields=fields))


@pytest.mark.parametrize("split", MADE_SPLITS, ids=by_label)
def test_pinned_split_is_legal_for_the_pinned_model(split: Split) -> None:
    model = resolve_model(f"{split.family}:{split.row}")
    check_split_legal(read_facts(model.path), split, sha256=model.sha256)
    assert len(split.why) > 20


@pytest.mark.parametrize("split", REAL_SPLITS, ids=by_label)
def test_pinned_split_is_legal_for_the_real_layers(split: Split) -> None:
    check_split_legal(real_facts(split.family), split)


@pytest.mark.parametrize("row", ["tiny", "real"])
@pytest.mark.parametrize("family", load_families())
def test_splits_cover_chains_of_two_to_four_and_every_first_layer(family: str, row: str) -> None:
    splits = [split for split in load_splits(family) if split.row == row]
    assert {len(split.stages) for split in splits} >= {2, 3, 4}
    facts = facts_of(family) if row == "tiny" else real_facts(family)
    kinds = {facts.layer_label(layer) for layer in range(1, facts.n_layer)}
    starts = {label for split in splits for label in split.first_layers[1:]}
    assert starts == kinds


def test_thirds_are_among_the_real_splits() -> None:
    wanted = {
        "llama": (5, 11),
        "deepseek2": (16, 32),
        "gemma2": (9, 17),
        "falcon_h1": (8, 16),
        "qwen3next": (16, 32),
    }
    for family, boundaries in wanted.items():
        assert boundaries in {split.boundaries for split in REAL_SPLITS if split.family == family}


@pytest.mark.parametrize("split", MADE_SPLITS, ids=by_label)
def test_llama_cpp_loads_and_runs_every_stage(split: Split, tmp_path: Path) -> None:
    source = resolve_model(f"{split.family}:{split.row}").path
    hidden = np.random.default_rng(0).standard_normal((20, read_facts(source).n_embd)).astype(np.float32)
    for place, stage in enumerate(split.stages):
        slice_model(source, stage, tmp_path / "stage.gguf")
        model = LlamaModel(tmp_path / "stage.gguf", use_extra_bufts=False)
        assert model.n_layer == stage.n_layer
        settings = ContextSettings(n_ctx=256, n_seq_max=1, n_threads=1)
        context = LlamaContext(model, settings, embedding_input=place > 0)
        if place > 0:
            context.embeddings[:20] = hidden
        logits = context.decode_rows([65] * 20, range(20), [[0]] * 20, [0] * 19 + [1])
        assert np.isfinite(logits).all() and logits.std() > 0
        context.close()
        model.close()


ABORTING = [("qwen3next", 0, 3), ("qwen3next", 3, 4), ("qwen3next", 4, 6), ("gemma2", 1, 2)]
RUNNING = [("qwen3next", 2, 4), ("gemma2", 0, 1), ("gemma2", 1, 3), ("deepseek2", 0, 2), ("falcon_h1", 3, 4)]


@pytest.mark.parametrize(("family", "start", "stop"), ABORTING + RUNNING)
def test_check_refuses_exactly_the_stages_that_abort_llama_cpp(
    family: str, start: int, stop: int, tmp_path: Path
) -> None:
    source, stage = resolve_model(family).path, LayerRange(start=start, stop=stop)
    refused = explain_stage_fault(read_facts(source), stage)
    assert (refused is not None) is ((family, start, stop) in ABORTING)
    slice_model(source, stage, tmp_path / "stage.gguf")
    done = subprocess.run(
        [sys.executable, "-c", DECODE, str(tmp_path / "stage.gguf")],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"GGML_NO_BACKTRACE": "1"},
    )
    if refused:
        assert done.returncode < 0 and "GGML_ASSERT" in done.stderr
    else:
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("family", "boundaries", "said"),
    [
        ("qwen3next", [3], "stage 0 (layers 0:3) has recurrent layers only"),
        ("qwen3next", [4, 6], "stage 1 (layers 4:6) has recurrent layers only"),
        ("qwen3next", [15], "stage 1 (layers 15:16) has attention layers only"),
        ("gemma2", [7], "stage 1 (layers 7:8) has no window layer"),
    ],
)
def test_illegal_cut_is_explained(family: str, boundaries: list[int], said: str) -> None:
    facts = facts_of(family)
    with pytest.raises(UsageError) as caught:
        check_split_legal(facts, split_at(facts, boundaries, family=family, row="tiny"))
    assert said in caught.value.line and "\n" not in caught.value.line


@pytest.mark.parametrize("boundaries", [[0], [6], [7], [-1], [4, 2], [3, 3]])
def test_boundaries_outside_or_out_of_order_are_refused(boundaries: list[int]) -> None:
    with pytest.raises(UsageError, match="cut no model of 6 layers"):
        split_at(facts_of("llama"), boundaries, family="llama", row="tiny")


@pytest.mark.parametrize(
    ("stages", "said"),
    [
        ([(0, 2), (3, 6)], "layers 2:3 are in no stage before stage 1"),
        ([(0, 3), (2, 6)], "two stages overlap before stage 1"),
        ([(1, 6)], "layers 0:1 are in no stage before stage 0"),
        ([(0, 5)], "its stages end at layer 5, the model at 6"),
    ],
)
def test_gap_and_overlap_are_refused(stages: list[tuple[int, int]], said: str) -> None:
    facts = facts_of("llama")
    ranges = tuple(LayerRange(start=start, stop=stop) for start, stop in stages)
    split = dataclasses.replace(split_at(facts, [3], family="llama", row="tiny"), stages=ranges)
    with pytest.raises(UsageError, match=said):
        check_split_legal(facts, split)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"n_layer": 12}, "it is for 12 layers, the model has 16"),
        ({"sha256": "0" * 64}, "it is pinned for SHA-256 0000"),
        ({"first_layers": ("recurrent", "full")}, "its stages start on recurrent, recurrent, not on"),
        ({"recurrent_ranges": ((0, 3),)}, "the model's recurrent layers are"),
    ],
)
def test_split_of_another_model_is_refused(change: dict, said: str) -> None:
    model = resolve_model("qwen3next")
    (split,) = [split for split in MADE_SPLITS if (split.family, split.name) == ("qwen3next", "halves")]
    facts = read_facts(model.path)
    check_split_legal(facts, split, sha256=model.sha256)
    with pytest.raises(UsageError, match=said):
        check_split_legal(facts, dataclasses.replace(split, **change), sha256=model.sha256)


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ("family", "llama", "at family: it says 'llama'"),
        ("rows.tiny.n_layer", 12, "at rows.tiny.n_layer: it says 12, the manifest 16"),
        ("rows.tiny.sha256", "0" * 64, "at rows.tiny.sha256: it says 0000"),
        ("rows.tiny.sha256", "x", "at rows.tiny.sha256"),
        ("rows.tiny.recurrent", [[0]], "at rows.tiny.recurrent.0"),
        ("rows.tiny.splits", {}, "at rows.tiny.splits"),
        ("rows.tiny.splits.halves.boundaries", [], "at rows.tiny.splits.halves.boundaries"),
        ("rows.tiny.splits.halves.boundaries", [8, 8], "at rows.tiny.splits.halves.boundaries"),
        ("rows.tiny.splits.halves.boundaries", [0], "at rows.tiny.splits.halves.boundaries.0"),
        ("rows.tiny.splits.halves.boundaries", [16], "cut no model of 16 layers"),
        ("rows.tiny.splits.halves.first_layers", ["conv", "full"], "first_layers.0: 'conv' is not one of"),
        ("rows.tiny.splits.halves.why", "", "at rows.tiny.splits.halves.why"),
        ("rows.real", ..., "'real' is a required property"),
        ("rows.huge", GOOD["rows"]["tiny"], "no model row 'huge'"),
    ],
)
def test_bad_split_file_is_refused_with_file_and_key(
    path: str, value: Any, said: str, tmp_path: Path
) -> None:
    content = copy.deepcopy(GOOD)
    *parents, last = path.split(".")
    place = content
    for key in parents:
        place = place[key]
    if value is ...:
        del place[last]
    else:
        place[last] = value
    (tmp_path / "qwen3next.yaml").write_text(yaml.safe_dump(content))
    with pytest.raises(UsageError) as caught:
        load_splits("qwen3next", tmp_path)
    assert said in caught.value.line and "\n" not in caught.value.line


def test_every_family_has_a_split_file() -> None:
    assert {path.stem for path in splits_dir().glob("*.yaml")} == set(family_names())
