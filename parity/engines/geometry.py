"""How a context is laid out: sequence ids that sessions need, cells as llama.cpp rounds them."""

from __future__ import annotations

CELL_GRAIN = 256  # llama.cpp rounds a context, and every stream of one, up to this many cells


def round_cells(count: int) -> int:
    """``count`` cells as llama.cpp makes them."""
    return -(-count // CELL_GRAIN) * CELL_GRAIN


def ids_per_sequence(shadow: bool) -> int:
    """Ids under which every token of a sequence is decoded: two with a window cache, so that no cell of it
    has a single owner and is used again.
    """
    return 2 if shadow else 1


def spare_ids(recurrent: bool) -> int:
    """Ids beside the sequences': a recurrent context keeps one empty, whose copy drops another's state."""
    return 1 if recurrent else 0


def ids_of(num_sequences: int, *, shadow: bool, recurrent: bool) -> int:
    """llama.cpp's ``n_seq_max`` for so many sequences; the spare id is the last one."""
    return num_sequences * ids_per_sequence(shadow) + spare_ids(recurrent)


def sequences_of(n_seq_max: int, *, shadow: bool, recurrent: bool) -> int:
    """Sequences for which ``n_seq_max`` ids are enough; the other way round than ``ids_of``."""
    return (n_seq_max - spare_ids(recurrent)) // ids_per_sequence(shadow)
