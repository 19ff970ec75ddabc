"""What a model will cost and how its layers remember, from GGUF metadata alone: no weight is read.

The formulas are llama.cpp's: ``llama_kv_cache`` allocates ``n_embd_k_gqa`` and, unless the model is MLA,
``n_embd_v_gqa`` values per cell and layer; ``llama_hparams::n_embd_r`` and ``n_embd_s`` float32 values per
recurrent slot and layer.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, BinaryIO

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType

from parity.errors import UsageError

# -- A GGUF file's metadata and tensor table, read without its weights and without decoding its vocabulary.
#
# The ``gguf`` package's reader makes a Python object of every token and merge (seconds for a small model,
# tens of seconds for a large one). This one skips string arrays, keeps the raw bytes' place of every field so
# that a slicer can copy them, and says clearly when a file is cut short. Format: ggml's ``docs/gguf.md``,
# versions 2 and 3, little-endian.

MAGIC = b"GGUF"
SCALAR_FORMATS = {
    GGUFValueType.UINT8: "<B",
    GGUFValueType.INT8: "<b",
    GGUFValueType.UINT16: "<H",
    GGUFValueType.INT16: "<h",
    GGUFValueType.UINT32: "<I",
    GGUFValueType.INT32: "<i",
    GGUFValueType.FLOAT32: "<f",
    GGUFValueType.BOOL: "<?",
    GGUFValueType.UINT64: "<Q",
    GGUFValueType.INT64: "<q",
    GGUFValueType.FLOAT64: "<d",
}
MAX_COUNT = 1 << 32  # a larger count can only come from a damaged file


@dataclass(frozen=True, slots=True, kw_only=True)
class HeaderField:
    """One metadata entry: its value (None for arrays of strings) and its half-open range of file bytes."""

    value: Any
    start: int
    stop: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorEntry:
    """One row of the tensor table.

    ``shape`` is ggml's (columns first); ``start`` is the data's absolute file offset.
    """

    name: str
    shape: tuple[int, ...]
    type: GGMLQuantizationType
    start: int

    @property
    def n_bytes(self) -> int:
        block, block_bytes = GGML_QUANT_SIZES[self.type]
        return math.prod(self.shape) // block * block_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufHeader:
    """Everything in a GGUF file except the tensors' data."""

    path: Path
    version: int
    alignment: int
    fields: dict[str, HeaderField]
    tensors: tuple[TensorEntry, ...]

    @property
    def architecture(self) -> str:
        return self.fields["general.architecture"].value

    def get(self, key: str, default: Any = None) -> Any:
        """A metadata value; ``{arch}`` in ``key`` stands for the architecture."""
        field = self.fields.get(key.format(arch=self.architecture))
        return default if field is None else field.value

    def need(self, key: str) -> Any:
        """``get`` of an entry that the architecture can't do without."""
        value = self.get(key)
        if value is None:
            raise UsageError(
                "model lacks metadata",
                where=str(self.path),
                why=f"no {key.format(arch=self.architecture)}",
                todo="convert it again with a current llama.cpp",
            )
        return value


def read_header(path: Path) -> GgufHeader:
    """Read metadata and tensor table; ``UsageError`` if the file isn't a whole GGUF file."""
    try:
        with open(path, "rb") as file:
            return _HeaderReader(path, file).read()
    except OSError as error:
        raise UsageError("model cannot be read", where=str(path), why=error.strerror or str(error)) from error


class _HeaderReader:
    """Walks the file once, front to back, through a buffered file object."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self._path, self._file = path, file
        self._n_file_bytes = os.fstat(file.fileno()).st_size

    def read(self) -> GgufHeader:
        if self._file.read(4) != MAGIC:
            raise self._fault("it doesn't start with the GGUF magic")
        version = self._scalar("<I")
        if version not in (2, 3):
            raise self._fault(f"GGUF version {version} is not 2 or 3 (or the file is big-endian)")
        n_tensors, n_fields = self._count(), self._count()
        fields: dict[str, HeaderField] = {}
        for _ in range(n_fields):
            start = self._file.tell()
            key = self._text()
            fields[key] = HeaderField(value=self._value(self._type()), start=start, stop=self._file.tell())
        if "general.architecture" not in fields:
            raise self._fault("its metadata has no general.architecture")
        entries = [self._tensor_entry() for _ in range(n_tensors)]
        alignment_field = fields.get("general.alignment")
        alignment = alignment_field.value if alignment_field else 32
        data_start = -(-self._file.tell() // alignment) * alignment
        tensors = tuple(
            TensorEntry(name=name, shape=shape, type=kind, start=data_start + offset)
            for name, shape, kind, offset in entries
        )
        end = max((tensor.start + tensor.n_bytes for tensor in tensors), default=0)
        if end > self._n_file_bytes:
            raise self._fault(f"it is truncated: {self._n_file_bytes} bytes of {end}")
        return GgufHeader(
            path=self._path, version=version, alignment=alignment, fields=fields, tensors=tensors
        )

    def _tensor_entry(self) -> tuple[str, tuple[int, ...], GGMLQuantizationType, int]:
        name = self._text()
        shape = tuple(self._count() for _ in range(self._scalar("<I")))
        kind = self._scalar("<I")
        try:
            return name, shape, GGMLQuantizationType(kind), self._scalar("<Q")
        except ValueError:
            raise self._fault(f"tensor {name} has the unknown type {kind}") from None

    def _type(self) -> GGUFValueType:
        kind = self._scalar("<I")
        try:
            return GGUFValueType(kind)
        except ValueError:
            raise self._fault(f"a metadata entry has the unknown type {kind}") from None

    def _value(self, kind: GGUFValueType) -> Any:
        if kind is GGUFValueType.STRING:
            return self._text()
        if kind is not GGUFValueType.ARRAY:
            return self._scalar(SCALAR_FORMATS[kind])
        item_kind, n_items = self._type(), self._count()
        if item_kind is GGUFValueType.STRING:
            for _ in range(n_items):
                self._skip(self._count())
            return None
        if item_kind is GGUFValueType.ARRAY:
            return [self._value(GGUFValueType.ARRAY) for _ in range(n_items)]
        letter = SCALAR_FORMATS[item_kind][1]
        return list(
            struct.unpack(f"<{n_items}{letter}", self._bytes(n_items * struct.calcsize(f"<{letter}")))
        )

    def _text(self) -> str:
        return self._bytes(self._count()).decode("utf-8", errors="replace")

    def _count(self) -> int:
        count = self._scalar("<Q")
        if count > MAX_COUNT:
            raise self._fault(f"a count of {count} can't be right")
        return count

    def _scalar(self, form: str) -> Any:
        return struct.unpack(form, self._bytes(struct.calcsize(form)))[0]

    def _bytes(self, n_bytes: int) -> bytes:
        data = self._file.read(n_bytes) if n_bytes <= self._n_file_bytes else b""
        if len(data) < n_bytes:
            raise self._fault(f"it is truncated: its header goes on past its {self._n_file_bytes} bytes")
        return data

    def _skip(self, n_bytes: int) -> None:
        self._bytes(n_bytes)

    def _fault(self, why: str) -> UsageError:
        return UsageError(
            "not a usable GGUF file", where=str(self._path), why=why, todo="make or fetch it again"
        )


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
            f"architecture {header.architecture!r} is not supported",
            where=str(header.path),
            why=f"known are {', '.join(LAYER_KINDS)}",
        )
    # Layers that only predict further tokens (multi-token prediction) come last and are no part of the model.
    n_layer = header.need("{arch}.block_count") - header.get("{arch}.nextn_predict_layers", 0)
    layers = LAYER_KINDS[header.architecture](header, n_layer)
    is_mla = bool(header.get("{arch}.attention.key_length_mla")) and bool(
        header.get("{arch}.attention.value_length_mla")
    )
    n_keys, n_values = _cell_values(header, n_layer)
    n_conv, n_state = _slot_values(header)
    n_embd = header.need("{arch}.embedding_length")
    return ModelFacts(
        path=header.path,
        architecture=header.architecture,
        n_layer=n_layer,
        n_embd=n_embd,
        n_vocab=_n_vocab(header),
        n_ctx_train=header.need("{arch}.context_length"),
        layers=layers,
        window_tokens=_window_tokens(header),
        is_mla=is_mla,
        n_key_values=tuple(n_keys[i] if kind.has_attention else 0 for i, kind in enumerate(layers)),
        n_value_values=tuple(
            n_values[i] if kind.has_attention and not is_mla else 0 for i, kind in enumerate(layers)
        ),
        n_conv_values=tuple(n_conv if kind.has_state else 0 for kind in layers),
        n_state_values=tuple(n_state if kind.has_state else 0 for kind in layers),
        n_leading_dense=header.get("{arch}.leading_dense_block_count", 0),
        has_experts=header.get("{arch}.expert_count", 0) > 0,
        embedding_scale=math.sqrt(n_embd) if header.architecture == "gemma2" else 1.0,
        tensor_types=frozenset(tensor.type.name for tensor in header.tensors),
    )


def _value_bytes(kv_type: str) -> int:
    if kv_type not in KV_VALUE_BYTES:
        raise UsageError(f"unknown kv_type {kv_type!r}", why=f"known are {', '.join(KV_VALUE_BYTES)}")
    return KV_VALUE_BYTES[kv_type]


def _per_layer(value: Any, n_layer: int) -> list[Any]:
    """llama.cpp's key-or-array: one value for all layers, or one for each."""
    return value[:n_layer] if isinstance(value, list) else [value] * n_layer


def _cell_values(header: GgufHeader, n_layer: int) -> tuple[list[int], list[int]]:
    """Key and value values per cell and layer: head length times key heads."""
    n_head = _per_layer(header.need("{arch}.attention.head_count"), n_layer)
    n_head_kv = _per_layer(header.get("{arch}.attention.head_count_kv", n_head), n_layer)
    head_length = header.need("{arch}.embedding_length") // max(n_head)
    key_length = header.get("{arch}.attention.key_length", head_length)
    value_length = header.get("{arch}.attention.value_length", head_length)
    return [key_length * heads for heads in n_head_kv], [value_length * heads for heads in n_head_kv]


def _slot_values(header: GgufHeader) -> tuple[int, int]:
    """``n_embd_r`` (convolution) and ``n_embd_s`` (state) of Mamba-2 and gated DeltaNet layers."""
    inner = header.get("{arch}.ssm.inner_size", 0)
    state = header.get("{arch}.ssm.state_size", 0)
    kernel = header.get("{arch}.ssm.conv_kernel", 0)
    groups = header.get("{arch}.ssm.group_count", 0)
    return max(0, kernel - 1) * (inner + 2 * groups * state), state * inner


def _n_vocab(header: GgufHeader) -> int:
    embedding = next((tensor for tensor in header.tensors if tensor.name == "token_embd.weight"), None)
    if embedding is None:
        raise UsageError("model lacks a tensor", where=str(header.path), why="no token_embd.weight")
    return embedding.shape[1]


def _window_tokens(header: GgufHeader) -> int | None:
    if header.architecture != "gemma2":
        return None
    return header.get("{arch}.attention.sliding_window", 4096)  # llama.cpp's default for gemma2


def _all_full(header: GgufHeader, n_layer: int) -> tuple[LayerKind, ...]:
    return (LayerKind.FULL,) * n_layer


def _alternating(header: GgufHeader, n_layer: int) -> tuple[LayerKind, ...]:
    """A boolean per layer, or a period whose last layer is full (``llama_hparams::set_swa_pattern``)."""
    pattern = header.get("{arch}.attention.sliding_window_pattern", 2)
    if not isinstance(pattern, list):
        pattern = [pattern == 0 or layer % pattern < pattern - 1 for layer in range(n_layer)]
    return tuple(LayerKind.WINDOW if windowed else LayerKind.FULL for windowed in pattern)


def _all_both(header: GgufHeader, n_layer: int) -> tuple[LayerKind, ...]:
    return (LayerKind.FULL_AND_RECURRENT,) * n_layer


def _mostly_recurrent(header: GgufHeader, n_layer: int) -> tuple[LayerKind, ...]:
    """A boolean per layer, or full attention in the last layer of each interval."""
    recurrent = header.get("{arch}.attention.recurrent_layers")
    if recurrent is None:
        interval = header.get("{arch}.full_attention_interval", 4)
        recurrent = [(layer + 1) % interval != 0 for layer in range(n_layer)]
    flags = _per_layer(recurrent, n_layer)
    return tuple(LayerKind.RECURRENT if flag else LayerKind.FULL for flag in flags)


LAYER_KINDS: dict[str, Callable[[GgufHeader, int], tuple[LayerKind, ...]]] = {
    "llama": _all_full,
    "deepseek2": _all_full,
    "gemma2": _alternating,
    "falcon-h1": _all_both,
    "qwen3next": _mostly_recurrent,
}
