"""Memory of all stages together: a session is opened, shared, grown and retired in every stage or in none.

Admission needs room in every component of every stage; the minimum over stages is what policies see.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from scheduler.cells import make_pool
from scheduler.engine import Call, MemoryOp
from scheduler.limits import Layout, PoolLimits, Sharing, StepLimits
from scheduler.prefix import PrefixCache, PrefixEntry, digest_chain
from scheduler.records import SessionView


@dataclass(slots=True)
class Residence:
    """Where one live session is: a sequence id per stage, and the prefix entry that it was shared from."""

    seq_ids: tuple[int, ...]
    chain: tuple[bytes, ...]
    entry: PrefixEntry | None = None
    state_stops: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class MemoryCounts:
    """Cells and ids at one moment, of the tightest stage for what is available and of the first stage for the rest."""

    cells_used: int
    cells_available: int
    cells_shared: int
    ids_retired: int
    sequences_used: int
    prefix_entries: int


class Memory:
    """Implements ``MemoryFacts`` over the pools of all stages, and keeps the resident prefixes."""

    def __init__(self, pools: Sequence[PoolLimits], steps: StepLimits, *, model_digest: str = "") -> None:
        self.pools = tuple(make_pool(limits) for limits in pools)
        self.sharing = _common_sharing(pools) if steps.prefix_cache else Sharing.NONE
        self.model_digest = model_digest
        self.max_session_rows = min(limits.max_session_rows for limits in pools)
        self.prefix = PrefixCache(sharing=self.sharing, block_tokens=steps.prefix_block_tokens,
                                  max_entries=steps.prefix_entry_limit)
        self.residences: dict[str, Residence] = {}
        self._chains: dict[str, tuple[bytes, ...]] = {}

    # -- facts for policies ------------------------------------------------------------------------------------------

    def available_rows(self) -> int:
        return min(pool.num_available() + self._evictable(stage).bit_count() for stage, pool in enumerate(self.pools))

    def available_sequences(self) -> int:
        idle = sum(entry.users == 0 for entry in self.prefix.entries.values())
        return min(len(pool.free_ids) for pool in self.pools) + idle

    def pools_have(self, rows: int) -> bool:
        """Whether every stage has that many available cells, wherever they are."""
        return all(pool.num_available() >= rows for pool in self.pools)

    def cached_tokens(self, view: SessionView) -> int:
        return 0 if self.sharing is Sharing.NONE else self.prefix.lookup(self._chain(view))[1]

    def pinned_rows(self, view: SessionView) -> int:
        if self.sharing is Sharing.NONE:
            return 0
        entry, _ = self.prefix.lookup(self._chain(view))
        if entry is None or entry.users or self.pools[0].limits.layout is Layout.STREAMS:
            return 0
        return max((self._evictable(stage) & pool.owners[entry.seq_ids[stage]].mask).bit_count()
                   for stage, pool in enumerate(self.pools))

    def chunk_stop(self, view: SessionView, *, start: int, stop: int) -> int:
        if self.sharing is not Sharing.WHOLE_STATE or start >= view.num_prompt_tokens:
            return stop
        residence = self.residences.get(view.request_id)
        stops = residence.state_stops if residence else self._state_stops(view)
        return next((s for s in stops if start < s < stop), stop)

    def _evictable(self, stage: int) -> int:
        """Cells of one stage that only idle prefix entries own."""
        if not self.prefix.entries:
            return 0
        owners = self.pools[stage].owners
        idle = busy = 0
        idle_ids: dict[int, None] = {}
        for entry in self.prefix.entries.values():
            if entry.users == 0:
                idle_ids[entry.seq_ids[stage]] = None
        for seq_id, owner in owners.items():
            if seq_id in idle_ids:
                idle |= owner.mask
            else:
                busy |= owner.mask
        return idle & ~busy

    def _chain(self, view: SessionView) -> tuple[bytes, ...]:
        chain = self._chains.get(view.request_id)
        if chain is None:
            chain = self._chains[view.request_id] = digest_chain(self.model_digest, view.request.prompt)
        return chain

    def _state_stops(self, view: SessionView) -> tuple[int, ...]:
        return self.prefix.state_stops(self._chain(view))

    # -- sessions ----------------------------------------------------------------------------------------------------

    def open(self, view: SessionView) -> int:
        """Give a session a sequence in every stage, sharing the longest resident prefix; returns the shared tokens.

        Raises IndexError when a stage has no free id left.
        """
        chain = () if self.sharing is Sharing.NONE else self._chain(view)
        entry, count = self.prefix.lookup(chain) if chain else (None, 0)
        if entry is not None:
            entry.users += 1  # pinned first: eviction below must not take it
            self.prefix.touch(entry)
        while min(len(pool.free_ids) for pool in self.pools) == 0 and self.evict_one():
            pass
        if min(len(pool.free_ids) for pool in self.pools) == 0:
            if entry is not None:
                entry.users -= 1
            raise IndexError(f"no sequence id left for {view.request_id}")
        if entry is None:
            seq_ids = tuple(pool.open() for pool in self.pools)
        else:
            seq_ids = tuple(pool.share(source, count) for pool, source in zip(self.pools, entry.seq_ids, strict=True))
        stops = self._state_stops(view) if self.sharing is Sharing.WHOLE_STATE else ()
        self.residences[view.request_id] = Residence(seq_ids, chain, entry, stops)
        return count

    def retire(self, request_id: str) -> None:
        """Let go of a session's cells in every stage."""
        residence = self.residences.pop(request_id)
        if residence.entry is not None:
            residence.entry.users -= 1
        for pool, seq_id in zip(self.pools, residence.seq_ids, strict=True):
            pool.retire(seq_id)

    def forget(self, request_id: str) -> None:
        """Drop what is remembered of a session that has ended."""
        self._chains.pop(request_id, None)

    def keep_prefix(self, view: SessionView) -> bool:
        """After a completed step: keep the session's prefix if it is worth an entry; returns whether one was made."""
        count = view.computed
        if self.sharing is Sharing.NONE or count > view.num_prompt_tokens:
            return False
        residence = self.residences[view.request_id]
        if self.sharing is Sharing.POSITIONAL:
            wanted = count == view.num_prompt_tokens >= self.prefix.block_tokens
        else:
            wanted = count in residence.state_stops
        digests = residence.chain[:count]
        if not wanted or self.prefix.holds(digests) or not self._make_room_for_entry(count):
            return False
        seq_ids = tuple(pool.share(seq_id, count)
                        for pool, seq_id in zip(self.pools, residence.seq_ids, strict=True))
        self.prefix.insert(digests, seq_ids)
        return True

    def _make_room_for_entry(self, count: int) -> bool:
        """Entries stay within their number and half the pool, and never take the last free id of a session."""
        half = min(pool.limits.num_cells for pool in self.pools) // 2
        resident = sum(entry.count for entry in self.prefix.entries.values())
        while (len(self.prefix.entries) >= self.prefix.max_entries or resident + count > half
               or min(len(pool.free_ids) for pool in self.pools) < 2):
            oldest = self.prefix.oldest_idle()
            if oldest is None or count > half:
                return False
            resident -= oldest.count
            self.evict(oldest)
        return True

    def evict_one(self) -> bool:
        """Evict the least recently used idle prefix entry; False if there is none."""
        entry = self.prefix.oldest_idle()
        if entry is None:
            return False
        self.evict(entry)
        return True

    def evict(self, entry: PrefixEntry) -> None:
        self.prefix.remove(entry)
        for pool, seq_id in zip(self.pools, entry.seq_ids, strict=True):
            pool.retire(seq_id)

    # -- rows --------------------------------------------------------------------------------------------------------

    def allocate(self, chunks: Sequence[tuple[str, int]]) -> int | None:
        """Reserve cells for (request id, rows) in every stage; None if all fit, else the index of the first that does not.

        On failure nothing stays reserved.
        """
        for index, (request_id, count) in enumerate(chunks):
            seq_ids = self.residences[request_id].seq_ids
            for pool, seq_id in zip(self.pools, seq_ids, strict=True):
                if not pool.allocate(seq_id, count):
                    self.undo()
                    return index
        return None

    def undo(self) -> None:
        for pool in self.pools:
            pool.undo()

    def commit(self, chunks: Sequence[tuple[str, int, int]]) -> tuple[tuple[Call, ...], ...]:
        """Allocate (request id, first row, rows), which must fit, in call order; returns every stage's calls."""
        stages = []
        for stage, pool in enumerate(self.pools):
            groups = pool.call_groups([(self.residences[r].seq_ids[stage], first, n) for r, first, n in chunks])
            for group in groups:
                for seq_id, _, count in group:
                    if not pool.allocate(seq_id, count):
                        raise AssertionError(f"stage {stage}: cells that fitted in plan order do not in call order")
            stages.append(pool.commit(groups))
        return tuple(stages)

    def take_pending(self) -> tuple[tuple[MemoryOp, ...], ...]:
        """Operations that no call has carried yet, per stage."""
        return tuple(pool.take_pending() for pool in self.pools)

    def reset(self) -> None:
        """Forget everything: legal when no session is live."""
        if self.residences:
            raise AssertionError(f"memory reset with live sessions {list(self.residences)}")
        while self.prefix.entries:
            self.evict(next(iter(self.prefix.entries.values())))
        for pool in self.pools:
            pool.clear()

    def check_conservation(self) -> None:
        """Raises AssertionError when a cell or an id is lost, doubled or owned by nobody that is known."""
        known = [r.seq_ids for r in self.residences.values()] + [e.seq_ids for e in self.prefix.entries.values()]
        for stage, pool in enumerate(self.pools):
            pool.check_conservation()
            if sorted(seq_ids[stage] for seq_ids in known) != sorted(pool.owners):
                raise AssertionError(f"stage {stage}: live sequences {sorted(pool.owners)} but known {known}")
        users = sum(entry.users for entry in self.prefix.entries.values())
        if users != sum(r.entry is not None for r in self.residences.values()):
            raise AssertionError("prefix entries and their users disagree")

    def counts(self) -> MemoryCounts:
        pool = self.pools[0]
        total = sum(len(owner.cells) for owner in pool.owners.values())
        return MemoryCounts(pool.num_used(), min(p.num_available() for p in self.pools), total - pool.num_used(),
                            len(pool.retired_left), len(pool.owners), len(self.prefix.entries))


def _common_sharing(pools: Sequence[PoolLimits]) -> Sharing:
    """A hit is the minimum over all components and stages."""
    kinds = [limits.sharing for limits in pools]
    if Sharing.NONE in kinds:
        return Sharing.NONE
    return Sharing.WHOLE_STATE if Sharing.WHOLE_STATE in kinds else Sharing.POSITIONAL
