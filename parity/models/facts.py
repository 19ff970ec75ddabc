"""What a model will cost and how its layers remember, from GGUF metadata alone: no weight is read.

The formulas are llama.cpp's: ``llama_kv_cache`` allocates ``n_embd_k_gqa`` and, unless the model is MLA,
``n_embd_v_gqa`` values per cell and layer; ``llama_hparams::n_embd_r`` and ``n_embd_s`` float32 values per
recurrent slot and layer.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from gguf import GGMLQuantizationType

from parity.errors import UsageError
from parity.models.gguf import MAX_LAYERS, GgufHeader, read_header, shown

KV_VALUE_BYTES = {"f16": 2, "f32": 4}
STATE_VALUE_BYTES = 4  # llama.cpp keeps recurrent states in float32
K_QUANTS = frozenset(
    kind for kind in GGMLQuantizationType if kind.name in ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")
)


class LayerKind(StrEnum):
    """How one layer remembers."""

    FULL = "full"  # attention cells
    WINDOW = "window"  # window cells
    RECURRENT = "recurrent"  # a slot
    FULL_AND_RECURRENT = "full+recurrent"  # both, side by side

    @property
    def has_attention(self) -> bool:
        return self is not LayerKind.RECURRENT

    @property
    def has_state(self) -> bool:
        return self in (LayerKind.RECURRENT, LayerKind.FULL_AND_RECURRENT)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """Facts of one GGUF file. Tuples have one entry per layer, 0 where a layer has no such memory.

    ``n_key_values`` and ``n_value_values`` are values per cell (``n_value_values`` is 0 for MLA, whose keys
    and values are one latent); ``n_conv_values`` and ``n_state_values`` are values per recurrent slot.
    """

    path: Path
    architecture: str
    n_layer: int
    n_embd: int
    n_vocab: int
    n_ctx_train: int
    layers: tuple[LayerKind, ...]
    window_tokens: int | None
    is_mla: bool
    n_key_values: tuple[int, ...]
    n_value_values: tuple[int, ...]
    n_conv_values: tuple[int, ...]
    n_state_values: tuple[int, ...]
    n_leading_dense: int
    has_experts: bool
    embedding_scale: float
    tensor_types: frozenset[str]

    @property
    def is_hybrid(self) -> bool:
        """Has it recurrent layers?"""
        return any(kind.has_state for kind in self.layers)

    def layer_label(self, layer: int) -> str:
        """The layer's kind, and where only some layers have experts, whether it has: ``full/dense``."""
        if not (self.has_experts and self.n_leading_dense):
            return str(self.layers[layer])
        return f"{self.layers[layer]}/{'dense' if layer < self.n_leading_dense else 'experts'}"

    @property
    def has_k_quants(self) -> bool:
        """Are there tensors whose products llama.cpp tiles and repacks (see the numerics profile)?"""
        return not self.tensor_types.isdisjoint(kind.name for kind in K_QUANTS)

    def layer_cell_bytes(self, layer: int, kv_type: str) -> int:
        """Bytes of one cell in one layer's cache, ``kv_type`` ``f16`` or ``f32``."""
        return (self.n_key_values[layer] + self.n_value_values[layer]) * _value_bytes(kv_type)

    def layer_slot_bytes(self, layer: int) -> int:
        """Bytes of one sequence's recurrent state (convolution and state matrix) in one layer."""
        return (self.n_conv_values[layer] + self.n_state_values[layer]) * STATE_VALUE_BYTES

    def attention_cell_bytes(self, kv_type: str) -> int:
        """Bytes of one attention cell: over all layers with full attention."""
        return sum(
            self.layer_cell_bytes(layer, kv_type)
            for layer, kind in enumerate(self.layers)
            if kind.has_attention and kind is not LayerKind.WINDOW
        )

    def window_cell_bytes(self, kv_type: str) -> int:
        """Bytes of one window cell: over all layers with a sliding window."""
        return sum(
            self.layer_cell_bytes(layer, kv_type)
            for layer, kind in enumerate(self.layers)
            if kind is LayerKind.WINDOW
        )

    def slot_bytes(self) -> int:
        """Bytes of one recurrent slot: one sequence's states over all layers that have one."""
        return sum(self.layer_slot_bytes(layer) for layer in range(self.n_layer))


def read_facts(path: Path) -> ModelFacts:
    """The facts of a GGUF file of a known architecture; ``UsageError`` for any other file."""
    return derive_facts(read_header(path))


def derive_facts(header: GgufHeader) -> ModelFacts:
    """``read_facts`` of a header that was read already."""
    if header.architecture not in LAYER_KINDS:
        raise UsageError(
            f"architecture {shown(header.architecture)} is not supported",
            where=str(header.path),
            why=f"known are {', '.join(LAYER_KINDS)}",
        )
    # Layers that only predict further tokens (multi-token prediction) come last and are no part of the model.
    n_blocks = header.integer("{arch}.block_count", least=1, most=MAX_LAYERS)
    n_layer = n_blocks - header.integer("{arch}.nextn_predict_layers", 0, most=n_blocks - 1)
    layers = LAYER_KINDS[header.architecture](header, n_layer)
    is_mla = bool(header.integer("{arch}.attention.key_length_mla", 0)) and bool(
        header.integer("{arch}.attention.value_length_mla", 0)
    )
    n_keys, n_values = _cell_values(header, n_layer)
    n_conv, n_state = _slot_values(header)
    n_embd = header.integer("{arch}.embedding_length", least=1)
    return ModelFacts(
        path=header.path,
        architecture=header.architecture,
        n_layer=n_layer,
        n_embd=n_embd,
        n_vocab=_n_vocab(header),
        n_ctx_train=header.integer("{arch}.context_length", least=1),
        layers=layers,
        window_tokens=_window_tokens(header),
        is_mla=is_mla,
        n_key_values=tuple(n_keys[i] if kind.has_attention else 0 for i, kind in enumerate(layers)),
        n_value_values=tuple(
            n_values[i] if kind.has_attention and not is_mla else 0 for i, kind in enumerate(layers)
        ),
        n_conv_values=tuple(n_conv if kind.has_state else 0 for kind in layers),
        n_state_values=tuple(n_state if kind.has_state else 0 for kind in layers),
        n_leading_dense=header.integer("{arch}.leading_dense_block_count", 0),
        has_experts=header.integer("{arch}.expert_count", 0) > 0,
        embedding_scale=math.sqrt(n_embd) if header.architecture == "gemma2" else 1.0,
        tensor_types=frozenset(tensor.type.name for tensor in header.tensors),
    )


def _value_bytes(kv_type: str) -> int:
    if kv_type not in KV_VALUE_BYTES:
        raise UsageError(f"unknown kv_type {kv_type!r}", why=f"known are {', '.join(KV_VALUE_BYTES)}")
    return KV_VALUE_BYTES[kv_type]


def _cell_values(header: GgufHeader, n_layer: int) -> tuple[list[int], list[int]]:
    """Key and value values per cell and layer: head length times key heads."""
    n_head = header.integers("{arch}.attention.head_count", n_layer)
    n_head_kv = header.integers("{arch}.attention.head_count_kv", n_layer, n_head)
    if max(n_head) == 0:
        raise header.fault("no layer has an attention head")
    head_length = header.integer("{arch}.embedding_length", least=1) // max(n_head)
    key_length = header.integer("{arch}.attention.key_length", head_length)
    value_length = header.integer("{arch}.attention.value_length", head_length)
    return [key_length * heads for heads in n_head_kv], [value_length * heads for heads in n_head_kv]


def _slot_values(header: GgufHeader) -> tuple[int, int]:
    """``n_embd_r`` (convolution) and ``n_embd_s`` (state) of Mamba-2 and gated DeltaNet layers."""
    inner, state, kernel, groups = (
        header.integer(f"{{arch}}.ssm.{name}", 0)
        for name in ("inner_size", "state_size", "conv_kernel", "group_count")
    )
    return max(0, kernel - 1) * (inner + 2 * groups * state), state * inner


def _n_vocab(header: GgufHeader) -> int:
    embedding = next((tensor for tensor in header.tensors if tensor.name == "token_embd.weight"), None)
    if embedding is None:
        raise UsageError("model lacks a tensor", where=str(header.path), why="no token_embd.weight")
    if len(embedding.shape) != 2:
        raise header.fault(f"token_embd.weight has the shape {embedding.shape}")
    return embedding.shape[1]


def _window_tokens(header: GgufHeader) -> int | None:
    if header.architecture != "gemma2":
        return None
    return header.integer("{arch}.attention.sliding_window", 4096)  # llama.cpp's default for gemma2


def _all_full(header: GgufHeader, n_layer: int) -> tuple[LayerKind, ...]:
    return (LayerKind.FULL,) * n_layer


def _alternating(header: GgufHeader, n_layer: int) -> tuple[LayerKind, ...]:
    """A boolean per layer, or a period whose last layer is full (``llama_hparams::set_swa_pattern``)."""
    key = "{arch}.attention.sliding_window_pattern"
    pattern = header.flags(key, n_layer)
    if pattern is None:
        period = header.integer(key, 2)
        pattern = [period == 0 or layer % period < period - 1 for layer in range(n_layer)]
    return tuple(LayerKind.WINDOW if windowed else LayerKind.FULL for windowed in pattern)


def _all_both(header: GgufHeader, n_layer: int) -> tuple[LayerKind, ...]:
    return (LayerKind.FULL_AND_RECURRENT,) * n_layer


def _mostly_recurrent(header: GgufHeader, n_layer: int) -> tuple[LayerKind, ...]:
    """A boolean per layer, or full attention in the last layer of each interval."""
    flags = header.flags("{arch}.attention.recurrent_layers", n_layer)
    if flags is None:
        interval = header.integer("{arch}.full_attention_interval", 4, least=1)
        flags = [(layer + 1) % interval != 0 for layer in range(n_layer)]
    return tuple(LayerKind.RECURRENT if flag else LayerKind.FULL for flag in flags)


LAYER_KINDS: dict[str, Callable[[GgufHeader, int], tuple[LayerKind, ...]]] = {
    "llama": _all_full,
    "deepseek2": _all_full,
    "gemma2": _alternating,
    "falcon-h1": _all_both,
    "qwen3next": _mostly_recurrent,
}
