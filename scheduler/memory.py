"""Memory of all stages together: a session is opened, shared, grown and retired in every stage or in none.

Components are charged by row (attention and window cells) or by sequence (ids, recurrent slots); a session
enters only if every component of every stage has room, so what policies see is the minimum.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from scheduler.cells import CellPool
from scheduler.engine import MemoryOp
from scheduler.limits import PoolLimits, Sharing, StepLimits
from scheduler.prefix import PrefixCache, PrefixEntry, digest_chain
from scheduler.records import SessionView
from scheduler.telemetry import StepRecord


@dataclass(slots=True)
class Residence:
    """Where one live session is: a sequence id per stage, and the prefix entry that it was shared from."""

    seq_ids: tuple[int, ...]
    entry: PrefixEntry | None
    keep_stops: tuple[int, ...]


class Memory:
    """Pools of all stages and the resident prefixes. Policies may ask the facts, never for cells or ids."""

    def __init__(self, pools: Sequence[PoolLimits], steps: StepLimits, *, model_digest: str = "") -> None:
        self.pools = tuple(CellPool(limits) for limits in pools)
        kinds = [limits.sharing for limits in pools] if steps.prefix_cache else [Sharing.NONE]
        self.sharing = min(kinds, key=list(Sharing).index)
        self.model_digest = model_digest
        self.max_session_rows = min(limits.max_session_rows for limits in pools)
        self.prefix = PrefixCache(
            sharing=self.sharing, block_tokens=steps.prefix_block_tokens, max_entries=2 * steps.max_num_seqs
        )
        self.residences: dict[str, Residence] = {}

    # -- facts for policies

    def available_rows(self) -> int:
        """Rows that can still be written, evictable prefix entries counted once as available."""
        return min(
            pool.num_available() + self._evictable(stage).bit_count() for stage, pool in enumerate(self.pools)
        )

    def total_rows(self) -> int:
        """Rows of an empty pool, of the smallest stage."""
        return min(pool.limits.num_cells for pool in self.pools)

    def available_sequences(self) -> int:
        """Sessions that can still be opened. An evicted entry gives its id back at once, except in ordered
        pools, where it retires with its cells.
        """
        idle = sum(entry.users == 0 for entry in self.prefix.entries.values())
        return min(len(pool.free_ids) + (0 if pool.ordered else idle) for pool in self.pools)

    def _free_ids(self) -> int:
        return min(len(pool.free_ids) for pool in self.pools)

    def cached_tokens(self, view: SessionView) -> int:
        """Tokens of the session that it would share if it entered now, at most all but one."""
        return self._hit(view)[1]

    def pinned_rows(self, view: SessionView) -> int:
        """Evictable rows that sharing for this session would pin, so that they stop being available."""
        entry, _ = self._hit(view)
        if entry is None or entry.users:
            return 0
        return max(
            (self._evictable(stage) & pool.owners[entry.seq_ids[stage]].mask).bit_count()
            for stage, pool in enumerate(self.pools)
        )

    def chunk_stop(self, view: SessionView, *, start: int, stop: int) -> int:
        """``stop``, or an earlier position at which a recurrent state must be kept."""
        if self.sharing is not Sharing.WHOLE_STATE or start >= view.num_prompt_tokens:
            return stop
        residence = self.residences.get(view.request_id)
        stops = residence.keep_stops if residence else self.prefix.keep_stops(self._chain(view))
        return next((at for at in stops if start < at < stop), stop)

    def _chain(self, view: SessionView) -> tuple[bytes, ...]:
        return digest_chain(self.model_digest, view.request.prompt)

    def _hit(self, view: SessionView) -> tuple[PrefixEntry | None, int]:
        """What a session would share if it entered now. A hit after which its rows would not fit is none: in
        ordered pools they must lie above the shared ones, and the whole entry stops being evictable.
        """
        if not self.prefix.entries:
            return None, 0
        entry, count = self.prefix.lookup(self._chain(view))
        if entry is not None:
            rows = view.request.num_rows - count
            for stage, pool in enumerate(self.pools):
                if pool.room_after(entry.seq_ids[stage], count, self._evictable(stage, keep=entry)) < rows:
                    return None, 0
        return entry, count

    def _evictable(self, stage: int, keep: PrefixEntry | None = None) -> int:
        """Cells of one stage that only idle prefix entries, other than ``keep``, own."""
        if not self.prefix.entries:
            return 0
        idle_ids = {
            entry.seq_ids[stage]
            for entry in self.prefix.entries.values()
            if entry.users == 0 and entry is not keep
        }
        idle = busy = 0
        for seq_id, owner in self.pools[stage].owners.items():
            if seq_id in idle_ids:
                idle |= owner.mask
            else:
                busy |= owner.mask
        return idle & ~busy

    # -- sessions

    def open(self, view: SessionView) -> int | None:
        """Give a session a sequence in every stage, sharing the longest resident prefix; returns the shared
        tokens, or None when a stage has no free id left.
        """
        entry, count = self._hit(view)
        if entry is not None:
            entry.users += 1  # pinned first: eviction below must not take it
            self.prefix.entries.move_to_end(entry.digests[-1])
        while self._free_ids() == 0:
            if self.available_sequences() == 0 or not self.evict_one():
                if entry is not None:
                    entry.users -= 1
                return None
        if entry is None:
            seq_ids = tuple(pool.open() for pool in self.pools)
        else:
            seq_ids = tuple(
                pool.share(source, count) for pool, source in zip(self.pools, entry.seq_ids, strict=True)
            )
        chain = self._chain(view) if self.sharing is not Sharing.NONE else ()
        self.residences[view.request_id] = Residence(seq_ids, entry, self.prefix.keep_stops(chain))
        self.prefix.note_prompt(chain if self.sharing is Sharing.WHOLE_STATE else ())
        return count

    def retire(self, request_id: str) -> None:
        """Let go of a session's cells in every stage."""
        residence = self.residences.pop(request_id)
        if residence.entry is not None:
            residence.entry.users -= 1
        for pool, seq_id in zip(self.pools, residence.seq_ids, strict=True):
            pool.retire(seq_id)

    def shorten(self, view: SessionView) -> int:
        """Let go of a session's last rows, as few as leave it room above the rest for all that it
        may still write; returns how many stay. 0 means that nothing was done: whole states cannot
        be cut, and a cut needs an id.
        """
        residence = self.residences[view.request_id]
        placed = list(zip(self.pools, residence.seq_ids, strict=True))
        if any(pool.limits.recurrent or not pool.ordered or not pool.free_ids for pool in self.pools):
            return 0
        count = min(
            pool.rows_to_keep(seq_id, min(view.future_rows, pool.num_available())) for pool, seq_id in placed
        )
        if count:
            residence.seq_ids = tuple(pool.share(seq_id, count) for pool, seq_id in placed)
            for pool, seq_id in placed:
                pool.retire(seq_id)
        return count

    # -- prefixes

    def keep_prefix(self, view: SessionView) -> None:
        """After a completed step: make the session's prefix shareable if it is worth an entry."""
        count, residence = view.computed, self.residences[view.request_id]
        if count not in residence.keep_stops:
            return
        digests = self._chain(view)[:count]
        if not self.prefix.holds(digests) and self._make_room_for_entry(count):
            self.prefix.insert(
                digests,
                tuple(
                    pool.share(seq_id, count)
                    for pool, seq_id in zip(self.pools, residence.seq_ids, strict=True)
                ),
            )

    def _make_room_for_entry(self, count: int) -> bool:
        """Entries stay within their number and half the pool, and never take
        the last free id of a session.
        """
        half = min(pool.limits.num_cells for pool in self.pools) // 2
        resident = sum(entry.count for entry in self.prefix.entries.values())
        while (
            len(self.prefix.entries) >= self.prefix.max_entries
            or resident + count > half
            or self._free_ids() < 2
        ):
            oldest = self.prefix.oldest_idle()
            if oldest is None or count > half:
                return False
            resident -= oldest.count
            self.evict(oldest)
        return True

    def evict_one(self) -> bool:
        """Evict the least recently used idle prefix entry; False if there is none."""
        entry = self.prefix.oldest_idle()
        if entry is not None:
            self.evict(entry)
        return entry is not None

    def evict(self, entry: PrefixEntry) -> None:
        self.prefix.remove(entry)
        for pool, seq_id in zip(self.pools, entry.seq_ids, strict=True):
            pool.retire(seq_id)

    # -- rows

    def place(self, chunks: Sequence[tuple[str, int, int]]) -> str | None:
        """Reserve cells for (request id, first row, rows) in every stage: None, or
        who finds none and nothing stays.
        """
        for stage, pool in enumerate(self.pools):
            blocked = pool.place(
                [(self.residences[name].seq_ids[stage], first, rows) for name, first, rows in chunks]
            )
            if blocked is not None:
                for other in self.pools:
                    other.undo()
                return next(name for name, _, _ in chunks if self.residences[name].seq_ids[stage] == blocked)
        return None

    def take_pending(self) -> tuple[tuple[MemoryOp, ...], ...]:
        """Operations that no call has carried yet, per stage."""
        return tuple(pool.take_pending() for pool in self.pools)

    def reset(self) -> None:
        """Forget everything; legal when no session is resident."""
        while self.prefix.entries:
            self.evict(next(iter(self.prefix.entries.values())))
        for pool in self.pools:
            pool.clear()

    def counts(self, record: StepRecord | None = None) -> StepRecord:
        """Cells and ids now, in a record: what is available in the tightest stage, the rest of the first."""
        record, pool = StepRecord() if record is None else record, self.pools[0]
        record.cells_used, record.cells_retired = pool.num_used(), len(pool.retired)
        record.cells_available = min(pool.num_available() for pool in self.pools)
        record.cells_shared = sum(len(owner.cells) for owner in pool.owners.values()) - record.cells_used
        record.ids_retired, record.slots_used = len(pool.retired_left), len(pool.owners)
        return record
