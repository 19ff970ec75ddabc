"""Limits of a pool, of a step and of the queue: frozen, self-checking, and the only place that they are named."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

LLAMA_MAX_SEQ = 256  # llama.cpp's bound on sequence ids in one context (llama-cparams.h)


class Layout(Enum):
    """How cells are placed: our ordered placement, one private stream a session, or the engine's own placement."""

    UNIFIED = "unified"
    STREAMS = "streams"
    STOCK = "stock"


class Sharing(Enum):
    """What a prefix hit can give: nothing, any number of tokens, or a whole state at exactly its position."""

    NONE = "none"
    POSITIONAL = "positional"
    WHOLE_STATE = "whole_state"


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolLimits:
    """One engine context (one stage): what its memory can hold and how its calls must look.

    ``num_cells`` counts usable cells of the whole pool; in ``streams`` each of the ``num_sequences`` private streams has
    ``num_cells // num_sequences``. ``recurrent`` says that each sequence also owns one recurrent state, so that calls hold
    rows of equal count per session and a partial removal is refused while the state lives. ``max_call_rows`` bounds one
    call; with ``pad_lone_rows`` a call never holds a single row (row numerics need 2 or more).
    """

    layout: Layout = Layout.UNIFIED
    num_cells: int = 1024
    num_sequences: int = 64
    recurrent: bool = False
    sharing: Sharing = Sharing.POSITIONAL
    max_call_rows: int = 63
    pad_lone_rows: bool = True

    def __post_init__(self) -> None:
        _require(self.num_cells >= 1, f"pool of {self.num_cells} cells: must hold at least one")
        _require(1 <= self.num_sequences <= LLAMA_MAX_SEQ,
                 f"{self.num_sequences} sequences: must be 1 to {LLAMA_MAX_SEQ} (LLAMA_MAX_SEQ)")
        _require(self.max_call_rows >= (2 if self.pad_lone_rows else 1),
                 f"calls of {self.max_call_rows} rows: too narrow")
        _require(self.num_sequences >= 2 or not self.pads,
                 "one sequence: a padded pool needs two, one for padding rows")

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
    """Budgets of one step and bounds of the queue.

    ``max_chunk_tokens`` bounds one session's chunk; ``prefix_block_tokens`` is the granularity at which a recurrent state
    is kept and the shortest prefix worth an entry; ``max_idle_steps`` bounds steps without any progress.
    """

    max_num_batched_tokens: int = 2048
    max_num_seqs: int = 64
    max_chunk_tokens: int = 2048
    max_waiting: int = 1_000_000
    max_idle_steps: int = 64
    prefix_cache: bool = True
    prefix_block_tokens: int = 16
    max_prefix_entries: int | None = None

    def __post_init__(self) -> None:
        _require(self.max_num_batched_tokens >= 1, f"token budget {self.max_num_batched_tokens}: must be at least 1")
        _require(self.max_num_seqs >= 1, f"sequence budget {self.max_num_seqs}: must be at least 1")
        _require(self.max_chunk_tokens >= 1, f"chunk limit {self.max_chunk_tokens}: must be at least 1")
        _require(self.max_waiting >= 1, f"queue bound {self.max_waiting}: must be at least 1")
        _require(self.max_idle_steps >= 1, f"idle bound {self.max_idle_steps}: must be at least 1")
        _require(self.prefix_block_tokens >= 1, f"prefix block {self.prefix_block_tokens}: must be at least 1")

    @property
    def prefix_entry_limit(self) -> int:
        """Resident entries: at most twice the lanes."""
        return 2 * self.max_num_seqs if self.max_prefix_entries is None else self.max_prefix_entries


def sequence_ceiling(*, pool_cells: int, floor_ctx_per_session: int, reserved: int,
                     state_budget_bytes: int | None = None, state_bytes_per_sequence: int = 0) -> int:
    """Sessions that may be in flight at once: the minimum of what every component allows (at least 0).

    Attention: ``pool_cells // floor_ctx_per_session``; ids: ``LLAMA_MAX_SEQ - reserved``; recurrent states, which are all
    allocated at load: ``state_budget_bytes // state_bytes_per_sequence``.
    """
    _require(floor_ctx_per_session >= 1, "floor of cells per session: must be at least 1")
    ceiling = min(pool_cells // floor_ctx_per_session, LLAMA_MAX_SEQ - reserved)
    if state_budget_bytes is not None and state_bytes_per_sequence:
        ceiling = min(ceiling, state_budget_bytes // state_bytes_per_sequence)
    return max(ceiling, 0)
