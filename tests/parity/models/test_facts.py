"""Facts from metadata: they say what llama.cpp allocates, for every family, both KV types and every stage."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from parity.errors import UsageError
from parity.models import resolve_model
from parity.models.facts import LayerKind, read_facts
from parity.models.families import MemoryComponent, load_families

N_CELLS, N_SLOTS = 65536, 256
MIB = 1 << 20
# Opens contexts and prints, as JSON, what llama.cpp's log says about their memory.
PRINT_ALLOCATIONS = f"""
import ctypes, json, sys
from parity.engines import llama
library, lines = llama.library(), []

@library.llama_log_callback
def keep(level, text, _):
    lines.append(text.decode(errors="replace"))

library.llama_log_set(keep, ctypes.c_void_p(0))
logs = {{}}
for name, path in zip(sys.argv[1::2], sys.argv[2::2]):
    model = llama.LlamaModel(path, use_extra_bufts=False)
    for kv_type in ("f16", "f32"):
        lines.clear()
        settings = llama.ContextSettings(n_ctx={N_CELLS}, n_seq_max={N_SLOTS}, kv_type=kv_type)
        context = llama.LlamaContext(model, settings)
        logs[name + " " + kv_type] = list(lines)
        context.close()
    model.close()
print(json.dumps(logs))
"""


@pytest.fixture(scope="module")
def allocations() -> dict[str, dict[str, list[float]]]:
    """MiB by family and KV type: ``kv`` for each cache (full, window), ``r`` and ``s`` of the states."""
    arguments = [item for name in load_families() for item in (name, str(resolve_model(name).path))]
    done = subprocess.run(
        [sys.executable, "-c", PRINT_ALLOCATIONS, *arguments], capture_output=True, text=True, check=True
    )
    found = {}
    for case, lines in json.loads(done.stdout).items():
        text = "".join(lines)
        found[case] = {
            "kv": [float(size) for size in re.findall(r"llama_kv_cache: size = +([\d.]+) MiB", text)],
            "r": [float(size) for size in re.findall(r"R \(f32\): +([\d.]+) MiB", text)],
            "s": [float(size) for size in re.findall(r"S \(f32\): +([\d.]+) MiB", text)],
        }
    return found


@pytest.mark.parametrize("kv_type", ["f16", "f32"])
@pytest.mark.parametrize("name", load_families())
def test_cell_and_slot_bytes_are_what_llama_cpp_allocates(
    name: str, kv_type: str, allocations: dict[str, dict[str, list[float]]]
) -> None:
    facts, found = read_facts(resolve_model(name).path), allocations[f"{name} {kv_type}"]
    cells = [facts.attention_cell_bytes(kv_type)]
    if facts.window_tokens is not None:
        cells.append(facts.window_cell_bytes(kv_type))
    # The log has two decimals; one byte more per cell would be 0.06 MiB more.
    assert found["kv"] == [round(n_bytes * N_CELLS / MIB, 2) for n_bytes in cells]
    conv, state = 4 * sum(facts.n_conv_values), 4 * sum(facts.n_state_values)
    assert found["r"] == [round(conv * N_SLOTS / MIB, 2)] * facts.is_hybrid
    assert found["s"] == [round(state * N_SLOTS / MIB, 2)] * facts.is_hybrid
    assert facts.slot_bytes() == conv + state


@pytest.mark.parametrize("family", load_families().values(), ids=load_families())
def test_facts_agree_with_the_manifest(family: str) -> None:
    for row in ("tiny", "wide"):
        facts = read_facts(resolve_model(f"{family.name}:{row}").path)
        assert facts.architecture == family.architecture
        assert facts.n_layer == family.row(row).n_layer == len(facts.layers)
        assert facts.is_hybrid is family.is_hybrid
        assert (facts.window_tokens is not None) is (MemoryComponent.WINDOW_CELLS in family.components)
        assert facts.is_mla is (family.kv_class == "mla")
        assert not facts.has_k_quants and facts.tensor_types == {"F32"}


def test_layer_kinds_are_those_of_the_architecture() -> None:
    full, window, recurrent = LayerKind.FULL, LayerKind.WINDOW, LayerKind.RECURRENT
    kinds = {name: read_facts(resolve_model(name).path).layers for name in load_families()}
    assert kinds["llama"] == (full,) * 6
    assert kinds["deepseek2"] == (full,) * 6
    assert kinds["gemma2"] == (window, full) * 4
    assert kinds["falcon_h1"] == (LayerKind.FULL_AND_RECURRENT,) * 6
    assert kinds["qwen3next"] == (recurrent, recurrent, recurrent, full) * 4


def test_mla_caches_the_latent_and_no_values() -> None:
    facts = read_facts(resolve_model("deepseek2").path)
    assert facts.n_key_values == (32 + 8,) * 6 and facts.n_value_values == (0,) * 6


def test_only_the_dense_lead_of_a_model_with_experts_is_labelled() -> None:
    facts = read_facts(resolve_model("deepseek2").path)
    labels = [facts.layer_label(layer) for layer in range(facts.n_layer)]
    assert labels == ["full/dense"] * 2 + ["full/experts"] * 4
    assert read_facts(resolve_model("qwen3next").path).layer_label(0) == "recurrent"


def test_gemma2_tells_the_scale_of_its_embeddings() -> None:
    assert read_facts(resolve_model("gemma2").path).embedding_scale == 8.0
    assert read_facts(resolve_model("gemma2:odd_scale").path).embedding_scale == 12.0
    assert read_facts(resolve_model("llama").path).embedding_scale == 1.0


def test_window_is_sixteen_tokens() -> None:
    assert read_facts(resolve_model("gemma2").path).window_tokens == 16


def test_unknown_architecture_is_refused(tmp_path: Path) -> None:
    data = resolve_model("llama").path.read_bytes()
    (tmp_path / "x.gguf").write_bytes(data.replace(b"\x05\0\0\0\0\0\0\0llama", b"\x05\0\0\0\0\0\0\0mamba", 1))
    with pytest.raises(UsageError, match="architecture 'mamba' is not supported"):
        read_facts(tmp_path / "x.gguf")


def test_unknown_kv_type_is_refused() -> None:
    with pytest.raises(UsageError, match="unknown kv_type 'q8_0'"):
        read_facts(resolve_model("llama").path).attention_cell_bytes("q8_0")
