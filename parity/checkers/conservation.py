"""Conservation: after every operation each cell and each id of every stage is live or available, once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from parity.history import session_index
from parity.records import Finding
from scheduler.cells import CellPool
from scheduler.memory import Memory
from scheduler.shards import ShardedMemory

CONSERVATION = "conservation"
KEPT = "a kept prefix"
MOST_CELLS = 64  # that a finding lists one by one


@dataclass(frozen=True, slots=True)
class Breach:
    """One law broken in one stage: which cells, and which sequence ids have to do with it."""

    stage: int
    text: str
    cells: tuple[int, ...] = ()
    seq_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Owners:
    """Who held what at one moment: per stage each sequence's cells as a mask, and sessions' sequences."""

    masks: tuple[Mapping[int, int], ...]
    sessions: Mapping[str, tuple[int, ...]]

    def holders(self, breach: Breach) -> Iterator[str]:
        """Request ids, or ``a kept prefix``, of the sequences that have to do with a breach."""
        wanted = sum(1 << cell for cell in breach.cells)
        names = {seq_ids[breach.stage]: name for name, seq_ids in self.sessions.items()}
        for seq_id, mask in sorted(self.masks[breach.stage].items()):
            if mask & wanted or seq_id in breach.seq_ids:
                yield names.get(seq_id, KEPT)


def owners_of(memory: Memory) -> Owners:
    """Who holds what now."""
    masks = tuple({seq_id: owner.mask for seq_id, owner in pool.owners.items()} for pool in memory.pools)
    return Owners(masks, {name: held.seq_ids for name, held in memory.residences.items()})


def find_losses(
    memory: Memory, before: Owners | None, *, operation: str, step: int, shard: int | None = None
) -> list[Finding]:
    """What ``operation`` of ``step`` lost or doubled in a memory, or in one shard of it; ``before`` says who
    held what until then.
    """
    findings = []
    for breach in breaches_of(memory):
        moments = [owners_of(memory), *([] if before is None else [before])]
        holders = dict.fromkeys(name for moment in moments for name in moment.holders(breach))
        sessions = [name for name in holders if name != KEPT]
        data = {"step": step, "operation": operation, "stage": breach.stage}
        data |= {} if shard is None else {"shard": shard}
        data |= {"cells": list(breach.cells[:MOST_CELLS])} if breach.cells else {}
        data |= {"session": session_index(sessions[0])} if sessions else {}
        where = f"stage {breach.stage}" if shard is None else f"shard {shard}, stage {breach.stage}"
        said = f"after {operation} of step {step}, {where}: {breach.text}"
        if holders:
            said += f"; held by {', '.join(map(_readable, holders))}"
        findings.append(Finding(CONSERVATION, said, data))
    return findings


def _readable(holder: str) -> str:
    return holder if holder == KEPT else f"session {session_index(holder)}"


def check_conservation(memory: Memory | ShardedMemory) -> None:
    """Raises AssertionError when a cell or an id is lost, doubled or owned by nobody that is known."""
    for shard in memory.shards:
        _raise(breaches_of(shard))


def check_cells(pool: CellPool) -> None:
    """Every cell is live or available and none is both; ids likewise. Raises AssertionError."""
    _raise(_pool_breaches(0, pool))


def _raise(breaches: Iterable[Breach]) -> None:
    if found := [f"stage {breach.stage}: {breach.text}" for breach in breaches]:
        raise AssertionError("; ".join(found))


def breaches_of(memory: Memory) -> Iterator[Breach]:
    """Every law that the memory breaks now."""
    entries = list(memory.prefix.entries.values())
    for stage, pool in enumerate(memory.pools):
        yield from _pool_breaches(stage, pool)
        ids = [held.seq_ids[stage] for held in memory.residences.values()]
        ids += [entry.seq_ids[stage] for entry in entries]
        if sorted(ids) != sorted(pool.owners):
            known, live = Counter(ids), Counter(pool.owners.keys())
            strange, unknown, twice = known - live, live - known, [i for i in known if known[i] > 1]
            said = [
                f"sequences {sorted(ids)} {what}"
                for ids, what in (
                    (strange, "are a session's or a prefix's but not live"),
                    (unknown, "are live but nobody's"),
                    (twice, "are held twice"),
                )
                if ids
            ]
            yield Breach(stage, ", ".join(said), seq_ids=tuple(sorted({*strange, *unknown, *twice})))
    shared = [held.entry.seq_ids for held in memory.residences.values() if held.entry is not None]
    if not entries and not shared:
        return
    yield from _prefix_breaches(memory)
    users = Counter(shared)
    for entry in entries:
        sharing = users.pop(entry.seq_ids, 0)
        if entry.users != sharing:
            text = f"a prefix of {entry.count} tokens counts {entry.users} users, {sharing} sessions share it"
            yield Breach(0, text, seq_ids=entry.seq_ids[:1])
    if users:
        yield Breach(0, f"{sum(users.values())} sessions share prefixes that are not kept any more")


def _prefix_breaches(memory: Memory) -> Iterator[Breach]:
    """Kept prefixes stay within their number, two a lane, and within half of the smallest pool."""
    entries = memory.prefix.entries
    if len(entries) > memory.prefix.max_entries:
        yield Breach(0, f"{len(entries)} prefixes are kept, at most {memory.prefix.max_entries} may be")
    rows, half = sum(entry.count for entry in entries.values()), memory.total_rows() // 2
    if rows > half:
        yield Breach(0, f"prefixes keep {rows} tokens, more than half of the pool, {half}")


def _pool_breaches(stage: int, pool: CellPool) -> Iterator[Breach]:
    live = 0
    for owner in pool.owners.values():
        live |= owner.mask
    laws = (
        (live & pool.available, "are live and available at once"),
        (pool.everything & ~(live | pool.available), "are lost: neither live nor available"),
        ((live | pool.available) & ~pool.everything, "are none of the pool's"),
    )
    for mask, what in laws:
        if mask:
            cells = cells_of(mask)
            yield Breach(stage, f"cells {ranges_of(cells)} {what}", cells)
    found = [*pool.owners, *pool.retired_left, *pool.free_ids]
    if sorted(found) != list(range(pool.first_cell, pool.limits.num_sequences)):
        ids, whole = Counter(found), Counter(range(pool.first_cell, pool.limits.num_sequences))
        lost, doubled = sorted(whole - ids), sorted(ids - whole)
        text = f"{ids.total()} ids for {whole.total()}: lost {lost}, too many {doubled}"
        yield Breach(stage, text, seq_ids=(*lost, *doubled))
    if len(pool.retired) != sum(pool.retired_left.values()):
        kept = Counter(seq_id for seq_id, _ in pool.retired.values())
        wrong = sorted({i for i in (*kept, *pool.retired_left) if kept[i] != pool.retired_left.get(i, 0)})
        text = f"{len(pool.retired)} retired cells, {sum(pool.retired_left.values())} counted, of ids {wrong}"
        yield Breach(stage, text, seq_ids=tuple(wrong))


def cells_of(mask: int) -> tuple[int, ...]:
    """The cells of a bit mask, increasing."""
    cells = []
    while mask:
        low = mask & -mask
        cells.append(low.bit_length() - 1)
        mask ^= low
    return tuple(cells)


def ranges_of(cells: Iterable[int]) -> str:
    """Cell indices in their order, runs written as a-b; ``none`` for none."""
    runs: list[list[int]] = []
    for cell in cells:
        if runs and cell == runs[-1][1] + 1:
            runs[-1][1] = cell
        else:
            runs.append([cell, cell])
    return " ".join(f"{a}-{b}" if a != b else f"{a}" for a, b in runs) or "none"
