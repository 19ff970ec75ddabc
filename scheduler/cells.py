"""Ordered cell allocator: a session's cells have increasing index in position
order, whoever its neighbours are.

The engine takes the lowest empty cells, so no unwanted empty cell may exist below a target. Cells of a
finished session therefore stay occupied under its *retired* id and are freed one by one, exactly when a row
is placed into them. Sets of cells are integers used as bit masks: bit i is cell i. In ``streams`` each id has
its own part of the numbers, in ``stock`` the engine places rows and cells are only counted.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from dataclasses import dataclass, field

from scheduler.engine import PAD_ROW, Call, MemoryOp, OpKind
from scheduler.limits import Layout, PoolLimits

PAD_SEQUENCE = 0


@dataclass(slots=True)
class Owner:
    """Cells of one live sequence id in position order, and the same cells as a mask."""

    cells: list[int] = field(default_factory=list)
    mask: int = 0


def split_rows(count: int, width: int) -> list[int]:
    """Call sizes for ``count`` rows: at most ``width`` each, and no last call of
    one row unless ``count`` is 1.
    """
    sizes = [width] * (count // width)
    rest = count % width
    if rest == 1 and sizes and width > 2:
        sizes[-1], rest = width - 1, 2
    return sizes + [rest] if rest else sizes


def lowest_cells(mask: int, *, above: int, count: int) -> list[int] | None:
    """The ``count`` lowest cells of ``mask`` with index > ``above``, increasing; None if there are fewer."""
    shifted, cells = mask >> (above + 1), []
    for _ in range(count):
        low = shifted & -shifted
        if not low:
            return None
        cells.append(low.bit_length() + above)
        shifted ^= low
    return cells


class CellPool:
    """Cells and ids of one context. Operations collect in ``pending`` until a call takes them along."""

    def __init__(self, limits: PoolLimits) -> None:
        self.limits = limits
        self.ordered = limits.layout is Layout.UNIFIED
        self.stream_cells = limits.max_session_rows if limits.layout is Layout.STREAMS else 0
        self.first_cell = 1 if limits.pads else 0
        self.everything = (
            (1 << (self.stream_cells * limits.num_sequences or limits.num_cells)) - 1
        ) << self.first_cell
        self.owners: dict[int, Owner] = {}
        self.clear()
        self.pending.clear()

    def clear(self) -> None:
        """Back to the empty pool; legal only when nobody is live."""
        if self.owners:
            raise AssertionError(f"pool cleared with live sequences {list(self.owners)}")
        self.pending: list[MemoryOp] = [MemoryOp(OpKind.CLEAR)]
        self.available = self.everything
        self.frontier = self.first_cell  # cells from here on are untouched
        self.free_ids = deque(range(self.first_cell, self.limits.num_sequences))
        self.retired: dict[int, tuple[int, int]] = {}  # cell -> (retired id, position)
        self.retired_left: dict[int, int] = {}  # retired id -> cells that it still keeps
        self._primed = not self.limits.pads
        self._undo: list[tuple[Owner, int, int]] = []
        self._groups: list[list[tuple[int, int, int]]] = []

    # -- facts

    def num_available(self) -> int:
        return self.available.bit_count()

    def num_used(self) -> int:
        """Cells of live sequences, shared cells counted once."""
        return self.everything.bit_count() - self.available.bit_count()

    def room_after(self, seq_id: int, count: int, also: int = 0) -> int:
        """Rows that could follow the first ``count`` rows of a sequence, cells
        of ``also`` taken for available.
        """
        if self.stream_cells:
            return self.stream_cells - count
        above = self.owners[seq_id].cells[count - 1] if self.ordered and count else -1
        return ((self.available | also) >> (above + 1)).bit_count()

    def rows_to_keep(self, seq_id: int, wanted: int) -> int:
        """The most leading rows of a sequence after which ``wanted`` available cells follow."""
        return bisect_left(
            range(len(self.owners[seq_id].cells)),
            True,
            key=lambda count: self.room_after(seq_id, count + 1) < wanted,
        )

    def shared_rows(self, seq_id: int) -> int:
        """Leading rows of a sequence up to the last one that others own, too."""
        owner = self.owners[seq_id]
        shared = owner.mask & self.others_mask(seq_id)
        return bisect_left(owner.cells, shared.bit_length()) if shared else 0

    def others_mask(self, seq_id: int) -> int:
        """Cells that sequences other than this one own."""
        others = 0
        for other, owner in self.owners.items():
            if other != seq_id:
                others |= owner.mask
        return others

    # -- sequences

    def open(self) -> int:
        """A fresh sequence id. Raises IndexError when none is free."""
        seq_id = self.free_ids.popleft()
        self.owners[seq_id] = Owner()
        return seq_id

    def share(self, source: int, count: int) -> int:
        """A new sequence that owns the first ``count`` cells of ``source`` too;
        streams copy the whole of it instead.
        """
        seq_id = self.open()
        owner = self.owners[seq_id]
        if self.stream_cells:
            self.pending.append(MemoryOp(OpKind.COPY, seq_id, source=source))
            self._allocate(seq_id, count)
            self._undo.clear()
        else:
            self.pending.append(MemoryOp(OpKind.COPY, seq_id, 0, count, source))
            owner.cells = self.owners[source].cells[:count]
            owner.mask = sum(1 << cell for cell in owner.cells)
        return seq_id

    def retire(self, seq_id: int) -> None:
        """End a sequence: in ordered pools, cells that nobody else owns stay
        under the id and become available.
        """
        shared, owner = self.others_mask(seq_id), self.owners.pop(seq_id)
        self.available |= owner.mask & ~shared
        if not self.ordered:
            self.pending.append(MemoryOp(OpKind.REMOVE, seq_id))
            self.free_ids.append(seq_id)
            return
        if self.limits.recurrent:
            self.pending.append(MemoryOp(OpKind.DROP_STATE, seq_id))
        if not owner.cells:
            self.free_ids.append(seq_id)
            return
        self.retired |= {cell: (seq_id, position) for position, cell in enumerate(owner.cells)}
        self.retired_left[seq_id] = len(owner.cells)
        freed = [self._release(cell) for cell in owner.cells if shared >> cell & 1]
        while self.frontier - 1 in self.retired:  # an empty cell above every used one can harm nobody
            self.frontier -= 1
            freed.append(self._release(self.frontier))
        self._remove(freed)

    def _release(self, cell: int) -> tuple[int, int]:
        seq_id, position = self.retired.pop(cell)
        self.retired_left[seq_id] -= 1
        if self.retired_left[seq_id] == 0:
            del self.retired_left[seq_id]
            self.free_ids.append(seq_id)
        return seq_id, position

    def _remove(self, freed: list[tuple[int, int]]) -> None:
        """Removals of (id, position), one for each run of positions."""
        runs: list[list[int]] = []
        for seq_id, position in sorted(freed):
            if runs and runs[-1][0] == seq_id and runs[-1][2] == position:
                runs[-1][2] += 1
            else:
                runs.append([seq_id, position, position + 1])
        self.pending += [MemoryOp(OpKind.REMOVE, *run) for run in runs]

    # -- rows

    def place(self, chunks: list[tuple[int, int, int]]) -> int | None:
        """Reserve cells for every (sequence id, first batch row, rows), in the order of the calls; None,
        or the sequence that finds none.

        Recurrent contexts split a call into groups of equal length, so each call gets one group: all single
        rows together, each longer chunk alone. Undone by ``undo``, made final by ``take_calls``.
        """
        self._groups = [chunks] if chunks else []
        if self.limits.recurrent and self.ordered:
            single = [chunk for chunk in chunks if chunk[2] == 1]
            self._groups = ([single] if single else []) + [[chunk] for chunk in chunks if chunk[2] > 1]
        for group in self._groups:
            for seq_id, _, count in group:
                if not self._allocate(seq_id, count):
                    return seq_id
        return None

    def _allocate(self, seq_id: int, count: int) -> bool:
        owner = self.owners[seq_id]
        above = owner.cells[-1] if owner.cells and (self.ordered or self.stream_cells) else -1
        if self.stream_cells:
            above = max(above, seq_id * self.stream_cells - 1)
            if len(owner.cells) + count > self.stream_cells:
                return False
        cells = lowest_cells(self.available, above=above, count=count)
        if cells is None:
            return False
        self._undo.append((owner, len(owner.cells), owner.mask))
        mask = 1 << cells[0] if count == 1 else sum(1 << cell for cell in cells)
        owner.cells += cells
        owner.mask |= mask
        self.available ^= mask
        return True

    def undo(self) -> None:
        """Take back every reservation since the last ``take_calls``."""
        for owner, length, mask in reversed(self._undo):
            self.available ^= owner.mask ^ mask
            owner.mask = mask
            del owner.cells[length:]
        self._undo.clear()

    def take_calls(self) -> tuple[Call, ...]:
        """The calls that put the placed rows where they belong, with the removals that make room for them."""
        self._undo.clear()
        calls: list[Call] = []
        if self._groups and not self._primed:
            calls.append(Call(self.take_pending(), (PAD_ROW,), (PAD_SEQUENCE,), (0,)))
            self._primed = True
        for group in self._groups:
            placed = []
            for seq_id, first_row, count in group:
                cells = self.owners[seq_id].cells[-count:]
                placed += [(cell, row, seq_id) for row, cell in enumerate(cells, first_row)]
            if self.ordered:
                placed.sort()
            begin = 0
            for size in split_rows(len(placed), self.limits.max_call_rows):
                calls.append(self._call(placed[begin : begin + size]))
                begin += size
        return tuple(calls)

    def _call(self, placed: list[tuple[int, int, int]]) -> Call:
        if self.ordered:
            retired = self.retired
            self._remove([self._release(cell) for cell, _, _ in placed if cell in retired])
            self.frontier = max(self.frontier, placed[-1][0] + 1)
            if len(placed) == 1 and self.limits.pads:
                self.pending.append(MemoryOp(OpKind.REMOVE, PAD_SEQUENCE))
                placed = [(0, PAD_ROW, PAD_SEQUENCE), *placed]
        cells, rows, seq_ids = zip(*placed, strict=True)
        return Call(self.take_pending(), rows, seq_ids, cells if self.ordered else (-1,) * len(rows))

    def take_pending(self) -> tuple[MemoryOp, ...]:
        pending = tuple(self.pending)
        self.pending.clear()
        return pending
