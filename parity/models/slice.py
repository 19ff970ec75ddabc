"""Layer stages: a GGUF file with a contiguous range of another's layers, re-indexed from 0.

Tensors are copied byte for byte, whatever their type, a few megabytes at a time. Metadata is copied byte for
byte too, except the entries that speak of layers.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from gguf import GGUFValueType

from parity.errors import UsageError
from parity.models.builder import replaced_file
from parity.models.facts import ModelFacts, derive_facts
from parity.models.gguf import MAGIC, SCALAR_FORMATS, GgufHeader, TensorEntry, read_header

COPY_BYTES = 8 << 20
PER_LAYER_KEYS = (
    "attention.head_count",
    "attention.head_count_kv",
    "attention.sliding_window_pattern",
    "attention.recurrent_layers",
    "feed_forward_length",
    "expert_feed_forward_length",
)
LAYER_TENSOR = re.compile(r"blk\.(\d+)\.(.+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerRange:
    """Half-open range of layers of a model, ``start < stop``."""

    start: int
    stop: int

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.stop:
            raise UsageError(
                f"layers {self.start}:{self.stop} are no range", todo="give START:STOP, START < STOP"
            )

    @property
    def n_layer(self) -> int:
        return self.stop - self.start

    @classmethod
    def parse(cls, text: str) -> LayerRange:
        """``"0:9"`` is layers 0 to 8."""
        match = re.fullmatch(r"(\d+):(\d+)", text.strip())
        if not match:
            raise UsageError(f"layers {text!r} are no range", todo="give START:STOP, for example 0:9")
        return cls(start=int(match[1]), stop=int(match[2]))


def slice_model(
    source: Path, layers: LayerRange, target: Path, *, report: Callable[[int, int], None] | None = None
) -> None:
    """Write the layers of ``source`` in ``layers`` to ``target``, with embeddings, last norm and output head.

    Atomic. ``report(done_bytes, all_bytes)`` is called after each copied block. ``UsageError`` if the model
    hasn't these layers. A stage that llama.cpp can't run is written, too: ``check_split_legal`` judges.
    """
    header = read_header(source)
    with open(source, "rb") as data:
        slice_open_model(header, data, layers, target, report=report)


def slice_open_model(
    header: GgufHeader,
    data: BinaryIO,
    layers: LayerRange,
    target: Path,
    *,
    report: Callable[[int, int], None] | None = None,
) -> None:
    """``slice_model`` of a file that is open already, wherever it lies."""
    source, facts = header.path, derive_facts(header)
    if header.integer("split.count", 1) > 1:
        raise UsageError(
            "model is one part of several",
            where=str(source),
            why=f"it holds {len(header.tensors)} tensors of {header.integer('split.tensors.count', 0)}",
            todo="merge its parts first (llama.cpp's gguf-split --merge)",
        )
    if layers.stop > facts.n_layer:
        raise UsageError(
            f"layers {layers.start}:{layers.stop} are not in the model",
            where=str(source),
            why=f"it has {facts.n_layer} layers",
        )
    tensors = [(name, tensor) for tensor in header.tensors if (name := _stage_name(tensor.name, layers))]
    fields = _stage_fields(header, data, facts, layers)
    with replaced_file(target) as path, open(path, "wb") as out:
        _write_header(out, header, fields, tensors, data)
        _copy_tensors(out, header, tensors, data, report)


def _stage_name(name: str, layers: LayerRange) -> str | None:
    """The tensor's name in the stage, None if it isn't part of it."""
    match = LAYER_TENSOR.fullmatch(name)
    if not match:
        return name
    layer = int(match[1])
    return f"blk.{layer - layers.start}.{match[2]}" if layers.start <= layer < layers.stop else None


def _stage_fields(
    header: GgufHeader, data: BinaryIO, facts: ModelFacts, layers: LayerRange
) -> dict[str, bytes]:
    """Metadata entries that the stage needs in another form, encoded; all others are copied."""
    arch, part = header.architecture, slice(layers.start, layers.stop)
    fields = {f"{arch}.block_count": _encode(f"{arch}.block_count", GGUFValueType.UINT32, layers.n_layer)}
    for key in (f"{arch}.{name}" for name in PER_LAYER_KEYS):
        if isinstance(values := header.value(key), list):
            if len(values) < facts.n_layer:
                raise header.fault(f"{key} has {len(values)} values for {facts.n_layer} layers")
            fields[key] = _reencoded_array(header, data, key, values[part])
    key = f"{arch}.nextn_predict_layers"
    if key in header.fields:  # their tensors lie behind the last layer and are left out
        fields[key] = _encode(key, GGUFValueType.UINT32, 0)
    if arch == "deepseek2":
        dense = min(max(facts.n_leading_dense - layers.start, 0), layers.n_layer)
        key = f"{arch}.leading_dense_block_count"
        fields[key] = _encode(key, GGUFValueType.UINT32, dense)
        # llama.cpp takes 26 or 27 layers for the lite variant and needs to be told for any other number.
        key = f"{arch}.attention.q_lora_rank"
        fields[key] = _encode(key, GGUFValueType.UINT32, header.integer(key, 0))
    if arch == "gemma2":
        key = f"{arch}.attention.sliding_window_pattern"
        fields[key] = _encode_flags(key, [kind == "window" for kind in facts.layers[part]])
    if arch == "qwen3next":
        key = f"{arch}.attention.recurrent_layers"
        fields[key] = _encode_flags(key, [kind.has_state for kind in facts.layers[part]])
    return fields


def _text(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _encode(key: str, kind: GGUFValueType, value: float) -> bytes:
    return _text(key) + struct.pack("<I", kind) + struct.pack(SCALAR_FORMATS[kind], value)


def _encode_array(key: str, kind: GGUFValueType, values: list) -> bytes:
    letter = SCALAR_FORMATS[kind][1]
    head = struct.pack("<IIQ", GGUFValueType.ARRAY, kind, len(values))
    return _text(key) + head + struct.pack(f"<{len(values)}{letter}", *values)


def _encode_flags(key: str, flags: list[bool]) -> bytes:
    return _encode_array(key, GGUFValueType.BOOL, flags)


def _reencoded_array(header: GgufHeader, data: BinaryIO, key: str, values: list) -> bytes:
    """A shorter array of the same element type as the original entry."""
    data.seek(header.fields[key].start + 8 + len(key.encode()) + 4)
    (kind,) = struct.unpack("<I", data.read(4))
    return _encode_array(key, GGUFValueType(kind), values)


def _write_header(
    out: BinaryIO,
    header: GgufHeader,
    fields: dict[str, bytes],
    tensors: list[tuple[str, TensorEntry]],
    data: BinaryIO,
) -> None:
    added = [key for key in fields if key not in header.fields]
    counts = struct.pack("<QQ", len(tensors), len(header.fields) + len(added))
    out.write(MAGIC + struct.pack("<I", header.version) + counts)
    for key, field in header.fields.items():
        if key in fields:
            out.write(fields[key])
        else:
            data.seek(field.start)
            out.write(data.read(field.stop - field.start))
    for key in added:
        out.write(fields[key])
    offset = 0
    for name, tensor in tensors:
        out.write(_text(name) + struct.pack("<I", len(tensor.shape)))
        out.write(struct.pack(f"<{len(tensor.shape)}QIQ", *tensor.shape, tensor.type, offset))
        offset += _padded(tensor.n_bytes, header.alignment)


def _copy_tensors(
    out: BinaryIO,
    header: GgufHeader,
    tensors: list[tuple[str, TensorEntry]],
    data: BinaryIO,
    report: Callable[[int, int], None] | None,
) -> None:
    done, total = 0, sum(tensor.n_bytes for _, tensor in tensors)
    for _, tensor in tensors:
        out.write(bytes(_padded(out.tell(), header.alignment) - out.tell()))
        data.seek(tensor.start)
        left = tensor.n_bytes
        while left:
            block = data.read(min(left, COPY_BYTES))
            out.write(block)
            left -= len(block)
            done += len(block)
            if report:
                report(done, total)
    out.write(bytes(_padded(out.tell(), header.alignment) - out.tell()))


def _padded(n_bytes: int, alignment: int) -> int:
    return -(-n_bytes // alignment) * alignment
