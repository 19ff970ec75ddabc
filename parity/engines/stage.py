"""One stage of a split model: some layers in a context of their own; hidden
states in, states or logits out.
"""

from __future__ import annotations

import ctypes
import functools
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from parity.engines.llama import LlamaModel, library
from parity.engines.numerics import NumericsProfile
from parity.engines.pool import PoolContext
from scheduler.engine import PAD_ROW, Batch, Call, EngineFailure
from scheduler.limits import Layout

# -- Reads a stage's hidden states out of llama.cpp's graph, and lets hidden states in
# behind the scale on embeddings.
#
# The scheduler of ggml's back ends asks an evaluation callback about every node before it computes it,
# and shows it the nodes that were asked for. Where a field lies in a ``ggml_tensor`` is measured on a
# tensor made for that, not assumed.

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

    def _make_callback(self) -> Callable[..., bool]:
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


NO_SCALE = 1.0

# Batch rows -> float32 [rows, n_embd]; PAD_ROW gives zeros.
TakeStates = Callable[[Sequence[int]], np.ndarray]
# Batch rows, float32 [rows, n_embd or n_vocab].
GiveRows = Callable[[Sequence[int], np.ndarray], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSettings:
    """What a stage is made of; text and numbers only, so that it can cross to another process.

    ``index`` of ``num_stages``; layers ``[start, stop)`` of the whole model are layers ``[0, stop
    - start)`` of the file at ``path``. ``embedding_scale`` is what the architecture multiplies
    its input with (1.0: nothing).
    """

    path: str
    index: int
    num_stages: int
    start: int
    stop: int
    layout: Layout
    num_sequences: int
    num_cells: int
    shadow: bool
    recurrent: bool
    profile: NumericsProfile
    embedding_scale: float = NO_SCALE
    kv_type: str = "f16"
    n_threads: int = 1
    swa_full: bool = True

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index == self.num_stages - 1

    @property
    def label(self) -> str:
        """``stage 1 (layers 2:4)``, or of an unsplit model ``the engine``."""
        return (
            "the engine" if self.num_stages == 1 else f"stage {self.index} (layers {self.start}:{self.stop})"
        )

    def to_json(self) -> str:
        return json.dumps({**asdict(self), "layout": self.layout.value, "profile": self.profile.to_json()})

    @staticmethod
    def from_json(text: str) -> StageSettings:
        data = json.loads(text)
        return StageSettings(
            **{
                **data,
                "layout": Layout(data["layout"]),
                "profile": NumericsProfile.from_json(data["profile"]),
            }
        )


class HiddenRows:
    """Hidden states of one step by batch row: what one stage hands to the next.

    Rows never given read as an error.
    """

    def __init__(self, num_rows: int, n_embd: int) -> None:
        self._states = np.zeros((num_rows + 1, n_embd), np.float32)  # the last row is zero: PAD_ROW is -1
        self.missing = np.ones(num_rows + 1, bool)
        self.missing[PAD_ROW] = False

    def give(self, rows: Sequence[int], states: np.ndarray) -> None:
        index = np.fromiter(rows, np.int64, len(rows))
        own = index != PAD_ROW
        self._states[index[own]] = states[own]
        self.missing[index[own]] = False

    def has(self, rows: Sequence[int]) -> bool:
        """Whether every one of these rows has been given."""
        return not self.missing[list(rows)].any()

    def take(self, rows: Sequence[int]) -> np.ndarray:
        """float32 [rows, n_embd], a copy.

        Raises ``EngineFailure`` for a row that the stage before did not give.
        """
        if not self.has(rows):
            lost = [row for row in rows if self.missing[row]]
            raise EngineFailure(f"hidden states of batch rows {lost} were not handed over")
        return self._states[list(rows)]


class Stage:
    """A context of some layers.

    Calls come in this stage's own order; rows are named by their index in the batch.
    """

    def __init__(self, settings: StageSettings) -> None:
        self.settings = settings
        self.model = LlamaModel(Path(settings.path), use_extra_bufts=settings.profile.use_extra_bufts)
        undo_scale = not settings.is_first and settings.embedding_scale != NO_SCALE
        last_layer = None if settings.is_last else settings.stop - settings.start - 1
        self.tap: HiddenTap | None = None
        if undo_scale or last_layer is not None:
            self.tap = HiddenTap(
                n_embd=self.model.n_embd, max_rows=512, last_layer=last_layer, undo_scale=undo_scale
            )
        self.pool = PoolContext(
            self.model,
            layout=settings.layout,
            num_sequences=settings.num_sequences,
            num_cells=settings.num_cells,
            shadow=settings.shadow,
            recurrent=settings.recurrent,
            profile=settings.profile,
            kv_type=settings.kv_type,
            n_threads=settings.n_threads,
            swa_full=settings.swa_full,
            embedding_input=not settings.is_first,
            eval_callback=self.tap.callback if self.tap else None,
        )

    def run(
        self,
        calls: Sequence[Call],
        batch: Batch,
        wanted: Sequence[int],
        *,
        take: TakeStates | None,
        give: GiveRows,
        before_call: Callable[[], None] = lambda: None,
    ) -> None:
        """Run a step's calls: ``take`` gives hidden states for rows (None in the first
        stage), ``give`` gets results.

        ``wanted`` has 0/1 per batch row: in the last stage only these rows' logits are given,
        float32 [rows, n_vocab]; any other stage gives the hidden states of all rows. Raises
        ``EngineFailure`` with the stage's label.
        """
        outputs = wanted if self.settings.is_last else [1] * len(batch.tokens)
        try:
            for call in calls:
                before_call()
                self.pool.apply(call.ops)
                for part in self._parts(call):
                    self._run_part(part, batch, outputs, take, give)
        except EngineFailure as failure:
            raise EngineFailure(f"{self.settings.label}: {failure}") from failure

    def _parts(self, call: Call) -> list[Call]:
        """The call itself, or the parts of it whose rows llama.cpp does not reorder.

        Outside ``unified`` it cuts calls into groups of equal length per sequence, in increasing
        sequence order, and its graph's rows are in that order. In ``unified`` the scheduler's
        calls are such groups already.
        """
        if self.settings.is_last or self.settings.layout is Layout.UNIFIED:
            return [call]
        return equal_length_parts(call)

    def _run_part(
        self, call: Call, batch: Batch, outputs: Sequence[int], take: TakeStates | None, give: GiveRows
    ) -> None:
        context, count = self.pool.context, self.pool.fill(call, batch, outputs)
        if take is not None:
            context.embeddings[:count] = take(call.rows)
        if self.settings.is_last:
            self._decode(count)
            rows = [row for row in call.rows if row != PAD_ROW and outputs[row]]
            if rows:
                give(rows, context.logits(len(rows)))
            return
        context.wanted[:count] = (
            1  # padding rows too: then every row of the call is in the graph's last layer
        )
        self._decode(count)
        states = self.tap.take()
        if len(states) != count:
            raise EngineFailure(f"handed over {len(states)} hidden states of {count} rows")
        give(call.rows, states)

    def _decode(self, count: int) -> None:
        tap = self.tap
        undone = tap.scales_undone if tap else 0
        self.pool.decode(count)
        if tap and tap.undo_scale and tap.scales_undone == undone:
            raise EngineFailure("the scale on embeddings was not found in the graph")

    def close(self) -> None:
        self.pool.close()
        self.model.close()


def equal_length_parts(call: Call) -> list[Call]:
    """A call as calls of one group each: all single rows by sequence, then each
    longer run of a sequence alone.
    """
    places: dict[int, list[int]] = {}
    for place, seq_id in enumerate(call.seq_ids):
        places.setdefault(seq_id, []).append(place)
    singles = [found[0] for _, found in sorted(places.items()) if len(found) == 1]
    groups = ([singles] if singles else []) + [found for found in places.values() if len(found) > 1]
    return [
        Call(
            (),
            tuple(call.rows[i] for i in group),
            tuple(call.seq_ids[i] for i in group),
            tuple(call.cells[i] for i in group),
        )
        for group in groups
    ]
