"""Room for sessions together: who may still write how many rows above which cell of an ordered pool.

A session writes above its last cell, its *floor*, so the sets of cells that sessions can use are nested and
Hall's condition is exact: for every floor f, the rows to come of all sessions whose floor is at or above f
must not exceed the free cells above f. Once true it stays true while rows go into the lowest free cell above
their session's floor: no free cell lies between the old floor and the new one.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Room:
    """Free cells of one ordered pool as a mask, and (floor, rows to come) of every session that writes there,
    highest floor first; a session without cells has floor -1.
    """

    cells: int
    demands: list[tuple[int, int]]

    def shortage(self, *, floor: int, rows: int, pinned: int = 0) -> int | None:
        """The highest floor above which cells would be short, if a session with ``rows`` to come began at
        ``floor`` and the cells of ``pinned`` were no longer free; None if everybody has room.
        """
        cells = self.cells & ~pinned
        total, waits = 0, True
        for other, demand in self.demands:
            if waits and other <= floor:
                waits, total = False, total + rows
                if total > (cells >> (floor + 1)).bit_count():
                    return floor
            total += demand
            touched = not waits or pinned >> (other + 1)
            if touched and total > (cells >> (other + 1)).bit_count():
                return other
        if waits and total + rows > (cells >> (floor + 1)).bit_count():
            return floor
        return None

    def is_enough(self) -> bool:
        """Whether everybody who is there has room."""
        total = 0
        for floor, demand in self.demands:
            total += demand
            if total > (self.cells >> (floor + 1)).bit_count():
                return False
        return True

    def total_demand(self) -> int:
        return sum(demand for _, demand in self.demands)

    def take(self, *, floor: int, rows: int, pinned: int) -> None:
        """Count a session that will enter."""
        self.cells &= ~pinned
        self.demands.append((floor, rows))
        self.demands.sort(reverse=True)

    def copy(self) -> Room:
        return Room(self.cells, list(self.demands))
