"""A GGUF file's metadata and tensor table, read without its weights and without decoding its vocabulary.

The ``gguf`` package's reader makes a Python object of every token and merge (seconds for a small model,
tens of seconds for a large one). This one skips string arrays, keeps the raw bytes' place of every field so
that a slicer can copy them, and says clearly when a file is cut short. Format: ggml's ``docs/gguf.md``,
versions 2 and 3, little-endian.
"""

from __future__ import annotations

import math
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType

from parity.errors import UsageError

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
