"""Limits of a pool, of a step and of the queue: frozen, self-checking, and the
only place that they are named.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

LLAMA_MAX_SEQ = 256  # llama.cpp's bound on sequence ids in one context (llama-cparams.h)


class Layout(Enum):
    """How cells are placed: our ordered placement, one private stream a session,
    or the engine's own placement.
    """

    UNIFIED, STREAMS, STOCK = "unified", "streams", "stock"


class Sharing(Enum):
    """What a prefix hit can give, weakest first: nothing, a whole state at exactly its
    position, any number of tokens.
    """

    NONE, WHOLE_STATE, POSITIONAL = "none", "whole_state", "positional"


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolLimits:
    """One engine context (one stage): what its memory can hold and how its calls must look.

    ``num_cells`` counts usable cells; ``streams`` cuts them into ``num_sequences`` equal private parts.
    ``recurrent``: each sequence also owns a state, so calls hold equally many rows per session and a
    partial removal is refused while it lives. With ``pad_lone_rows`` a call of up to ``max_call_rows``
    rows never holds a single one (row numerics). A window cache has as many cells as the pool and places
    alike, so it never binds first. ``cell_bytes``, for telemetry alone, is the size of a cell, 0 if unknown.
    """

    layout: Layout = Layout.UNIFIED
    num_cells: int = 1024
    num_sequences: int = 64
    recurrent: bool = False
    sharing: Sharing = Sharing.POSITIONAL
    max_call_rows: int = 63
    pad_lone_rows: bool = True
    cell_bytes: int = 0

    def __post_init__(self) -> None:
        _require(self.num_cells >= 1, f"pool of {self.num_cells} cells: must hold at least one")
        _require(
            1 <= self.num_sequences <= LLAMA_MAX_SEQ,
            f"{self.num_sequences} sequences: must be 1 to {LLAMA_MAX_SEQ} (LLAMA_MAX_SEQ)",
        )
        _require(self.max_call_rows > self.pad_lone_rows, f"calls of {self.max_call_rows} rows: too narrow")
        _require(self.num_sequences > self.pads, "one sequence: padding rows need one more")
        _require(
            self.layout is not Layout.STREAMS or self.sharing is not Sharing.POSITIONAL,
            "streams share whole states only: a partial copy between streams aborts llama.cpp",
        )

    @property
    def pads(self) -> bool:
        """Whether cell 0 and one sequence belong to padding rows."""
        return self.layout is Layout.UNIFIED and self.pad_lone_rows

    @property
    def max_session_rows(self) -> int:
        """The most cells that one session can ever have."""
        return self.num_cells // self.num_sequences if self.layout is Layout.STREAMS else self.num_cells


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLimits:
    """Budgets of one step and bounds of the queue. ``max_chunk_tokens`` bounds one session's chunk,
    ``max_idle_steps`` the steps without progress; ``prefix_block_tokens`` is the granularity at which a
    recurrent state is kept and the shortest prefix worth an entry; ``steps_in_flight`` bounds the steps that
    run at a time, usefully as many as there are stages.
    """

    max_num_batched_tokens: int = 2048
    max_num_seqs: int = 64
    max_chunk_tokens: int = 2048
    max_waiting: int = 1_000_000
    max_idle_steps: int = 64
    prefix_cache: bool = True
    prefix_block_tokens: int = 16
    steps_in_flight: int = 1

    def __post_init__(self) -> None:
        for name in (
            "max_num_batched_tokens",
            "max_num_seqs",
            "max_chunk_tokens",
            "max_waiting",
            "max_idle_steps",
            "prefix_block_tokens",
            "steps_in_flight",
        ):
            _require(getattr(self, name) >= 1, f"{name} is {getattr(self, name)}: must be at least 1")
