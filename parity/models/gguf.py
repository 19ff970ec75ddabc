"""A GGUF file's metadata and tensor table, read without its weights and without decoding its vocabulary.

The ``gguf`` package's ``GGUFReader`` was measured against this on a vocabulary of 150,000 tokens and
merges: it makes an array object of every string (14.8 s and 654 MB; here 0.1 s and nothing kept), a
subclass that steps over them has to replace a private method, and its reads past the end are silently
short, so that an array of 2^60 bytes never ends. So the package gives the format's constants and the
writer, and the header is read here. Format: ggml's ``docs/gguf.md``, versions 2 and 3, little-endian;
limits are llama.cpp's where it has some.

A file comes from anywhere, so whatever it holds costs bounded time and memory and ends in one line.
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
DEFAULT_ALIGNMENT = 32
MAX_DIMS = 4  # ggml's
MAX_LAYERS = 512  # llama.cpp's
MAX_VALUE = (1 << 31) - 1  # llama.cpp reads metadata into 32 bits
# Ten times the largest that models have: a larger one can only come from a damaged file, or from an enemy.
MAX_FIELDS = 4096
MAX_TENSORS = 1 << 18
MAX_HEADER_BYTES = 64 << 20
KEPT_ITEMS = 4096  # longer arrays belong to the vocabulary and are stepped over
SHOWN_CHARS = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class HeaderField:
    """One metadata entry: its half-open range of file bytes, and its value.

    The value is None for arrays of strings and for arrays of more than ``KEPT_ITEMS``.
    """

    value: Any
    start: int
    stop: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorEntry:
    """One row of the tensor table.

    ``shape`` is ggml's (columns first), one to four dimensions; ``start`` is the data's absolute file offset.
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

    def key(self, name: str) -> str:
        """``name`` with the architecture in place of ``{arch}``."""
        return name.replace("{arch}", self.architecture)

    def value(self, name: str) -> Any:
        """A metadata value as it stands, None where there is none."""
        field = self.fields.get(self.key(name))
        return None if field is None else field.value

    def integer(self, name: str, default: int | None = None, *, least: int = 0, most: int = MAX_VALUE) -> int:
        """A whole number in ``least..most``; ``UsageError`` for another thing, or nothing and no default."""
        if self.key(name) not in self.fields:
            return self._default(name, default)
        return self._checked(name, self.value(name), least, most)

    def integers(self, name: str, count: int, default: int | list[int] | None = None) -> list[int]:
        """llama.cpp's key-or-array: ``count`` whole numbers, the first of an array or one number for all."""
        if self.key(name) not in self.fields:
            value = self._default(name, default)
            return value if isinstance(value, list) else [value] * count
        value = self.value(name)
        if not isinstance(value, list):
            return [self._checked(name, value, 0, MAX_VALUE)] * count
        return [self._checked(name, item, 0, MAX_VALUE) for item in self._first(name, value, count)]

    def flags(self, name: str, count: int) -> list[bool] | None:
        """The first ``count`` of an array of booleans; None where there is none, or a single value."""
        value = self.value(name)
        if not isinstance(value, list):
            return None
        items = self._first(name, value, count)
        if any(item not in (0, 1) for item in items):
            raise self.fault(f"{self.key(name)} does not hold booleans")
        return [bool(item) for item in items]

    def _default(self, name: str, default: Any) -> Any:
        if default is None:
            raise UsageError(
                "model lacks metadata",
                where=str(self.path),
                why=f"no {self.key(name)}",
                todo="convert it again with a current llama.cpp",
            )
        return default

    def _first(self, name: str, values: list[Any], count: int) -> list[Any]:
        if len(values) < count:
            raise self.fault(f"{self.key(name)} has {len(values)} values for {count} layers")
        return values[:count]

    def _checked(self, name: str, value: Any, least: int, most: int) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            found = "a long array" if value is None else shown(value)
            raise self.fault(f"{self.key(name)} is {found}, not a whole number from {least} to {most}")
        return value

    def fault(self, why: str) -> UsageError:
        return unusable(self.path, why)


def unusable(path: Path, why: str) -> UsageError:
    return UsageError("not a usable GGUF file", where=str(path), why=why, todo="make or fetch it again")


def shown(value: object) -> str:
    """What a file holds, as much of it as a line can show."""
    text = repr(value[: SHOWN_CHARS + 1] if isinstance(value, str | list) else value)
    return text if len(text) <= SHOWN_CHARS else f"{text[:SHOWN_CHARS]}..."


def read_header(path: Path) -> GgufHeader:
    """Read metadata and tensor table; ``UsageError`` if the file isn't a whole GGUF file."""
    try:
        with open(path, "rb") as file:
            return read_open_header(file, path, os.fstat(file.fileno()).st_size)
    except OSError as error:
        raise UsageError("model cannot be read", where=str(path), why=error.strerror or str(error)) from error


def read_open_header(file: BinaryIO, path: Path, n_file_bytes: int) -> GgufHeader:
    """``read_header`` of an open file at its beginning; ``path`` is its name in complaints."""
    return _HeaderReader(path, file, n_file_bytes).read()


class _HeaderReader:
    """Walks the file once, front to back, through a buffered file object."""

    def __init__(self, path: Path, file: BinaryIO, n_file_bytes: int) -> None:
        self._path, self._file, self._n_file_bytes, self._place = path, file, n_file_bytes, 0

    def read(self) -> GgufHeader:
        if self._file.read(4) != MAGIC:
            raise self._fault("it doesn't start with the GGUF magic")
        self._place = 4
        version = self._scalar("<I")
        if version not in (2, 3):
            raise self._fault(f"GGUF version {version} is not 2 or 3 (or the file is big-endian)")
        n_tensors, n_fields = self._count("tensors", MAX_TENSORS), self._count("fields", MAX_FIELDS)
        fields = self._fields(n_fields)
        if not isinstance(
            fields.get("general.architecture", HeaderField(value=0, start=0, stop=0)).value, str
        ):
            raise self._fault("its metadata has no general.architecture")
        entries = [self._tensor_entry() for _ in range(n_tensors)]
        if len({name for name, *_ in entries}) < len(entries):
            raise self._fault("it names a tensor twice")
        alignment = self._alignment(fields)
        data_start = -(-self._place // alignment) * alignment
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

    def _fields(self, n_fields: int) -> dict[str, HeaderField]:
        fields: dict[str, HeaderField] = {}
        for _ in range(n_fields):
            start = self._place
            key = self._name()
            if key in fields:
                raise self._fault(f"metadata key {shown(key)} is given twice")
            fields[key] = HeaderField(value=self._value(self._type()), start=start, stop=self._place)
        return fields

    def _alignment(self, fields: dict[str, HeaderField]) -> int:
        field = fields.get("general.alignment")
        alignment = DEFAULT_ALIGNMENT if field is None else field.value
        if not isinstance(alignment, int) or isinstance(alignment, bool):
            raise self._fault(f"general.alignment is {shown(alignment)}, not a number")
        if not 0 < alignment <= MAX_VALUE or alignment & (alignment - 1):
            raise self._fault(f"general.alignment is {alignment}, not a power of two")
        return alignment

    def _tensor_entry(self) -> tuple[str, tuple[int, ...], GGMLQuantizationType, int]:
        name = self._name()
        n_dims = self._scalar("<I")
        if not 1 <= n_dims <= MAX_DIMS:
            raise self._fault(f"tensor {shown(name)} has {n_dims} dimensions")
        shape = tuple(self._scalar("<Q") for _ in range(n_dims))
        kind, offset = self._scalar("<I"), self._scalar("<Q")
        try:
            quantisation = GGMLQuantizationType(kind)
        except ValueError:
            raise self._fault(f"tensor {shown(name)} has the unknown type {kind}") from None
        if 0 in shape or shape[0] % GGML_QUANT_SIZES[quantisation][0]:
            raise self._fault(f"tensor {shown(name)} of type {quantisation.name} has the shape {shape}")
        return name, shape, quantisation, offset

    def _type(self) -> GGUFValueType:
        kind = self._scalar("<I")
        try:
            return GGUFValueType(kind)
        except ValueError:
            raise self._fault(f"a metadata entry has the unknown type {kind}") from None

    def _value(self, kind: GGUFValueType) -> Any:
        if kind is GGUFValueType.STRING:
            return self._bytes(self._scalar("<Q")).decode("utf-8", errors="replace")
        if kind is not GGUFValueType.ARRAY:
            return self._scalar(SCALAR_FORMATS[kind])
        item_kind, n_items = self._type(), self._scalar("<Q")
        if item_kind is GGUFValueType.ARRAY:  # llama.cpp reads none either
            raise self._fault("a metadata entry is an array of arrays")
        if item_kind is GGUFValueType.STRING:
            for _ in range(n_items):
                self._skip(self._scalar("<Q"))
            return None
        letter = SCALAR_FORMATS[item_kind][1]
        n_bytes = n_items * struct.calcsize(f"<{letter}")
        if n_items > KEPT_ITEMS:
            self._skip(n_bytes)
            return None
        return list(struct.unpack(f"<{n_items}{letter}", self._bytes(n_bytes)))

    def _name(self) -> str:
        try:
            return self._bytes(self._scalar("<Q")).decode("utf-8")
        except UnicodeDecodeError:
            raise self._fault("a name in it is not UTF-8 text") from None

    def _count(self, what: str, most: int) -> int:
        count = self._scalar("<Q")
        if count > most:
            raise self._fault(f"a count of {count} {what} can't be right")
        return count

    def _scalar(self, form: str) -> Any:
        return struct.unpack(form, self._bytes(struct.calcsize(form)))[0]

    def _bytes(self, n_bytes: int) -> bytes:
        self._reserve(n_bytes)
        return self._file.read(n_bytes)

    def _skip(self, n_bytes: int) -> None:
        self._reserve(n_bytes)
        self._file.seek(self._place)

    def _reserve(self, n_bytes: int) -> None:
        """Move the place over bytes that are about to be read or skipped."""
        self._place += n_bytes
        if self._place > self._n_file_bytes:
            raise self._fault(f"it is truncated: its header goes on past its {self._n_file_bytes} bytes")
        if self._place > MAX_HEADER_BYTES:
            raise self._fault(f"its header goes on past {MAX_HEADER_BYTES} bytes")

    def _fault(self, why: str) -> UsageError:
        return unusable(self._path, why)
