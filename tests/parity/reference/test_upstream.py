"""What the locked llama.cpp does otherwise than the published models, each with a minimal file.

Each test states today's behaviour: when one fails, upstream has changed, and the README's known violations
and the reference's note on it are to be changed as well.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from parity.models.builder import ModelBuilder, ModelSize
from parity.models.tiny.variants import deepseek2_v2, falcon_h1_bare
from parity.processes import WorkerDied
from parity.reference import Kernel, load_weights, operations, run_reference
from parity.reference.comparison import compare_with_reference, rms
from parity.suites.truth import WAYS, answers_alone, reference_prompt

SMALL = ModelSize(width=64, n_layer=2, ffn_dim=32)
PROMPT = reference_prompt(40, 256)


def write(path: Path, build: Callable[[ModelSize], ModelBuilder], *added: tuple[str, int]) -> Path:
    """``build``'s smallest model, with added tensors of small random values."""
    model = build(SMALL)
    for name, rows in added:
        model.even(name, rows, low=1.0, high=2.0)
    model.save(path)
    return path


def ask(family: str, path: Path) -> np.ndarray:
    return answers_alone(family, WAYS["plain"], [PROMPT], chunk_rows=512, path=path)[0]


def test_float32_cells_are_cast_to_float16_for_flash_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    from parity.suites import truth

    for family in ("llama", "deepseek2", "gemma2", "falcon_h1", "qwen3next"):
        arguments = {"shadow": False, "prompts": [list(PROMPT)], "chunk_rows": 20}
        arguments |= {"path": str(truth.resolve_model(family).path), "profile": truth.AS_STORED.to_json()}
        half = truth.answers_here({**arguments, "way": "unified"})
        monkeypatch.setitem(WAYS, "wide", replace(WAYS["unified"], name="wide", kv_type="f32"))
        assert truth.answers_here({**arguments, "way": "wide"}) == half, family
        monkeypatch.setitem(WAYS, "off", replace(WAYS["streams"], name="off", kv_type="f32"))
        assert truth.answers_here({**arguments, "way": "off"}) != truth.answers_here(
            {**arguments, "way": "streams"}
        ), family


def test_falcon_h1_without_its_optional_convolution_bias_ends_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loader takes the bias for optional; the graph adds it in any case."""
    assert np.isfinite(ask("falcon_h1", write(tmp_path / "with.gguf", falcon_h1_bare))).all()
    declare = ModelBuilder._declare

    def without(self: Any, name: str, *rest: Any) -> None:
        if not name.endswith("ssm_conv1d.bias"):
            declare(self, name, *rest)

    monkeypatch.setattr(ModelBuilder, "_declare", without)
    path = write(tmp_path / "without.gguf", falcon_h1_bare)
    with pytest.raises(WorkerDied, match="SIG"):
        ask("falcon_h1", path)
    assert np.isfinite(run_reference(load_weights(path), PROMPT).logits).all()


@pytest.mark.parametrize(("name", "rows"), [("blk.0.attn_output.bias", 64), ("rope_freqs.weight", 32)])
def test_falcon_h1_loads_an_optional_tensor_and_never_uses_it(tmp_path: Path, name: str, rows: int) -> None:
    plain = ask("falcon_h1", write(tmp_path / "plain.gguf", falcon_h1_bare))
    added = ask("falcon_h1", write(tmp_path / "added.gguf", falcon_h1_bare, (name, rows)))
    assert (plain == added).all()


def test_deepseek_v2_groups_are_chosen_by_the_rule_of_v3(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DeepSeek-V2 takes the groups with the best single experts, V3 those with the best two together."""

    def grouped(size: ModelSize) -> ModelBuilder:
        model = deepseek2_v2(size)
        model.writer.add_expert_group_count(4)
        model.writer.add_expert_group_used_count(2)
        return model

    path = write(tmp_path / "grouped.gguf", grouped)
    found, weights = ask("deepseek2", path), load_weights(path)
    assert compare_with_reference(weights, PROMPT, found, Kernel.PLAIN).is_right
    monkeypatch.setattr(operations, "GROUP_SCORE_EXPERTS", 1)
    published = run_reference(weights, PROMPT).logits
    assert rms(found - published).max() > 0.05 * published.std()
    assert not compare_with_reference(weights, PROMPT, found, Kernel.PLAIN).is_right
