"""Reads a stage's hidden states out of llama.cpp's graph, and lets hidden states in
behind the scale on embeddings.

The scheduler of ggml's back ends asks an evaluation callback about every node before it computes it,
and shows it the nodes that were asked for. Where a field lies in a ``ggml_tensor`` is measured on a
tensor made for that, not assumed.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from dataclasses import dataclass
from typing import Any

import numpy as np

from parity.engines.llama import library

GGML_TYPE_F32 = 0
MAX_TENSOR_BYTES = 336  # no field is looked for behind this; a tensor of ggml 0.25 has 336 bytes
PROBE_NAME, PROBE_SCALE = b"layout probe", 0.8137


class _InitParams(ctypes.Structure):
    _fields_ = [("mem_size", ctypes.c_size_t), ("mem_buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool)]


@dataclass(frozen=True, slots=True)
class GgmlLayout:
    """ggml's functions, and byte offsets in a ``ggml_tensor``: its name, and the factor of a scale node."""

    functions: ctypes.CDLL
    name_offset: int
    scale_offset: int


@functools.cache
def ggml_layout() -> GgmlLayout:
    """Bind ggml and measure the layout of its tensors.

    Raises ``RuntimeError`` if a field is not where one can be.
    """
    ggml = ctypes.CDLL(library().llama_cpp._lib._name)
    pointer = ctypes.c_void_p
    for name, result, arguments in (
        ("ggml_init", pointer, [_InitParams]),
        ("ggml_free", None, [pointer]),
        ("ggml_new_tensor_1d", pointer, [pointer, ctypes.c_int, ctypes.c_int64]),
        ("ggml_scale", pointer, [pointer, pointer, ctypes.c_float]),
        ("ggml_set_name", pointer, [pointer, ctypes.c_char_p]),
        ("ggml_get_name", pointer, [pointer]),
        ("ggml_nbytes", ctypes.c_size_t, [pointer]),
        ("ggml_backend_tensor_get", None, [pointer, pointer, ctypes.c_size_t, ctypes.c_size_t]),
    ):
        function = getattr(ggml, name)
        function.restype, function.argtypes = result, arguments
    context = ggml.ggml_init(_InitParams(1 << 16, None, True))
    try:
        tensor = ggml.ggml_scale(context, ggml.ggml_new_tensor_1d(context, GGML_TYPE_F32, 4), PROBE_SCALE)
        ggml.ggml_set_name(tensor, PROBE_NAME)
        name_offset = ggml.ggml_get_name(tensor) - tensor
        raw = ctypes.string_at(tensor, MAX_TENSOR_BYTES)
        scale_offset = raw.find(np.float32(PROBE_SCALE).tobytes())
    finally:
        ggml.ggml_free(context)
    if not 0 <= name_offset < MAX_TENSOR_BYTES or scale_offset < 0:
        raise RuntimeError("ggml's tensors have another layout than this llama.cpp's callback needs")
    return GgmlLayout(ggml, name_offset, scale_offset)


class HiddenTap:
    """The evaluation callback of one stage's context.

    ``last_layer`` is the layer (of the stage's own numbering) whose output is handed on; None for a last
    stage, which hands on logits. The rest of the graph, norm and output head, is not computed then.
    ``undo_scale`` sets the factor of gemma2's ``inp_scaled`` node to 1, so that a hidden state enters the
    first layer unchanged, whatever sqrt(n_embd) is.
    """

    def __init__(self, *, n_embd: int, max_rows: int, last_layer: int | None, undo_scale: bool) -> None:
        self._layout = ggml_layout()
        self.rows = np.empty((max_rows if last_layer is not None else 0, n_embd), np.float32)
        self.count = 0
        self.scales_undone = 0
        self.error: BaseException | None = None
        self.undo_scale, self._last_layer = undo_scale, last_layer
        self.callback: Any = library().ggml_backend_sched_eval_callback(self._make_callback())

    def take(self) -> np.ndarray:
        """Hidden states captured since the last call: float32 [rows, n_embd], a view
        that the next call overwrites.
        """
        if self.error is not None:
            error, self.error = self.error, None
            raise RuntimeError(f"hidden states could not be read: {error}") from error
        count, self.count = self.count, 0
        return self.rows[:count]

    def _make_callback(self):
        """The callback as a closure: it is called for every node of every graph, so
        it looks at eight bytes first.
        """
        name_offset, ggml_get_name = self._layout.name_offset, self._layout.functions.ggml_get_name
        word = ctypes.c_uint64
        wanted = b"" if self._last_layer is None else f"l_out-{self._last_layer}\0".encode()
        scaled = b"inp_scaled\0" if self.undo_scale else b""
        wanted_word, wanted_mask = _first_word(wanted)
        scaled_word, scaled_mask = _first_word(scaled)
        string_at, capture, undo = ctypes.string_at, self._capture, self._set_scale

        def callback(tensor: int, ask: bool, _: Any) -> bool:
            if not ask:
                return capture(tensor)
            first = word.from_address(tensor + name_offset).value
            if first & wanted_mask == wanted_word and wanted:
                return string_at(ggml_get_name(tensor), len(wanted)) == wanted
            if (
                first & scaled_mask == scaled_word
                and scaled
                and string_at(ggml_get_name(tensor), len(scaled)) == scaled
            ):
                undo(tensor)
            return False

        return callback

    def _capture(self, tensor: int) -> bool:
        """Copy a computed node's rows; always False: nothing behind it is needed.

        Exceptions cannot cross C: kept.
        """
        try:
            ggml = self._layout.functions
            n_bytes, row_bytes = ggml.ggml_nbytes(tensor), self.rows.strides[0]
            count = n_bytes // row_bytes
            if count * row_bytes != n_bytes or self.count + count > len(self.rows):
                raise ValueError(
                    f"{n_bytes} bytes after {self.count} rows are no rows of {row_bytes} bytes that fit"
                )
            ggml.ggml_backend_tensor_get(tensor, self.rows.ctypes.data + self.count * row_bytes, 0, n_bytes)
            self.count += count
        except Exception as error:
            self.error = error
        return False

    def _set_scale(self, tensor: int) -> None:
        ctypes.c_float.from_address(tensor + self._layout.scale_offset).value = 1.0
        self.scales_undone += 1


def _first_word(name: bytes) -> tuple[int, int]:
    """A name's first eight bytes as the machine's integer, and the mask of those that count."""
    part = name[:8]
    padded, mask = part.ljust(8, b"\0"), (b"\xff" * len(part)).ljust(8, b"\0")
    return int.from_bytes(padded, sys.byteorder), int.from_bytes(mask, sys.byteorder)
