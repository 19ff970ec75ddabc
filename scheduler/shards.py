"""Memory in shards: several pools of all stages side by side, each with cells, ids and prefixes of its own.

A row's attention walks the cells of its own pool, so a session in one of four pools pays for a quarter of
them. A session lives in one shard; it enters where it finds the longest prefix, then where the fewest live
(``scheduler.policy.plan``), and when it is resumed it may enter another one, by recompute.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain

from scheduler.cells import CellPool
from scheduler.engine import MemoryOp
from scheduler.limits import PoolLimits, StepLimits
from scheduler.memory import Blocked, Memory, Residence
from scheduler.records import SessionView
from scheduler.telemetry import StepRecord


class ShardedMemory:
    """``scheduler.memory.Memory`` of every shard, as one. ``pools`` of ``limits`` are those of one shard's
    stages; the pools of all shards are listed shard by shard.
    """

    def __init__(
        self,
        limits: Sequence[PoolLimits],
        steps: StepLimits,
        *,
        num_shards: int,
        model_digest: str = "",
        rows_to_come: Callable[[], Mapping[str, int]] = dict,
    ) -> None:
        self.shards = tuple(
            Memory(limits, steps, model_digest=model_digest, rows_to_come=rows_to_come)
            for _ in range(num_shards)
        )
        self.pools: tuple[CellPool, ...] = tuple(chain.from_iterable(shard.pools for shard in self.shards))
        self.max_session_rows = self.shards[0].max_session_rows

    def home(self, request_id: str) -> Memory:
        """The shard in which a session lives. Raises KeyError when it lives in none."""
        for shard in self.shards:
            if request_id in shard.residences:
                return shard
        raise KeyError(request_id)

    @property
    def residences(self) -> dict[str, Residence]:
        """Of all shards."""
        return dict(chain.from_iterable(shard.residences.items() for shard in self.shards))

    # -- facts for policies

    def available_rows(self) -> int:
        """Rows that can still be written, in all shards together."""
        return sum(shard.available_rows() for shard in self.shards)

    def total_rows(self) -> int:
        """Rows of empty pools, in all shards together."""
        return sum(shard.total_rows() for shard in self.shards)

    def cached_tokens(self, view: SessionView) -> int:
        """The most tokens that the session would share in any shard if it entered now."""
        return max(shard.cached_tokens(view) for shard in self.shards)

    @property
    def cut_shares(self) -> int:
        """Entries that shared less than was resident, for want of room."""
        return sum(shard.cut_shares for shard in self.shards)

    # -- what the loop does with all shards

    def allow_sharing(self, allowed: bool) -> None:
        for shard in self.shards:
            shard.allow_sharing(allowed)

    def begin_step(self) -> None:
        for shard in self.shards:
            shard.begin_step()

    def retire(self, request_id: str) -> None:
        """Let go of a session's cells in its shard."""
        self.home(request_id).retire(request_id)

    def evict_one(self) -> bool:
        """Evict an idle prefix entry of the first shard that has one; False if none has."""
        return any(shard.evict_one() for shard in self.shards)

    def place(self, chunks: Sequence[tuple[str, int, int]]) -> Blocked | None:
        """Reserve cells for (request id, first row, rows) in every stage of the session's shard: None, or
        who finds none and nothing stays.
        """
        for shard in self.shards:
            blocked = shard.place([chunk for chunk in chunks if chunk[0] in shard.residences])
            if blocked is not None:
                self.undo()
                return blocked
        return None

    def undo(self) -> None:
        """Take back what was placed since the last calls were taken."""
        for shard in self.shards:
            shard.undo()

    def take_pending(self) -> tuple[tuple[MemoryOp, ...], ...]:
        """Operations that no call has carried yet, per pool."""
        return tuple(chain.from_iterable(shard.take_pending() for shard in self.shards))

    def reset(self) -> None:
        """Forget everything; legal when no session is resident."""
        for shard in self.shards:
            shard.reset()

    def counts(self, record: StepRecord | None = None) -> StepRecord:
        """Cells and ids of all shards, in a record."""
        record = StepRecord() if record is None else record
        each = [shard.counts() for shard in self.shards]
        for name in ("cells_used", "cells_retired", "cells_available", "cells_shared", "ids_retired"):
            setattr(record, name, sum(getattr(one, name) for one in each))
        record.slots_used = sum(one.slots_used for one in each)
        return record
