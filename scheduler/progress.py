"""Whether anybody gets further. Progress is a new row or an end; a resume or a row computed again is none.

What happens without progress is bounded by the state. Rows to compute again: as long as nobody gives way,
every live session rebuilds at most its committed rows once, so more than all committed rows together means
that sessions take each other's cells in turn. Steps without any row: ``max_idle_steps``. Past either bound
the next rung of an escalation begins, each with the same bound: first nothing is shared and idle prefixes go,
then the oldest session that can run has the pool to itself until it ends, which in an empty pool it can. So
each row of work costs a bounded number of steps, and ``NoProgress`` means that not even one session alone
gets a row: an engine or a caller that breaks its word.
"""

from __future__ import annotations

from enum import IntEnum


class Rung(IntEnum):
    """How far the escalation has gone."""

    NONE, NO_SHARES, ALONE, EXHAUSTED = 0, 1, 2, 3


class Progress:
    """The measure. ``note`` is told of every step and says whether a rung was climbed."""

    def __init__(self, max_idle_steps: int) -> None:
        self.max_idle_steps = max_idle_steps
        self.rung = Rung.NONE
        self.restart()

    def restart(self) -> None:
        """Begin to count anew: there was progress, or somebody outside changed what there is to do."""
        self.rebuilt_rows = self.idle_steps = self.steps = 0

    def release(self) -> None:
        """Back to ordinary scheduling."""
        self.rung = Rung.NONE
        self.restart()

    def note(self, *, progressed: bool, rebuilt: int, owed: int, can_run: bool) -> bool:
        """Count one step: ``rebuilt`` rows were computed again, live sessions have ``owed`` committed rows
        together, ``can_run`` says whether one of them could have run. True if the next rung begins.
        """
        if progressed or not can_run:
            self.restart()
            if progressed and self.rung is Rung.NO_SHARES:
                self.rung = Rung.NONE
            return False
        self.steps += 1
        self.rebuilt_rows += rebuilt
        self.idle_steps = 0 if rebuilt else self.idle_steps + 1
        if self.rebuilt_rows <= owed and self.idle_steps < self.max_idle_steps:
            return False
        self.restart()
        self.rung = Rung(self.rung + 1)
        return True
