"""Memory of all stages together: a session is opened, shared, grown and retired in every stage or in none.

Components are charged by row (attention and window cells) or by sequence (ids, recurrent slots); a session
enters only if every component of every stage has room, so what policies see is the minimum.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from scheduler.cells import CellPool
from scheduler.engine import MemoryOp
from scheduler.limits import PoolLimits, Sharing, StepLimits
from scheduler.prefix import PrefixCache, PrefixEntry, digest_chain
from scheduler.records import SessionView
from scheduler.rooms import Room
from scheduler.telemetry import StepRecord


@dataclass(slots=True)
class Residence:
    """Where one live session is: a sequence id per stage, and the prefix entry that it was shared from."""

    seq_ids: tuple[int, ...]
    entry: PrefixEntry | None
    keep_stops: tuple[int, ...]


class Blocked(NamedTuple):
    """A session whose ``rows`` rows found no cells; ``available`` were left, wherever they lie."""

    request_id: str
    rows: int
    available: int


class Place(NamedTuple):
    """Where a session would begin in one ordered pool: above cell ``floor`` (-1: at the bottom), with the
    idle cells of ``pinned`` no longer free.
    """

    floor: int
    pinned: int


class Memory:
    """Pools of all stages and the resident prefixes. Policies may ask the facts, never for cells or ids.

    ``rows_to_come()`` gives the rows that are kept free for every running session, by request id; those of
    sessions that do not live here are not looked at. Facts hold until the next ``begin_step`` or the next
    change of the memory.
    """

    def __init__(
        self,
        pools: Sequence[PoolLimits],
        steps: StepLimits,
        *,
        model_digest: str = "",
        rows_to_come: Callable[[], Mapping[str, int]] = dict,
    ) -> None:
        self.rows_to_come = rows_to_come
        self.may_share = True  # False while sharing stands in the way of progress
        self.cut_shares = 0  # entries that shared less than is resident, or nothing, for want of room
        self._rooms: tuple[Room, ...] | None = None
        self._hits: dict[int, tuple[PrefixEntry | None, int]] = {}  # by number of submission
        self.pools = tuple(CellPool(limits) for limits in pools)
        kinds = [limits.sharing for limits in pools] if steps.prefix_cache else [Sharing.NONE]
        self.sharing = min(kinds, key=list(Sharing).index)
        self.model_digest = model_digest
        self.max_session_rows = min(limits.max_session_rows for limits in pools)
        self.prefix = PrefixCache(
            sharing=self.sharing, block_tokens=steps.prefix_block_tokens, max_entries=2 * steps.max_num_seqs
        )
        self.residences: dict[str, Residence] = {}

    # -- as the only shard, or one of ``scheduler.shards.ShardedMemory``

    @property
    def shards(self) -> tuple[Memory, ...]:
        """Memories of which each has pools of its own: this one alone."""
        return (self,)

    def home(self, request_id: str) -> Memory:
        """The shard in which a session lives: this one."""
        return self

    def allow_sharing(self, allowed: bool) -> None:
        """Whether whoever enters may share, and prefixes are kept."""
        self.may_share = allowed

    # -- facts for policies

    @property
    def shares(self) -> bool:
        """Whether there is anything to share."""
        return bool(self.prefix.entries) and self.may_share

    def available_rows(self) -> int:
        """Rows that can still be written, evictable prefix entries counted once as available."""
        return min(
            pool.num_available() + self._evictable(stage).bit_count() for stage, pool in enumerate(self.pools)
        )

    def available_cells(self) -> tuple[int, ...]:
        """Cells that are available, by stage."""
        return tuple(pool.num_available() for pool in self.pools)

    def bytes_of(self, cells: Sequence[int]) -> int:
        """What so many cells of each stage come to, as far as their size is known."""
        return sum(count * pool.limits.cell_bytes for count, pool in zip(cells, self.pools, strict=True))

    def total_rows(self) -> int:
        """Rows of an empty pool, of the smallest stage."""
        return min(pool.limits.num_cells for pool in self.pools)

    def available_sequences(self, keep: PrefixEntry | None = None) -> int:
        """Sessions that can still be opened without evicting ``keep``. An evicted entry gives its id back at
        once, except in ordered pools, where it retires with its cells.
        """
        idle = sum(entry.users == 0 and entry is not keep for entry in self.prefix.entries.values())
        return min(len(pool.free_ids) + (0 if pool.ordered else idle) for pool in self.pools)

    def sequences_for(self, view: SessionView) -> int:
        """Ids that the session takes from the available ones if it entered now: its own, and that of an idle
        entry which it would share, and which could have been evicted for its id.
        """
        entry, _ = self._hit(view)
        return 1 if entry is None or entry.users or self.pools[0].ordered else 2

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

    def begin_step(self) -> None:
        """Ask all facts anew: sessions have gone on, and what policies keep free may have changed."""
        self._rooms = None
        self._hits.clear()

    def rooms(self) -> tuple[Room, ...]:
        """Room in every stage, evictable cells taken for free; none where cells have no order."""
        if self._rooms is None:
            self._rooms = self._rooms_for(self.rows_to_come())
        return self._rooms

    def _rooms_for(self, demands: Mapping[str, int]) -> tuple[Room, ...]:
        rooms = []
        for stage, pool in enumerate(self.pools if self.pools[0].ordered else ()):
            floors = []
            for name, rows in demands.items():
                if name not in self.residences:
                    continue
                cells = pool.owners[self.residences[name].seq_ids[stage]].cells
                floors.append((cells[-1] if cells else -1, rows))
            floors.sort(reverse=True)
            rooms.append(Room(pool.available | self._evictable(stage), floors))
        return tuple(rooms)

    def has_room(self, demands: Mapping[str, int]) -> bool:
        """Whether residents can write ``demands[request id]`` more rows each, all together."""
        return all(room.is_enough() for room in self._rooms_for(demands))

    def places(self, view: SessionView) -> tuple[Place, ...]:
        """Where the session would begin in every stage if it entered now; empty where cells have no order."""
        entry, count = self._hit(view)
        return self._places(entry, count) if self.pools[0].ordered else ()

    def _places(self, entry: PrefixEntry | None, count: int) -> tuple[Place, ...]:
        if entry is None:
            return (Place(-1, 0),) * len(self.pools)
        places = []
        for stage, pool in enumerate(self.pools):
            owner = pool.owners[entry.seq_ids[stage]]
            pinned = 0 if entry.users else self._evictable(stage) & owner.mask
            places.append(Place(owner.cells[count - 1], pinned))
        return tuple(places)

    def _hit(self, view: SessionView) -> tuple[PrefixEntry | None, int]:
        """What a session would share if it entered now: the longest resident prefix after which there is room
        for its rows and for those of all who run, less of it, or nothing.

        Where it cannot enter in any way, the longest one: what it will share when there is room.
        """
        if not self.prefix.entries or not self.may_share:
            return None, 0
        hit = self._hits.get(view.index)
        if hit is None:
            hit = self._hits[view.index] = self._find_hit(view)
        return hit

    def _find_hit(self, view: SessionView) -> tuple[PrefixEntry | None, int]:
        chain, rows = self._chain(view), view.request.num_rows
        longest = self.prefix.lookup(chain)
        entry, count = longest
        while entry is not None:
            fits = self._fitting_tokens(entry, count, rows)
            if fits:
                return entry, fits
            shorter = self.sharing is Sharing.WHOLE_STATE
            entry, count = self.prefix.lookup(chain[:count]) if shorter else (None, 0)
        return (None, 0) if self._fits_unshared(rows) else longest

    def _fits_unshared(self, rows: int) -> bool:
        if self.pools[0].ordered:
            return all(room.total_demand() + rows <= room.cells.bit_count() for room in self.rooms())
        return self.available_rows() >= rows

    def _fitting_tokens(self, entry: PrefixEntry, count: int, rows: int) -> int:
        """The most tokens of an entry, at most ``count``, that a session of ``rows`` rows may share so that
        it has room together with all who run; 0 if none.
        """
        if not self.pools[0].ordered:
            rows_left = min(
                pool.room_after(entry.seq_ids[stage], count, self._evictable(stage, keep=entry))
                for stage, pool in enumerate(self.pools)
            )
            has_id = self.available_sequences(keep=entry) > 0
            return count if rows_left >= rows - count and has_id else 0
        rooms = self.rooms()
        while count:
            lower = count
            for room, place, pool, seq_id in zip(
                rooms, self._places(entry, count), self.pools, entry.seq_ids, strict=True
            ):
                short = room.shortage(floor=place.floor, rows=rows - count, pinned=place.pinned)
                if short is None:
                    continue
                if short > place.floor or self.sharing is Sharing.WHOLE_STATE:
                    return 0  # others lack what would be pinned, or a state cannot be cut
                if short == place.floor:  # one less helps only if it makes a cell reachable
                    below = room.cells & ~place.pinned & ((1 << place.floor) - 1)
                    short = below.bit_length() - 1
                lower = min(lower, bisect_left(pool.owners[seq_id].cells, short))
            if lower == count:
                return count
            count = lower
        return 0

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

    def has_evictable(self) -> bool:
        """Whether eviction would free a cell."""
        return any(self._evictable(stage) for stage in range(len(self.pools)))

    # -- sessions

    def open(self, view: SessionView, count: int) -> bool:
        """Give a session a sequence in every stage that shares ``count`` resident tokens; False when they are
        resident no more, or a stage has no free id left.
        """
        self.begin_step()
        entry = None
        self.cut_shares += self.shares and count < self.prefix.lookup(self._chain(view))[1]
        if count:
            # The entry that admission counted: the longest one, of which a part may be shared.
            chain, is_cut = self._chain(view), self.sharing is Sharing.POSITIONAL
            entry, found = self.prefix.lookup(chain if is_cut else chain[: count + 1])
            if entry is None or found < count:
                return False
            entry.users += 1  # pinned first: eviction below must not take it
            self.prefix.entries.move_to_end(entry.digests[-1])
        while self._free_ids() == 0:
            if self.available_sequences() == 0 or not self.evict_one():
                if entry is not None:
                    entry.users -= 1
                return False
        if entry is None:
            seq_ids = tuple(pool.open() for pool in self.pools)
        else:
            seq_ids = tuple(
                pool.share(source, count) for pool, source in zip(self.pools, entry.seq_ids, strict=True)
            )
        chain = self._chain(view) if self.sharing is not Sharing.NONE else ()
        self.residences[view.request_id] = Residence(seq_ids, entry, self.prefix.keep_stops(chain))
        self.prefix.note_prompt(chain if self.sharing is Sharing.WHOLE_STATE else ())
        return True

    def retire(self, request_id: str) -> None:
        """Let go of a session's cells in every stage."""
        self.begin_step()
        residence = self.residences.pop(request_id)
        if residence.entry is not None:
            residence.entry.users -= 1
        for pool, seq_id in zip(self.pools, residence.seq_ids, strict=True):
            pool.retire(seq_id)

    def shorten(self, view: SessionView, *, available: int) -> int:
        """Let go of a session's last rows, as few as leave it room above the rest for what it may still
        write, at most ``available`` rows more than now; returns how many stay.

        0 means that nothing was done: whole states cannot be cut, a cut needs an id, and rows that others
        hold too are not freed by one.
        """
        self.begin_step()
        residence = self.residences[view.request_id]
        placed = list(zip(self.pools, residence.seq_ids, strict=True))
        if any(pool.limits.recurrent or not pool.ordered or not pool.free_ids for pool in self.pools):
            return 0
        wanted, count = min(view.future_rows, available), view.computed
        for pool, seq_id in placed:
            taken = pool.num_available() - available  # by sessions that come first in this step
            kept = pool.rows_to_keep(seq_id, wanted + max(taken, 0))
            count = min(count, kept)
        if count < 1 or count >= view.computed:
            return 0
        if any(pool.shared_rows(seq_id) > count for pool, seq_id in placed):
            return 0
        residence.seq_ids = tuple(pool.share(seq_id, count) for pool, seq_id in placed)
        for pool, seq_id in placed:
            pool.retire(seq_id)
        return count

    # -- prefixes

    def keep_prefix(self, view: SessionView) -> None:
        """After a completed step: make the session's prefix shareable if it is worth an entry."""
        count, residence = view.computed, self.residences[view.request_id]
        if count not in residence.keep_stops or not self.may_share:
            return
        self.begin_step()
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

    def evict_for(self, blocked: Blocked) -> bool:
        """Evict an idle prefix entry that frees a cell: the least recently used of those that free one for
        the blocked session, else of all; False if there is none.
        """
        useful: PrefixEntry | None = None
        masks = [self._evictable(stage) for stage in range(len(self.pools))]
        for entry in self.prefix.entries.values() if any(masks) else ():
            if entry.users:
                continue
            freed = [
                pool.owners[seq_id].mask & mask
                for pool, seq_id, mask in zip(self.pools, entry.seq_ids, masks, strict=True)
            ]
            if any(cells >> (floor + 1) for cells, floor in zip(freed, self._floors(blocked), strict=True)):
                useful = entry
                break
            if useful is None and any(freed):
                useful = entry
        if useful is not None:
            self.evict(useful)
        return useful is not None

    def _floors(self, blocked: Blocked) -> list[int]:
        """The last cell of a session in every stage, -1 where cells have no order or it has none."""
        floors = []
        for pool, seq_id in zip(self.pools, self.residences[blocked.request_id].seq_ids, strict=True):
            cells = pool.owners[seq_id].cells
            floors.append(cells[-1] if cells and pool.ordered else -1)
        return floors

    def evict(self, entry: PrefixEntry) -> None:
        self.begin_step()
        self.prefix.remove(entry)
        for pool, seq_id in zip(self.pools, entry.seq_ids, strict=True):
            pool.retire(seq_id)

    # -- rows

    def place(self, chunks: Sequence[tuple[str, int, int]]) -> Blocked | None:
        """Reserve cells for (request id, first row, rows) in every stage: None, or
        who finds none and nothing stays.
        """
        self.begin_step()
        for stage, pool in enumerate(self.pools):
            blocked = pool.place(
                [(self.residences[name].seq_ids[stage], first, rows) for name, first, rows in chunks]
            )
            if blocked is not None:
                available = pool.num_available()
                self.undo()
                name, _, rows = next(
                    chunk for chunk in chunks if self.residences[chunk[0]].seq_ids[stage] == blocked
                )
                return Blocked(name, rows, available)
        return None

    def undo(self) -> None:
        """Take back what was placed since the last calls were taken."""
        self.begin_step()
        for pool in self.pools:
            pool.undo()

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
