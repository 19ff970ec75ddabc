"""Ordered cell allocator: every session's cells have increasing index in position order, whoever its neighbours are.

The engine takes the lowest empty cells, so no unwanted empty cell may exist below a target. Cells of a finished session
stay occupied under its *retired* id and are freed one by one, exactly when a row is placed into them. Sets of cells are
integers used as bit masks: bit i is cell i.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from scheduler.engine import PAD_ROW, Call, MemoryOp, OpKind
from scheduler.limits import Layout, PoolLimits, Sharing

PAD_SEQUENCE = 0


@dataclass(slots=True)
class Owner:
    """Cells of one live sequence id in position order, and the same cells as a mask."""

    cells: list[int] = field(default_factory=list)
    mask: int = 0


def split_rows(count: int, width: int) -> list[int]:
    """Call sizes for ``count`` rows: at most ``width`` each, and no last call of one row unless ``count`` is 1."""
    sizes = [width] * (count // width)
    rest = count % width
    if rest == 1 and sizes and width > 2:
        sizes[-1], rest = width - 1, 2
    return sizes + [rest] if rest else sizes


def lowest_cells(mask: int, *, above: int, count: int) -> list[int] | None:
    """The ``count`` lowest cells of ``mask`` with index > ``above``, increasing; None if there are fewer."""
    shifted = mask >> (above + 1)
    if count == 1:
        return [(shifted & -shifted).bit_length() + above] if shifted else None
    if shifted.bit_count() < count:
        return None
    cells = []
    for _ in range(count):
        low = shifted & -shifted
        cells.append(low.bit_length() + above)
        shifted ^= low
    return cells


class CellPool:
    """Cells and ids of one context. ``allocate`` is all or nothing; operations collect in ``pending`` until taken."""

    def __init__(self, limits: PoolLimits) -> None:
        self.limits = limits
        self._reset()

    def _reset(self) -> None:
        limits = self.limits
        self.pending: list[MemoryOp] = []
        self.owners: dict[int, Owner] = {}
        first = 1 if limits.pads else 0
        self.first_cell = first
        self.num_cells = limits.num_cells + first
        self.available = ((1 << limits.num_cells) - 1) << first
        self.frontier = first
        self.free_ids = deque(range(first, limits.num_sequences))
        self.retired: dict[int, tuple[int, int]] = {}  # cell -> (retired id, position)
        self.retired_left: dict[int, int] = {}  # retired id -> cells it still keeps
        self.primed = not limits.pads
        self._undo: list[tuple[Owner, int, int]] = []

    # -- facts -------------------------------------------------------------------------------------------------------

    def num_available(self) -> int:
        return self.available.bit_count()

    def num_used(self) -> int:
        """Cells of live sequences, shared cells counted once."""
        return self.num_cells - self.first_cell - self.available.bit_count()

    def check_conservation(self) -> None:
        """Every cell is live, available or padding, and none is two of them; ids likewise. Raises AssertionError."""
        live = 0
        for owner in self.owners.values():
            live |= owner.mask
        everything = ((1 << self.num_cells) - 1) & ~((1 << self.first_cell) - 1)
        if live & self.available or live | self.available != everything:
            raise AssertionError(f"cells lost or doubled: {bin(everything & ~(live ^ self.available))}")
        ids = len(self.owners) + len(self.retired_left) + len(self.free_ids) + (1 if self.limits.pads else 0)
        if ids != self.limits.num_sequences:
            raise AssertionError(f"{ids} sequence ids accounted for, {self.limits.num_sequences} exist")
        if len(self.retired) != sum(self.retired_left.values()):
            raise AssertionError("retired cells and retired ids disagree")

    # -- sequences ---------------------------------------------------------------------------------------------------

    def open(self) -> int:
        """A fresh sequence id. Raises IndexError when none is free: ask ``free_ids`` first."""
        seq_id = self.free_ids.popleft()
        self.owners[seq_id] = Owner()
        return seq_id

    def share(self, source: int, count: int) -> int:
        """A new sequence that owns the first ``count`` cells of ``source`` too: no cell is copied."""
        seq_id = self.open()
        owner = self.owners[seq_id]
        owner.cells = self.owners[source].cells[:count]
        for cell in owner.cells:
            owner.mask |= 1 << cell
        self.pending.append(MemoryOp(OpKind.COPY, seq_id, 0, count, source))
        return seq_id

    def mask_of_others(self, seq_id: int) -> int:
        others = 0
        for other, owner in self.owners.items():
            if other != seq_id:
                others |= owner.mask
        return others

    def retire(self, seq_id: int) -> None:
        """End a sequence: cells that nobody else owns stay under the retired id and become available."""
        owner = self.owners[seq_id]
        shared = owner.mask & self.mask_of_others(seq_id)
        del self.owners[seq_id]
        if self.limits.recurrent:
            self.pending.append(MemoryOp(OpKind.DROP_STATE, seq_id))
        kept = 0
        for position, cell in enumerate(owner.cells):
            if shared >> cell & 1:
                self._append_removal(seq_id, position)
            else:
                self.retired[cell] = (seq_id, position)
                kept += 1
        self.available |= owner.mask & ~shared
        if kept:
            self.retired_left[seq_id] = kept
            self._lower_frontier()
        else:
            self.free_ids.append(seq_id)

    def _append_removal(self, seq_id: int, position: int) -> None:
        last = self.pending[-1] if self.pending else None
        if last is not None and last.kind is OpKind.REMOVE and last.seq_id == seq_id and last.stop == position:
            self.pending[-1] = MemoryOp(OpKind.REMOVE, seq_id, last.start, position + 1)
        else:
            self.pending.append(MemoryOp(OpKind.REMOVE, seq_id, position, position + 1))

    def _lower_frontier(self) -> None:
        """Free retired cells at the top: an empty cell that is above every used one can harm nobody."""
        freed: list[tuple[int, int]] = []
        while self.frontier > self.first_cell and self.frontier - 1 in self.retired:
            self.frontier -= 1
            freed.append(self._release_retired(self.frontier))
        for seq_id, position in sorted(freed):
            self._append_removal(seq_id, position)

    def _release_retired(self, cell: int) -> tuple[int, int]:
        seq_id, position = self.retired.pop(cell)
        self.retired_left[seq_id] -= 1
        if self.retired_left[seq_id] == 0:
            del self.retired_left[seq_id]
            self.free_ids.append(seq_id)
        return seq_id, position

    def clear(self) -> None:
        """Back to the empty pool; legal only when nobody is live."""
        if self.owners:
            raise AssertionError(f"pool cleared with live sequences {list(self.owners)}")
        self._reset()
        self.pending = [MemoryOp(OpKind.CLEAR)]

    # -- rows --------------------------------------------------------------------------------------------------------

    def allocate(self, seq_id: int, count: int) -> bool:
        """Reserve the next ``count`` cells of a sequence: the lowest available above its last one. Undone by ``undo``."""
        owner = self.owners[seq_id]
        cells = lowest_cells(self.available, above=self._floor(owner), count=count)
        if cells is None:
            return False
        self._undo.append((owner, len(owner.cells), owner.mask))
        mask = 0
        for cell in cells:
            mask |= 1 << cell
        owner.cells += cells
        owner.mask |= mask
        self.available ^= mask
        return True

    def _floor(self, owner: Owner) -> int:
        return owner.cells[-1] if owner.cells else self.first_cell - 1

    def undo(self) -> None:
        """Take back every allocation since the last ``commit``."""
        for owner, length, mask in reversed(self._undo):
            self.available ^= owner.mask ^ mask
            owner.mask = mask
            del owner.cells[length:]
        self._undo.clear()

    def call_groups(self, chunks: list[tuple[int, int, int]]) -> list[list[tuple[int, int, int]]]:
        """Chunks (seq id, first row, count) in the order in which their cells must be allocated.

        Recurrent contexts split a call into groups of equal length, so each call gets one group: all single rows
        together, each longer chunk alone.
        """
        if not self.limits.recurrent or self.limits.layout is not Layout.UNIFIED:
            return [chunks] if chunks else []
        single = [chunk for chunk in chunks if chunk[2] == 1]
        return ([single] if single else []) + [[chunk] for chunk in chunks if chunk[2] > 1]

    def commit(self, groups: list[list[tuple[int, int, int]]]) -> tuple[Call, ...]:
        """The calls that put the allocated rows where they belong, and the removals that make room for them."""
        self._undo.clear()
        calls: list[Call] = []
        if groups and not self.primed:
            calls.append(Call(self.take_pending(), (PAD_ROW,), (PAD_SEQUENCE,), (0,)))
            self.primed = True
        for group in groups:
            placed = []
            for seq_id, first_row, count in group:
                cells = self.owners[seq_id].cells
                base = len(cells) - count
                placed += [(cells[base + i], first_row + i, seq_id) for i in range(count)]
            placed.sort()
            begin = 0
            for size in split_rows(len(placed), self.limits.max_call_rows):
                calls.append(self._call(placed[begin:begin + size]))
                begin += size
        return tuple(calls)

    def _call(self, placed: list[tuple[int, int, int]]) -> Call:
        retired, frontier = self.retired, self.frontier
        freed = [self._release_retired(cell) for cell, _, _ in placed if cell < frontier and cell in retired]
        for seq_id, position in sorted(freed):
            self._append_removal(seq_id, position)
        self.frontier = max(frontier, placed[-1][0] + 1)
        if len(placed) == 1 and self.limits.pads:
            self.pending.append(MemoryOp(OpKind.REMOVE, PAD_SEQUENCE))
            placed = [(0, PAD_ROW, PAD_SEQUENCE), *placed]
        cells, rows, seq_ids = zip(*placed, strict=True)
        return Call(self.take_pending(), rows, seq_ids, cells)

    def take_pending(self) -> tuple[MemoryOp, ...]:
        pending = tuple(self.pending)
        self.pending.clear()
        return pending


class StockPool(CellPool):
    """The engine places rows itself: cells are only counted, and a finished session's cells are freed at once."""

    def _floor(self, owner: Owner) -> int:
        return self.first_cell - 1

    def retire(self, seq_id: int) -> None:
        owner = self.owners[seq_id]
        self.available |= owner.mask & ~self.mask_of_others(seq_id)
        del self.owners[seq_id]
        self.pending.append(MemoryOp(OpKind.REMOVE, seq_id))
        self.free_ids.append(seq_id)

    def commit(self, groups: list[list[tuple[int, int, int]]]) -> tuple[Call, ...]:
        self._undo.clear()
        rows = [(first_row + i, seq_id) for group in groups for seq_id, first_row, count in group for i in range(count)]
        calls, begin = [], 0
        for size in split_rows(len(rows), self.limits.max_call_rows):
            part = rows[begin:begin + size]
            calls.append(Call(self.take_pending(), tuple(r for r, _ in part), tuple(s for _, s in part), (-1,) * size))
            begin += size
        return tuple(calls)


class StreamPool(StockPool):
    """One private stream of equal size per sequence; sharing copies a whole stream, so it needs a whole state."""

    def share(self, source: int, count: int) -> int:
        seq_id = self.open()
        self.owners[seq_id].cells = list(range(count))
        self.pending.append(MemoryOp(OpKind.COPY, seq_id, source=source))
        return seq_id

    def allocate(self, seq_id: int, count: int) -> bool:
        owner = self.owners[seq_id]
        length = len(owner.cells)
        if length + count > self.limits.max_session_rows:
            return False
        self._undo.append((owner, length, 0))
        owner.cells += range(length, length + count)
        return True

    def num_used(self) -> int:
        return sum(len(owner.cells) for owner in self.owners.values())

    def num_available(self) -> int:
        stream = self.limits.max_session_rows
        return len(self.free_ids) * stream + sum(stream - len(owner.cells) for owner in self.owners.values())

    def check_conservation(self) -> None:
        if len(self.owners) + len(self.free_ids) != self.limits.num_sequences:
            raise AssertionError(f"{len(self.owners)} live and {len(self.free_ids)} free streams of "
                                 f"{self.limits.num_sequences}")


def make_pool(limits: PoolLimits) -> CellPool:
    """The pool for a layout. Raises ValueError where a layout cannot share as asked."""
    if limits.layout is Layout.STREAMS and limits.sharing is Sharing.POSITIONAL:
        raise ValueError("streams share whole states only: a partial copy between streams aborts llama.cpp")
    return {Layout.UNIFIED: CellPool, Layout.STREAMS: StreamPool, Layout.STOCK: StockPool}[limits.layout](limits)
