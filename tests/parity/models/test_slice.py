"""Layer slices: tensors byte for byte, layers counted from 0, metadata rewritten, whole or nothing."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import gguf
import numpy as np
import pytest

from parity.cli import main
from parity.errors import ExitCode, UsageError
from parity.models import resolve_model
from parity.models.facts import read_facts
from parity.models.families import load_families
from parity.models.slice import LayerRange, slice_model

# One middle range for each family: it starts on another layer kind than the model, where there is one.
MIDDLES = {"llama": (2, 5), "deepseek2": (1, 4), "gemma2": (3, 6), "falcon_h1": (2, 5), "qwen3next": (7, 13)}


def tensor_bytes(path: Path) -> dict[str, tuple[gguf.GGMLQuantizationType, tuple[int, ...], bytes]]:
    """All tensors by name, read by the ``gguf`` package: a reader that shares nothing with the slicer."""
    return {
        tensor.name: (tensor.tensor_type, tuple(tensor.shape), np.asarray(tensor.data).tobytes())
        for tensor in gguf.GGUFReader(path).tensors
    }


def metadata(path: Path) -> dict[str, object]:
    fields = gguf.GGUFReader(path).fields
    return {key: field.contents() for key, field in fields.items() if not key.startswith("GGUF.")}


@pytest.mark.parametrize("name", load_families())
def test_slice_of_all_layers_is_the_model(name: str, tmp_path: Path) -> None:
    source, target = resolve_model(name).path, tmp_path / "all.gguf"
    facts = read_facts(source)
    slice_model(source, LayerRange(start=0, stop=facts.n_layer), target)
    assert tensor_bytes(target) == tensor_bytes(source)
    before, after = metadata(source), metadata(target)
    assert {key: after[key] for key in before} == before
    assert set(after) - set(before) <= {
        "gemma2.attention.sliding_window_pattern",
        "qwen3next.attention.recurrent_layers",
    }
    assert read_facts(target).layers == facts.layers


@pytest.mark.parametrize("spec", [*MIDDLES, "llama:q4_k_m", "qwen3next:q4_k_m", "deepseek2:q8_0"])
def test_middle_layers_are_copied_byte_for_byte_and_counted_from_zero(spec: str, tmp_path: Path) -> None:
    source, target = resolve_model(spec).path, tmp_path / "middle.gguf"
    start, stop = MIDDLES[spec.partition(":")[0]] if ":" not in spec else (1, 4)
    slice_model(source, LayerRange(start=start, stop=stop), target)
    wanted = {}
    for tensor, content in tensor_bytes(source).items():
        kind, _, rest = tensor.partition(".")
        layer, _, part = rest.partition(".")
        if kind != "blk":
            wanted[tensor] = content
        elif start <= int(layer) < stop:
            wanted[f"blk.{int(layer) - start}.{part}"] = content
    assert tensor_bytes(target) == wanted


@pytest.mark.parametrize("name", load_families())
def test_every_possible_stage_has_its_layers_kinds(name: str, tmp_path: Path) -> None:
    source, target = resolve_model(name).path, tmp_path / "stage.gguf"
    facts = read_facts(source)
    for start in range(facts.n_layer):
        for stop in (start + 1, facts.n_layer):
            slice_model(source, LayerRange(start=start, stop=stop), target)
            stage = read_facts(target)
            assert stage.layers == facts.layers[start:stop]
            assert stage.n_layer == stop - start
            assert stage.n_leading_dense == min(max(facts.n_leading_dense - start, 0), stop - start)
            assert stage.slot_bytes() == sum(facts.layer_slot_bytes(layer) for layer in range(start, stop))


def test_per_layer_metadata_is_rewritten_and_the_rest_kept(tmp_path: Path) -> None:
    changes = {
        "llama": {"llama.block_count": 3},
        "deepseek2": {
            "deepseek2.block_count": 3,
            "deepseek2.leading_dense_block_count": 1,
            "deepseek2.attention.q_lora_rank": 0,
        },
        "gemma2": {
            "gemma2.block_count": 3,
            "gemma2.attention.sliding_window_pattern": [False, True, False],
        },
        "falcon_h1": {"falcon-h1.block_count": 3},
        "qwen3next": {
            "qwen3next.block_count": 6,
            "qwen3next.attention.recurrent_layers": [False, True, True, True, False, True],
        },
    }
    for name, (start, stop) in MIDDLES.items():
        source, target = resolve_model(name).path, tmp_path / f"{name}.gguf"
        slice_model(source, LayerRange(start=start, stop=stop), target)
        assert metadata(target) == metadata(source) | changes[name]


def test_lite_rank_is_written_where_the_model_left_it_to_its_layer_count(tmp_path: Path) -> None:
    source = tmp_path / "source.gguf"
    data = resolve_model("deepseek2").path.read_bytes()
    source.write_bytes(data.replace(b"attention.q_lora_rank", b"attention.q_xxxx_rank"))
    slice_model(source, LayerRange(start=0, stop=2), tmp_path / "stage.gguf")
    assert metadata(tmp_path / "stage.gguf")["deepseek2.attention.q_lora_rank"] == 0


def test_value_per_layer_is_cut_to_the_stages_layers(tmp_path: Path) -> None:
    source, target = tmp_path / "source.gguf", tmp_path / "stage.gguf"
    writer = gguf.GGUFWriter(source, "llama")
    writer.add_block_count(4)
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_head_count([4, 2, 4, 2])
    writer.add_head_count_kv([2, 1, 4, 2])
    writer.add_key_length(8)
    writer.add_value_length(8)
    writer.add_rope_dimension_sections([1, 2, 3, 4])  # four values, but not one per layer
    writer.add_tensor("token_embd.weight", np.ones((4, 32), np.float32))
    writer.add_tensor("blk.1.attn_norm.weight", np.ones(32, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    slice_model(source, LayerRange(start=1, stop=3), target)
    after = metadata(target)
    assert after["llama.attention.head_count"] == [2, 4]
    assert after["llama.attention.head_count_kv"] == [1, 4]
    assert after["llama.rope.dimension_sections"] == [1, 2, 3, 4]
    assert read_facts(target).n_key_values == (8, 32)


def test_slices_of_slices_are_slices(tmp_path: Path) -> None:
    source = resolve_model("qwen3next").path
    slice_model(source, LayerRange(start=3, stop=12), tmp_path / "outer.gguf")
    slice_model(tmp_path / "outer.gguf", LayerRange(start=4, stop=8), tmp_path / "inner.gguf")
    slice_model(source, LayerRange(start=7, stop=11), tmp_path / "direct.gguf")
    assert (tmp_path / "inner.gguf").read_bytes() == (tmp_path / "direct.gguf").read_bytes()


def test_same_slice_is_the_same_bytes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        slice_model(resolve_model("gemma2").path, LayerRange(start=3, stop=6), tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_large_file_is_streamed_in_small_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("parity.models.slice.COPY_BYTES", 1 << 16)
    source, reports = resolve_model("qwen3next:wide").path, []
    tracemalloc.start()
    slice_model(
        source,
        LayerRange(start=0, stop=8),
        tmp_path / "all.gguf",
        report=lambda done, total: reports.append((done, total)),
    )
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert source.stat().st_size > 40e6 and peak_bytes < 2e6
    assert len(reports) > 500 and reports[-1][0] == reports[-1][1]
    assert [done for done, _ in reports] == sorted(done for done, _ in reports)


def test_interrupted_slice_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    target = tmp_path / "stage.gguf"
    target.write_bytes(b"old")
    with pytest.raises(KeyboardInterrupt):
        slice_model(resolve_model("llama").path, LayerRange(start=0, stop=2), target, report=interrupt)
    assert target.read_bytes() == b"old" and list(tmp_path.iterdir()) == [target]


@pytest.mark.parametrize("layers", ["0:7", "6:7", "3:3", "4:2", "1", "a:b", "-1:2", ""])
def test_command_refuses_layers_that_are_not_there(
    layers: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["slice", "llama", f"--layers={layers}", "--out", str(tmp_path / "out.gguf")])
    assert stopped.value.code == ExitCode.USAGE
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1 and layers in lines[0]
    assert list(tmp_path.iterdir()) == []


def test_command_writes_the_slice_and_says_what_is_in_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "stage.gguf"
    with pytest.raises(SystemExit) as stopped:
        main(["slice", "qwen3next", "--layers", "4:8", "--out", str(target)])
    assert stopped.value.code == ExitCode.PASS
    assert "(recurrent, full)" in capsys.readouterr().out
    assert read_facts(target).n_layer == 4


def test_part_of_a_split_file_is_refused(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "part.gguf", "llama")
    writer.add_block_count(4)
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_head_count(4)
    writer.add_key_value("split.count", 3, gguf.GGUFValueType.UINT16)
    writer.add_key_value("split.tensors.count", 40, gguf.GGUFValueType.INT32)
    writer.add_tensor("token_embd.weight", np.ones((4, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UsageError, match="one part of several.*1 tensors of 40"):
        slice_model(tmp_path / "part.gguf", LayerRange(start=0, stop=1), tmp_path / "out.gguf")
