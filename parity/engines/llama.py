"""llama.cpp through llama-cpp-python's low-level API: models, contexts, calls. The
only importer of ``llama_cpp``.

What must hold for bit-identity is in the numerics profile (``parity.engines.numerics``);
environment variables that the library reads must be set before this process makes its first
product, so profiles run in worker processes.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from parity.errors import UsageError
from parity.processes import WORKER_DEFAULTS

KV_TYPES = {"f32": 0, "f16": 1}  # ggml_type
WARNING_LEVEL, CONTINUED_LEVEL = 3, 5  # ggml_log_level: 2 is info, 3 warning, 4 error, 5 goes on


class EngineUnavailable(UsageError):
    """llama_cpp cannot be imported, or its library cannot be loaded."""


@functools.cache
def library() -> ModuleType:
    """The ``llama_cpp`` module, its back end started, its log cut down to
    warnings and errors on standard error.

    The library reads ``WORKER_DEFAULTS`` when it is loaded: every process that decodes, a
    server too, waits without spinning.
    """
    for name, value in WORKER_DEFAULTS.items():
        os.environ.setdefault(name, value)
    try:
        import llama_cpp
    except (ImportError, OSError, RuntimeError) as error:
        raise EngineUnavailable(
            "llama_cpp cannot be imported",
            where="this Python environment",
            why=str(error),
            todo="run `make setup`, which builds it once",
        ) from error

    shown = [False]  # a continued message follows the level of its beginning

    @llama_cpp.llama_log_callback
    def log(level: int, text: bytes, _: Any) -> None:
        if level != CONTINUED_LEVEL:
            shown[0] = level >= WARNING_LEVEL
        if shown[0]:
            sys.stderr.write(text.decode(errors="replace"))
            sys.stderr.flush()

    llama_cpp.samebytes_log = log  # kept alive as long as the library
    llama_cpp.llama_log_set(log, ctypes.c_void_p(0))
    llama_cpp.llama_backend_init()
    return llama_cpp


@functools.cache
def build_facts() -> dict[str, str]:
    """Version and compile-time features, for provenance: ``version``,
    ``system`` (llama_print_system_info).
    """
    lib = library()
    system = lib.llama_print_system_info().decode().strip()
    return {"version": lib.__version__, "system": " ".join(system.split())}


class LlamaModel:
    """Loaded weights, or the vocabulary alone. ``use_extra_bufts`` allows repacked weights (CPU back end)."""

    def __init__(self, path: Path, *, use_extra_bufts: bool = True, vocab_only: bool = False) -> None:
        self._lib = lib = library()
        params = lib.llama_model_default_params()
        params.use_extra_bufts = use_extra_bufts
        params.n_gpu_layers = 0
        params.vocab_only = vocab_only
        self.handle = lib.llama_model_load_from_file(str(path).encode(), params)
        if not self.handle:
            raise UsageError(
                "model cannot be loaded",
                where=str(path),
                why="llama.cpp refused it",
                todo="check that the file is a whole GGUF of a supported architecture",
            )
        self.path = path
        self.vocab = lib.llama_model_get_vocab(self.handle)
        self.n_vocab = lib.llama_vocab_n_tokens(self.vocab)
        self.n_embd = lib.llama_model_n_embd(self.handle)
        self.n_layer = lib.llama_model_n_layer(self.handle)
        self.eos_token = lib.llama_vocab_eos(self.vocab)
        self.bos_token = lib.llama_vocab_bos(self.vocab)

    def tokenize(self, text: str, *, add_special: bool = True) -> list[int]:
        """Token ids of a text; special tokens in it are parsed."""
        data = text.encode()
        size = len(data) + 8
        while True:
            buffer = (ctypes.c_int32 * size)()
            count = self._lib.llama_tokenize(self.vocab, data, len(data), buffer, size, add_special, True)
            if count >= 0:
                return list(buffer[:count])
            size = -count

    def token_bytes(self, token: int) -> bytes:
        """The bytes that a token stands for in text; control tokens stand for none."""
        size = 64
        while True:
            buffer = ctypes.create_string_buffer(size)
            count = self._lib.llama_token_to_piece(self.vocab, token, buffer, size, 0, False)
            if count >= 0:
                return buffer.raw[:count]
            size = -count

    def end_tokens(self) -> tuple[int, ...]:
        """Every token that ends a generation (end of sequence, of turn, ...), increasing."""
        is_end = self._lib.llama_vocab_is_eog
        return tuple(token for token in range(self.n_vocab) if is_end(self.vocab, token))

    def special_text(self, token: int) -> str:
        """A control token as it is written in a chat template, such as
        ``<s>``; empty for -1 (there is none).
        """
        text = self._lib.llama_vocab_get_text(self.vocab, token) if token >= 0 else b""
        return text.decode(errors="replace")

    def close(self) -> None:
        if self.handle:
            self._lib.llama_model_free(self.handle)
            self.handle = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextSettings:
    """One llama.cpp context. ``n_ctx`` counts cells of the whole cache; ``n_seq_max`` physical sequence ids.
    With ``flash_attention`` cells of ``kv_type`` f32 are cast to f16 before they are used.
    """

    n_ctx: int
    n_seq_max: int
    n_batch: int = 512
    n_ubatch: int = 512
    kv_unified: bool = True
    flash_attention: bool = True
    kv_type: str = "f16"
    swa_full: bool = True
    n_threads: int = 2


class DecodeFailure(Exception):
    """``llama_decode`` returned another code than 0; ``code`` 1 means that it found no slot for the rows."""

    def __init__(self, code: int) -> None:
        self.code = code
        super().__init__(
            "llama_decode found no memory slot" if code == 1 else f"llama_decode returned {code}"
        )


class LlamaContext:
    """One context with its own input buffers; each token may belong to ``ids_per_row`` sequences."""

    def __init__(
        self,
        model: LlamaModel,
        settings: ContextSettings,
        *,
        ids_per_row: int = 1,
        embedding_input: bool = False,
        eval_callback: Any = None,
    ) -> None:
        self._lib = lib = library()
        self.model, self.settings = model, settings
        params = lib.llama_context_default_params()
        params.n_ctx, params.n_seq_max = settings.n_ctx, settings.n_seq_max
        params.n_batch, params.n_ubatch = settings.n_batch, settings.n_ubatch
        params.n_threads = params.n_threads_batch = settings.n_threads
        params.kv_unified, params.swa_full = settings.kv_unified, settings.swa_full
        params.flash_attn_type = 1 if settings.flash_attention else 0
        params.type_k = params.type_v = KV_TYPES[settings.kv_type]
        params.no_perf = True
        params.offload_kqv = False
        if eval_callback is not None:
            params.cb_eval = eval_callback
        self.handle = lib.llama_init_from_model(model.handle, params)
        if not self.handle:
            raise UsageError(
                "context cannot be made",
                where=str(model.path),
                why=f"llama.cpp refused {settings}",
                todo="use a smaller pool or fewer sequences",
            )
        self.memory = lib.llama_get_memory(self.handle)
        self._make_batch(ids_per_row, embedding_input)

    def _make_batch(self, ids_per_row: int, embedding_input: bool) -> None:
        """A ``llama_batch`` over numpy buffers, so that a call is filled
        without a ctypes access per element.
        """
        rows = self.settings.n_batch
        self.tokens = np.zeros(rows, np.int32)
        self.embeddings = np.zeros((rows, self.model.n_embd), np.float32) if embedding_input else None
        self.positions = np.zeros(rows, np.int32)
        self.seq_ids = np.zeros((rows, ids_per_row), np.int32)
        self.wanted = np.zeros(rows, np.int8)
        self._seq_counts = np.full(rows, ids_per_row, np.int32)
        base, width = self.seq_ids.ctypes.data, self.seq_ids.strides[0]
        self._seq_pointers = (ctypes.POINTER(ctypes.c_int32) * rows)(
            *(ctypes.cast(base + i * width, ctypes.POINTER(ctypes.c_int32)) for i in range(rows))
        )
        batch = self._lib.llama_batch()
        pointer = ctypes.POINTER
        if embedding_input:
            batch.embd = self.embeddings.ctypes.data_as(pointer(ctypes.c_float))
        else:
            batch.token = self.tokens.ctypes.data_as(pointer(ctypes.c_int32))
        batch.pos = self.positions.ctypes.data_as(pointer(ctypes.c_int32))
        batch.n_seq_id = self._seq_counts.ctypes.data_as(pointer(ctypes.c_int32))
        batch.seq_id = ctypes.cast(self._seq_pointers, pointer(pointer(ctypes.c_int32)))
        batch.logits = self.wanted.ctypes.data_as(pointer(ctypes.c_int8))
        self._batch = batch

    def decode(self, count: int) -> None:
        """Run the first ``count`` rows of the buffers. Raises ``DecodeFailure``."""
        self._batch.n_tokens = count
        code = self._lib.llama_decode(self.handle, self._batch)
        if code:
            raise DecodeFailure(code)

    def decode_rows(
        self, tokens: Sequence[int], positions: Sequence[int], seq_ids: Iterable[Any], wanted: Sequence[int]
    ) -> np.ndarray:
        """Run rows and return the logits of those marked in ``wanted``: float32
        [sum(wanted), n_vocab], a copy.
        """
        count = len(tokens)
        self.tokens[:count] = tokens
        self.positions[:count] = positions
        self.seq_ids[:count] = seq_ids
        self.wanted[:count] = wanted
        self.decode(count)
        return self.logits(int(self.wanted[:count].sum()))

    def logits(self, count: int) -> np.ndarray:
        """Logits of the last call's marked rows in batch order: float32 [count, n_vocab], a copy."""
        n_vocab = self.model.n_vocab
        if count == 0:
            return np.empty((0, n_vocab), np.float32)
        pointer = self._lib.llama_get_logits(self.handle)
        address = ctypes.addressof(pointer.contents)
        raw = (ctypes.c_float * (count * n_vocab)).from_address(address)
        return np.frombuffer(raw, np.float32).reshape(count, n_vocab).copy()

    # -- memory

    def remove(self, seq_id: int, start: int = -1, stop: int = -1) -> bool:
        """``llama_memory_seq_rm``; False means that nothing was done."""
        return self._lib.llama_memory_seq_rm(self.memory, seq_id, start, stop)

    def copy(self, source: int, target: int, start: int = -1, stop: int = -1) -> None:
        """``llama_memory_seq_cp``; a partial range between streams aborts the process."""
        self._lib.llama_memory_seq_cp(self.memory, source, target, start, stop)

    def clear(self) -> None:
        """``llama_memory_clear``; buffers keep their bytes, which nothing may read."""
        self._lib.llama_memory_clear(self.memory, False)

    def last_position(self, seq_id: int) -> int:
        """Largest position held for a sequence, -1 for none."""
        return self._lib.llama_memory_seq_pos_max(self.memory, seq_id)

    def save_sequence(self, seq_id: int) -> bytes:
        """State of one sequence as a blob (``llama_state_seq_get_data``)."""
        size = self._lib.llama_state_seq_get_size(self.handle, seq_id)
        buffer = (ctypes.c_uint8 * size)()
        written = self._lib.llama_state_seq_get_data(self.handle, buffer, size, seq_id)
        return bytes(buffer[:written])

    def load_sequence(self, seq_id: int, blob: bytes) -> bool:
        """Restore a blob into a sequence (``llama_state_seq_set_data``); False if
        llama.cpp did not read it all.

        After False the sequence may hold something: llama.cpp takes a blob with bytes behind its end.
        """
        buffer = (ctypes.c_uint8 * len(blob)).from_buffer_copy(blob)
        return 0 < self._lib.llama_state_seq_set_data(self.handle, buffer, len(blob), seq_id) == len(blob)

    def close(self) -> None:
        if self.handle:
            self._lib.llama_free(self.handle)
            self.handle = None


# -- llama.cpp's own quantiser.


def quantise_model(source: Path, target: Path, ftype: int, n_threads: int) -> None:
    """Write ``source`` quantised to ``target``.

    ``ftype`` is llama.cpp's ``llama_ftype`` (``gguf.LlamaFileType``).
    """
    settings = library().llama_model_quantize_default_params()
    settings.ftype, settings.nthread = ftype, n_threads
    code = library().llama_model_quantize(str(source).encode(), str(target).encode(), ctypes.byref(settings))
    if code != 0:
        raise UsageError(
            "llama.cpp could not quantise a model",
            where=str(source),
            why=f"it returned {code}",
            todo="see its messages above",
        )
