"""The exact engine's memory: cells, sequences and recurrent states of one context, with
llama.cpp's rules and no floats.
"""

from __future__ import annotations

from collections.abc import Sequence

from scheduler.engine import EngineFailure, MemoryOp, OpKind
from scheduler.limits import Layout, PoolLimits

MODULUS = (1 << 61) - 1
BASE = 0x0F0A_5B1D_93C4_E837
EVERYTHING = 1 << 62

# input digest, position, sequence id, the cell where it must land (-1: anywhere)
Row = tuple[int, int, int, int]


class EngineAbort(Exception):
    """Where llama.cpp would end the process, or where rows landed on other cells
    than the scheduler's books say.
    """


class _Sequence:
    """One sequence id: its cells by position, and, while they are whole and ordered,
    running folds of their contents.

    ``folds[n]`` is the fold of the first n rows. A hole or a cell out of order makes the
    sequence irregular: its rows then fold what they see one by one, which is slow and gives
    other digests, as it would with floats.
    """

    __slots__ = ("cells", "folds", "last_cell", "next_position", "regular", "state", "state_position")

    def __init__(self) -> None:
        self.cells: dict[int, int] = {}
        self.folds = [0]
        self.regular = True
        self.last_cell = -1
        self.next_position = 0
        self.state = 0
        self.state_position = -1

    def remove(self, start: int, stop: int) -> list[int]:
        """Forget positions ``[start, stop)``; returns the cells that they had."""
        cells = self.cells
        if start == 0 and stop >= self.next_position:
            freed = list(cells.values())
            cells.clear()
        else:
            freed = [
                cells.pop(position)
                for position in range(start, min(stop, self.next_position))
                if position in cells
            ]
        if not cells:
            self.folds, self.regular, self.last_cell, self.next_position = [0], True, -1, 0
        elif stop >= self.next_position:
            self.next_position = max(cells) + 1
            self.last_cell = cells[self.next_position - 1]
            del self.folds[self.next_position + 1 :]
        elif freed:
            self.regular = False
        return freed


class _Stream:
    """An array of cells that sequences share: contents, owner counts and llama.cpp's search head."""

    __slots__ = ("contents", "empty", "head", "num_cells", "owners")

    def __init__(self, num_cells: int) -> None:
        self.num_cells = num_cells
        self.contents = [0] * num_cells
        self.owners = [0] * num_cells
        self.empty = (1 << num_cells) - 1  # bit i: cell i has no owner
        self.head = 0

    def find_slot(self, count: int) -> list[int]:
        """The next ``count`` empty cells from the head on, wrapping round once.

        Raises ``EngineFailure`` if too few.
        """
        free = self.empty.bit_count()
        if free < count:
            raise EngineFailure(f"no slot: {count} rows, {free} empty cells")
        head = self.head
        if head > self.num_cells - free + 2 * count or head >= self.num_cells:
            head = 0
        found: list[int] = []
        for offset in (head, 0):
            mask = self.empty >> offset
            while mask and len(found) < count:
                low = mask & -mask
                found.append(low.bit_length() - 1 + offset)
                mask ^= low
            if len(found) == count:
                break
        return found

    def release(self, cells: Sequence[int]) -> None:
        """One owner lets go of each cell; the head moves down to the lowest cell that is empty now."""
        lowest = self.num_cells
        for cell in cells:
            self.owners[cell] -= 1
            if self.owners[cell] == 0:
                self.empty |= 1 << cell
                lowest = min(lowest, cell)
        self.head = min(self.head, lowest) if lowest < self.num_cells else self.head


class ExactPool:
    """Memory of one stage.

    ``window`` limits what window layers see; ``salt`` stands for the stage's weights.
    """

    def __init__(self, limits: PoolLimits, *, window: int | None, salt: int) -> None:
        self.limits, self.window, self.salt = limits, window, salt
        self.powers = [pow(BASE, exponent, MODULUS) for exponent in range(window or 0)]
        # stock placement is somebody else's, so position is the order
        self.by_cell = limits.layout is Layout.UNIFIED
        self.clear()

    def clear(self) -> None:
        limits = self.limits
        private = limits.layout is Layout.STREAMS
        count = limits.max_session_rows if private else limits.num_cells + (1 if limits.pads else 0)
        self.streams = [_Stream(count) for _ in range(limits.num_sequences if private else 1)]
        self.sequences = [_Sequence() for _ in range(limits.num_sequences)]

    # -- what llama.cpp's callers can ask

    def next_position(self, seq_id: int) -> int:
        """One more than ``seq_pos_max``: the minimum over attention and recurrent memory."""
        sequence = self.sequences[self._checked(seq_id)]
        if self.limits.recurrent:
            return min(sequence.next_position, sequence.state_position + 1)
        return sequence.next_position

    def num_used(self) -> int:
        """Cells with an owner, padding and retired ids included."""
        return sum(stream.num_cells - stream.empty.bit_count() for stream in self.streams)

    def _stream(self, seq_id: int) -> _Stream:
        return self.streams[seq_id if len(self.streams) > 1 else 0]

    def _checked(self, seq_id: int) -> int:
        if not 0 <= seq_id < len(self.sequences):
            raise EngineAbort(f"sequence id {seq_id} outside [0, {len(self.sequences)}): a failed assertion")
        return seq_id

    # -- memory operations

    def apply(self, op: MemoryOp) -> None:
        """One operation.

        Raises ``EngineFailure`` where the call returns false, ``EngineAbort`` where it asserts.
        """
        if op.kind is OpKind.CLEAR:
            self.clear()
        elif op.kind is OpKind.REMOVE:
            start, stop = max(op.start, 0), op.stop if op.stop >= 0 else EVERYTHING
            self._remove(self._checked(op.seq_id), start, stop)
        elif op.kind is OpKind.COPY:
            self._copy(self._checked(op.source), self._checked(op.seq_id), op.start, op.stop)
        else:
            self.sequences[self._checked(op.seq_id)].state_position = -1

    def _remove(self, seq_id: int, start: int, stop: int) -> None:
        sequence = self.sequences[seq_id]
        if 0 <= sequence.state_position:
            if 0 < start <= sequence.state_position < stop:
                raise EngineFailure(
                    f"seq_rm [{start}, {stop}) of sequence {seq_id} refused: its recurrent state is at "
                    f"{sequence.state_position}"
                )
            if start <= sequence.state_position < stop:
                sequence.state_position = -1
        self._stream(seq_id).release(sequence.remove(start, stop))

    def _copy(self, source_id: int, seq_id: int, start: int, stop: int) -> None:
        source, target = self.sequences[source_id], self.sequences[seq_id]
        if target.cells:
            raise EngineAbort(f"seq_cp into sequence {seq_id}, which owns cells: two rows at one position")
        stream, wanted = self._stream(source_id), self._stream(seq_id)
        if wanted is not stream and (start > 0 or 0 < stop < stream.num_cells - 1):
            raise EngineAbort("seq_cp of a partial range between streams: only full buffers can be copied")
        start, stop = max(start, 0), stop if stop >= 0 else EVERYTHING
        target.cells = {position: cell for position, cell in source.cells.items() if start <= position < stop}
        for cell in target.cells.values():
            wanted.contents[cell] = stream.contents[cell]
            wanted.owners[cell] += 1
            wanted.empty &= ~(1 << cell)
        wanted.head = stream.head
        target.next_position = max(target.cells, default=-1) + 1
        target.last_cell = target.cells.get(target.next_position - 1, -1)
        target.regular = source.regular and (start == 0 or not target.cells)
        target.folds = source.folds[: target.next_position + 1]
        target.state, target.state_position = source.state, source.state_position  # whole, whatever the range

    # -- rows

    def decode(self, rows: Sequence[Row]) -> list[int]:
        """One native decode call; returns a digest per row.

        Raises ``EngineFailure`` where llama.cpp returns an error.
        """
        self._check_batch(rows)
        digests = [0] * len(rows)
        for part in self._split(rows):
            if len(self.streams) > 1:
                for index in part:
                    digests[index] = self._place(rows[index], self._stream(rows[index][2]).find_slot(1)[0])
            else:
                for index, cell in zip(part, self.streams[0].find_slot(len(part)), strict=True):
                    digests[index] = self._place(rows[index], cell)
        return digests

    def _check_batch(self, rows: Sequence[Row]) -> None:
        if not 0 < len(rows) <= self.limits.max_call_rows:
            raise EngineFailure(f"call of {len(rows)} rows, at most {self.limits.max_call_rows} fit")
        following: dict[int, int] = {}
        for _, position, seq_id, _ in rows:
            if not 0 <= seq_id < len(self.sequences):
                raise EngineFailure(f"sequence id {seq_id} outside [0, {len(self.sequences)})")
            expected = following.get(seq_id)
            if expected is None:
                expected = self.next_position(seq_id) or position  # an empty sequence may start anywhere
            if position != expected:
                raise EngineFailure(f"sequence {seq_id}: position {position} after {expected - 1}")
            following[seq_id] = position + 1

    def _split(self, rows: Sequence[Row]) -> list[Sequence[int]]:
        """Row indices per micro-batch: a hybrid's micro-batch holds equally many
        rows of each of its sequences.
        """
        if not self.limits.recurrent:
            return [range(len(rows))]
        waiting: dict[int, list[int]] = {}
        for index, row in enumerate(rows):
            waiting.setdefault(row[2], []).append(index)
        parts: list[Sequence[int]] = []
        while waiting:
            length = min(map(len, waiting.values()))
            parts.append([index for indices in waiting.values() for index in indices[:length]])
            waiting = {
                seq_id: indices[length:] for seq_id, indices in waiting.items() if len(indices) > length
            }
        return parts

    def _place(self, row: Row, cell: int) -> int:
        value, position, seq_id, wanted = row
        if wanted not in (-1, cell):
            raise EngineAbort(
                f"row of sequence {seq_id} at position {position} landed on cell {cell}, not {wanted}"
            )
        sequence, stream = self.sequences[seq_id], self._stream(seq_id)
        if not 0 <= cell < stream.num_cells or stream.owners[cell]:
            raise EngineAbort(f"cell {cell} is not empty")
        if (
            sequence.regular
            and position == len(sequence.folds) - 1
            and (cell > sequence.last_cell or not self.by_cell)
        ):
            content, digest = self._regular_row(sequence, value, position)
        else:
            content, digest = self._irregular_row(sequence, stream, value, position, cell)
        stream.owners[cell] = 1
        stream.empty ^= 1 << cell
        stream.contents[cell] = content
        stream.head = cell + 1
        sequence.cells[position] = cell
        sequence.last_cell, sequence.next_position = cell, position + 1
        if self.limits.recurrent:
            sequence.state_position = position
        return digest

    def _regular_row(self, sequence: _Sequence, value: int, position: int) -> tuple[int, int]:
        folds, window = sequence.folds, self.window
        seen, fold, state = 0, folds[position], sequence.state if sequence.state_position >= 0 else 0
        if window is not None:
            left = max(position + 1 - window, 0)
            seen = (fold - folds[left] * self.powers[position - left]) % MODULUS
        content = hash((self.salt, value, position, fold, seen, state))
        fold = (fold * BASE + content) % MODULUS
        folds.append(fold)
        if window is not None:
            seen = (seen * BASE + content) % MODULUS
        if self.limits.recurrent:
            state = sequence.state = hash((state, content))
        return content, hash((content, fold, seen, state))

    def _irregular_row(
        self, sequence: _Sequence, stream: _Stream, value: int, position: int, cell: int
    ) -> tuple[int, int]:
        """By the definition: fold the visible cells one by one, in the order
        in which attention walks them.
        """
        sequence.regular = False
        visible = [
            (other if self.by_cell else at, at, stream.contents[other])
            for at, other in sequence.cells.items()
            if at <= position
        ]
        visible.sort()
        state = sequence.state if sequence.state_position >= 0 else 0
        content = hash((self.salt, value, position, *self._folds(visible, position), state))
        visible.append((cell if self.by_cell else position, position, content))
        visible.sort()
        if self.limits.recurrent:
            state = sequence.state = hash((state, content))
        return content, hash((content, *self._folds(visible, position), state))

    def _folds(self, visible: list[tuple[int, int, int]], position: int) -> tuple[int, int]:
        fold = seen = 0
        for _, at, content in visible:
            fold = (fold * BASE + content) % MODULUS
            if self.window is not None and at > position - self.window:
                seen = (seen * BASE + content) % MODULUS
        return fold, seen
