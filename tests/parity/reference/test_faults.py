"""Faults in a model are told from rounding, and traits that a model has show in its logits."""

from __future__ import annotations

import functools
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from parity.models import resolve_model
from parity.models.facts import read_header
from parity.models.tiny.variants import VARIANTS
from parity.reference import Kernel, Weights, load_weights, run_reference
from parity.reference.comparison import compare_with_reference, expect_logits, rms
from parity.suites.truth import WAYS, answers_alone, reference_prompt
from tests.parity.reference.changes import FAULTS, LOST_AT, STATE_LOST, TRAITS, Change

PROMPT = reference_prompt(100, 256)
TIMES_THE_BOUND = 20  # what a trait must move the logits by
known_weights = functools.cache(lambda model: load_weights(resolve_model(model).path))
known_expectation = functools.cache(lambda model: expect_logits(known_weights(model), PROMPT, Kernel.PLAIN))


@functools.cache
def answer(model: str) -> np.ndarray:
    """llama.cpp's logits of the prompt."""
    return answers_alone(model, WAYS["plain"], [PROMPT], chunk_rows=512)[0]


def rows_of(table: dict[str, tuple[Change, ...]]) -> list:
    return [
        pytest.param(model, change, id=f"{model}-{change.name}")
        for model, changes in table.items()
        for change in changes
    ]


@pytest.mark.parametrize("model", FAULTS)
def test_true_model_is_not_flagged(model: str) -> None:
    assert compare_with_reference(known_weights(model), PROMPT, answer(model), Kernel.PLAIN).is_right


@pytest.mark.parametrize(("model", "fault"), rows_of(FAULTS))
def test_fault_is_told_from_rounding(model: str, fault: Change) -> None:
    with fault.applied(known_weights(model)) as weights:
        assert not compare_with_reference(weights, PROMPT, answer(model), Kernel.PLAIN).is_right


@pytest.mark.parametrize(("model", "trait"), rows_of(TRAITS))
def test_trait_shows(model: str, trait: Change) -> None:
    expected = known_expectation(model)
    with trait.applied(known_weights(model)) as weights:
        moved = rms(run_reference(weights, PROMPT).logits - expected.logits)
    assert (moved >= TIMES_THE_BOUND * expected.bound).any()


@pytest.mark.parametrize("model", ["falcon_h1:groups", "qwen3next:slow"])
def test_slow_state_remembers_over_the_whole_prompt(model: str) -> None:
    expected = known_expectation(model)
    with STATE_LOST.applied(known_weights(model)) as weights:
        moved = rms(run_reference(weights, PROMPT).logits - expected.logits)
    assert (moved[LOST_AT + 60 :] >= TIMES_THE_BOUND * expected.bound[LOST_AT + 60 :]).all()


def test_every_variant_has_traits() -> None:
    rows = {f"{family}:{name}" for family, variants in VARIANTS.items() for name in variants}
    assert set(TRAITS) == rows and rows <= set(FAULTS)


def test_variants_have_the_sizes_that_the_tiny_models_lack() -> None:
    models = {name: known_weights(name) for name in TRAITS}

    def has(test: Any) -> bool:
        return any(test(weights) for weights in models.values())

    def head(weights: Weights) -> int:
        return weights.get("attention.key_length", 0)

    assert has(lambda w: head(w) == 32) and has(lambda w: head(w) == 64)
    assert has(lambda w: w["embedding_length"] % head(w) != 0)
    assert has(lambda w: w.get("expert_count", 0) >= 16)
    assert has(lambda w: w.get("ssm.group_count", 0) > 1 and w.architecture == "falcon-h1")
    assert has(lambda w: w.get("ssm.time_step_rank", 0) == 4 * w.get("ssm.group_count", 0))
    assert has(lambda w: w.architecture == "falcon-h1" and "blk.0.ssm_norm" not in w.tensors)
    assert has(lambda w: 0 < w.get("rope.dimension_count", 0) < head(w) and w.architecture == "qwen3next")
    assert has(lambda w: w.get("expert_shared_count", 0) > 1)
    assert has(lambda w: "blk.0.attn_q_a" in w.tensors)
    assert has(lambda w: "output" not in w.tensors and w.architecture != "gemma2")


# -- the same from the other side: llama.cpp runs a changed file, the reference has the true one

FORMATS = {int: "<I", float: "<f"}
FILE_FAULTS = {
    "gemma2": {
        "attention.sliding_window": 15,
        "attn_logit_softcapping": 5.0,
        "attention.layer_norm_rms_epsilon": 1e-4,
    },
    "gemma2:capped": {"attention.sliding_window": 25, "final_logit_softcapping": 6.0},
    "falcon_h1:groups": {"rope.freq_base": 1.01e6, "rope.scaling.factor": 2.02},
    "llama:scaled": {"rope.freq_base": 5.05e5, "attention.layer_norm_rms_epsilon": 1e-4},
    "llama:experts": {"expert_used_count": 3, "rope.scaling.original_context_length": 36},
    "deepseek2:v3": {"expert_weights_scale": 2.51, "expert_group_used_count": 3, "expert_gating_func": 1},
    "qwen3next:partial": {"rope.dimension_count": 6, "expert_used_count": 3},
}


def write_changed(model: str, key: str, value: int | float, target: Path) -> None:
    """The model's file with one number of its metadata changed."""
    source = resolve_model(model).path
    header = read_header(source)
    field = header.fields[f"{header.architecture}.{key}"]
    raw = struct.pack(FORMATS[type(value)], value)
    data = bytearray(source.read_bytes())
    assert data[field.stop - len(raw) : field.stop] == struct.pack(FORMATS[type(value)], field.value)
    data[field.stop - len(raw) : field.stop] = raw
    target.write_bytes(data)


@pytest.mark.parametrize(
    ("model", "key", "value"),
    [(model, key, value) for model, changes in FILE_FAULTS.items() for key, value in changes.items()],
)
def test_fault_in_the_file_is_told_from_rounding(
    model: str, key: str, value: int | float, tmp_path: Path
) -> None:
    path = tmp_path / "changed.gguf"
    write_changed(model, key, value, path)
    (found,) = answers_alone(model, WAYS["plain"], [PROMPT], chunk_rows=512, path=path)
    assert not compare_with_reference(known_weights(model), PROMPT, found, Kernel.PLAIN).is_right
    # And it is that number: with it the reference is right again.
    assert compare_with_reference(load_weights(path), PROMPT, found, Kernel.PLAIN).is_right
