"""Conservation: after every operation each cell and each id of every stage is live or available, once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from parity.history import session_index
from parity.records import Finding
from scheduler.cells import CellPool
from scheduler.memory import Memory

CONSERVATION = "conservation"
MOST_CELLS = 64  # that a finding lists one by one


@dataclass(frozen=True, slots=True)
class Breach:
    """One law broken in one stage: which cells, and which sequence ids have to do with it."""

    stage: int
    text: str
    cells: tuple[int, ...] = ()
    seq_ids: tuple[int, ...] = ()


Owners = tuple[
    Mapping[int, tuple[str, int]], ...
]  # per stage: sequence id -> (who holds it, cells as a mask)


def owners_of(memory: Memory) -> Owners:
    """Who holds which cells now, by request id or ``a kept prefix``."""
    names: list[dict[int, str]] = [{} for _ in memory.pools]
    for request_id, residence in memory.residences.items():
        for stage, seq_id in enumerate(residence.seq_ids):
            names[stage][seq_id] = request_id
    return tuple(
        {seq_id: (held.get(seq_id, "a kept prefix"), owner.mask) for seq_id, owner in pool.owners.items()}
        for held, pool in zip(names, memory.pools, strict=True)
    )


def find_losses(memory: Memory, before: Owners, *, operation: str, step: int) -> list[Finding]:
    """What ``operation`` of ``step`` lost or doubled; ``before`` says who held what until then."""
    if not (breaches := list(breaches_of(memory))):
        return []
    now = owners_of(memory)
    findings = []
    for breach in breaches:
        mask = sum(1 << cell for cell in breach.cells)
        holders = [
            who
            for owners in (now[breach.stage], before[breach.stage] if before else {})
            for seq_id, (who, cells) in sorted(owners.items())
            if cells & mask or seq_id in breach.seq_ids
        ]
        sessions = [name for name in dict.fromkeys(holders) if name.startswith("s")]
        data = {"step": step, "operation": operation, "stage": breach.stage}
        data |= {"cells": list(breach.cells[:MOST_CELLS])} if breach.cells else {}
        data |= {"session": session_index(sessions[0])} if sessions else {}
        said = f"after {operation} of step {step}, stage {breach.stage}: {breach.text}"
        if holders:
            said += f"; held by {', '.join(dict.fromkeys(map(_readable, holders)))}"
        findings.append(Finding(CONSERVATION, said, data))
    return findings


def _readable(holder: str) -> str:
    return f"session {session_index(holder)}" if holder.startswith("s") else holder


def check_conservation(memory: Memory) -> None:
    """Raises AssertionError when a cell or an id is lost, doubled or owned by nobody that is known."""
    _raise(breaches_of(memory))


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
        known = Counter(
            held.seq_ids[stage] for holders in (memory.residences.values(), entries) for held in holders
        )
        live = Counter(pool.owners.keys())
        if known != live:
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
    users = Counter(_key_of(held.entry) for held in memory.residences.values() if held.entry is not None)
    for entry in entries:
        sharing = users.pop(_key_of(entry), 0)
        if entry.users != sharing:
            text = f"a prefix of {entry.count} tokens counts {entry.users} users, {sharing} sessions share it"
            yield Breach(0, text, seq_ids=entry.seq_ids[:1])
    if users:
        yield Breach(0, f"{sum(users.values())} sessions share prefixes that are not kept any more")


def _key_of(entry: object) -> tuple:
    """What tells kept prefixes apart: their sequences, which nobody else has."""
    return entry.seq_ids


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
    ids = Counter([*pool.owners, *pool.retired_left, *pool.free_ids])
    whole = Counter(range(pool.first_cell, pool.limits.num_sequences))
    if ids != whole:
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
