"""Collects a model's metadata and tensor recipes, then streams them into a GGUF file."""

from __future__ import annotations

import contextlib
import math
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from gguf import GGUFWriter

from parity.models.vocabulary import CONTROL_TOKENS, N_VOCAB, add_byte_vocabulary
from parity.models.weights import bell_weights, even_weights, raw_stream

CONTROL_GAIN = 0.25  # control tokens' rows are quieter: generated now and then, not all the time


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    """Width and depth of a generated model. ``head_dim`` is ``width / n_head`` unless ``head_values`` says
    another; tiny models are 64 wide.
    """

    width: int
    n_layer: int
    n_head: int = 4
    n_head_kv: int = 2
    ffn_dim: int = 0  # 0: twice the width
    head_values: int = 0  # 0: width / n_head

    def __post_init__(self) -> None:
        if self.width % (2 * self.n_head) or self.n_head % self.n_head_kv or self.n_layer < 1:
            raise ValueError(
                f"width must be a multiple of twice n_head, n_head of n_head_kv, n_layer positive: {self}"
            )

    @property
    def head_dim(self) -> int:
        return self.head_values or self.width // self.n_head

    @property
    def ffn(self) -> int:
        return self.ffn_dim or 2 * self.width


@contextlib.contextmanager
def replaced_file(path: Path) -> Iterator[Path]:
    """A temporary path beside ``path``: renamed to it when the block ends well, else removed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    os.close(handle)
    try:
        yield Path(name)
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


class ModelBuilder:
    """One GGUF in the making: ``writer`` takes metadata; ``bell``, ``ones``, ``even`` declare tensors.

    Shapes are NumPy's (rows first): a product's weight is ``(outputs, inputs)``.
    """

    def __init__(self, architecture: str, size: ModelSize, *, seed: int) -> None:
        self.writer = GGUFWriter(path=None, arch=architecture)
        self.size, self._seed = size, seed
        self._recipes: dict[str, tuple[tuple[int, ...], Callable[[np.random.PCG64], np.ndarray]]] = {}
        self.writer.add_name(f"samebytes {architecture} {size.width}x{size.n_layer}")
        add_byte_vocabulary(self.writer)
        self.writer.add_context_length(8192)
        self.writer.add_embedding_length(size.width)
        self.writer.add_block_count(size.n_layer)
        self.writer.add_layer_norm_rms_eps(1e-5)

    def bell(self, name: str, *shape: int, gain: float = 1.0) -> None:
        """A product's weight: ``gain`` is the size of its output for inputs of size 1."""
        deviation = gain / math.sqrt(shape[-1])
        self._declare(name, shape, lambda stream: bell_weights(stream, shape, deviation=deviation))

    def ones(self, name: str, *shape: int, mean: float = 1.0) -> None:
        """A norm's or a skip connection's weight: near ``mean``, each a little different."""
        self._declare(
            name, shape, lambda stream: bell_weights(stream, shape, deviation=0.1) + np.float32(mean)
        )

    def even(self, name: str, *shape: int, low: float, high: float) -> None:
        """Uniform on [low, high): decay rates and time steps, whose sign and size matter."""
        self._declare(name, shape, lambda stream: even_weights(stream, shape, low=low, high=high))

    def embeddings(self, *, gain: float, output_gain: float | None, norm_mean: float = 1.0) -> None:
        """Token embeddings, the last norm and, unless tied (``output_gain`` None), the output head."""
        width = self.size.width
        self._token_rows("token_embd.weight", deviation=gain)
        self.ones("output_norm.weight", width, mean=norm_mean)
        if output_gain is not None:
            self._token_rows("output.weight", deviation=output_gain / math.sqrt(width))

    def _token_rows(self, name: str, *, deviation: float) -> None:
        def make(stream: np.random.PCG64) -> np.ndarray:
            rows = bell_weights(stream, (N_VOCAB, self.size.width), deviation=deviation)
            rows[-len(CONTROL_TOKENS) :] *= np.float32(CONTROL_GAIN)
            return rows

        self._declare(name, (N_VOCAB, self.size.width), make)

    def _declare(
        self, name: str, shape: tuple[int, ...], make: Callable[[np.random.PCG64], np.ndarray]
    ) -> None:
        self._recipes[name] = (shape, make)
        self.writer.add_tensor_info(name, shape, np.dtype(np.float32), 4 * math.prod(shape))

    def save(self, path: Path) -> None:
        """Write the file atomically."""
        with replaced_file(path) as target:
            self.writer.write_header_to_file(target)
            self.writer.write_kv_data_to_file()
            self.writer.write_ti_data_to_file()
            for name, (_, make) in self._recipes.items():
                self.writer.write_tensor_data(make(raw_stream(self._seed, name)))
            self.writer.close()
