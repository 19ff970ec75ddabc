"""A GGUF file as metadata and float64 tensors; quantised blocks are dequantised by the ``gguf`` package."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader
from gguf.quants import dequantize

from parity.errors import UsageError


@dataclass(frozen=True, slots=True)
class Tensor:
    """``values``: float64, rows first ([outputs, inputs] for a product); ``kind``: its GGUF type's name."""

    values: np.ndarray
    kind: str = "F32"


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """One model. ``metadata`` has the architecture's keys without its prefix; ``tensors`` are named as in the
    file, without a trailing ``.weight``.
    """

    architecture: str
    metadata: Mapping[str, Any]
    tensors: Mapping[str, Tensor]

    def __getitem__(self, key: str) -> Any:
        if key not in self.metadata:
            raise UsageError("model lacks metadata", why=f"no {self.architecture}.{key}")
        return self.metadata[key]

    def get(self, key: str, default: Any) -> Any:
        return self.metadata.get(key, default)

    @property
    def n_layer(self) -> int:
        """Layers that are run: those that only predict further tokens come last and are left out."""
        return self["block_count"] - self.get("nextn_predict_layers", 0)

    def layer(self, index: int) -> Layer:
        prefix = f"blk.{index}."
        return Layer({k.removeprefix(prefix): t for k, t in self.tensors.items() if k.startswith(prefix)})


@dataclass(frozen=True, slots=True)
class Layer:
    """The tensors of one layer, by the names that they have in it."""

    tensors: Mapping[str, Tensor]

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.tensors:
            raise UsageError("model lacks a tensor", why=f"no {name} in a layer")
        return self.tensors[name]

    def values(self, name: str) -> np.ndarray:
        """A norm's weight, a decay rate: anything that is not the matrix of a product."""
        return self[name].values

    def bias(self, name: str) -> np.ndarray | float:
        """The optional bias of the product ``name``; 0 when the model has none."""
        found = self.tensors.get(f"{name}.bias")
        return 0.0 if found is None else found.values


def load_weights(path: Path) -> Weights:
    """Read and dequantise a whole model; ``UsageError`` if the file is no GGUF or has an unknown type."""
    try:
        reader = GGUFReader(path)
    except (OSError, ValueError, IndexError, KeyError) as error:
        raise UsageError("model cannot be read", where=str(path), why=str(error) or repr(error)) from error
    if "general.architecture" not in reader.fields:
        raise UsageError("model lacks metadata", where=str(path), why="no general.architecture")
    architecture = reader.fields["general.architecture"].contents()
    prefix = f"{architecture}."
    metadata = {
        name.removeprefix(prefix): field.contents()
        for name, field in reader.fields.items()
        if name.startswith(prefix)
    }
    tensors = {}
    for tensor in reader.tensors:
        kind = tensor.tensor_type
        try:
            values = np.asarray(dequantize(tensor.data, kind), np.float64)
        except NotImplementedError as error:
            raise UsageError(
                f"tensor {tensor.name} has the type {kind.name}", where=str(path), why=str(error)
            ) from error
        tensors[tensor.name.removesuffix(".weight")] = Tensor(values, kind.name)
    return Weights(architecture=architecture, metadata=metadata, tensors=tensors)
