"""Conservation: after every step each cell and each id of every stage is live or available, once."""

from __future__ import annotations

from scheduler.cells import CellPool
from scheduler.memory import Memory

CONSERVATION = "conservation"


def check_conservation(memory: Memory) -> None:
    """Raises AssertionError when a cell or an id is lost, doubled or owned by nobody that is known."""
    entries = memory.prefix.entries.values()
    known = [residence.seq_ids for residence in memory.residences.values()] + [e.seq_ids for e in entries]
    for stage, pool in enumerate(memory.pools):
        check_cells(pool)
        if sorted(seq_ids[stage] for seq_ids in known) != sorted(pool.owners):
            raise AssertionError(f"stage {stage}: live sequences {sorted(pool.owners)} but known {known}")
    sharing = sum(residence.entry is not None for residence in memory.residences.values())
    if sum(entry.users for entry in entries) != sharing:
        raise AssertionError("prefix entries and their users disagree")


def check_cells(pool: CellPool) -> None:
    """Every cell is live or available and none is both; ids likewise. Raises AssertionError."""
    live = 0
    for owner in pool.owners.values():
        live |= owner.mask
    if live & pool.available or live | pool.available != pool.everything:
        raise AssertionError(f"cells lost or doubled: {bin(pool.everything ^ live ^ pool.available)}")
    ids = len(pool.owners) + len(pool.retired_left) + len(pool.free_ids) + pool.first_cell
    if ids != pool.limits.num_sequences or len(pool.retired) != sum(pool.retired_left.values()):
        raise AssertionError(f"{ids} ids for {pool.limits.num_sequences}, {len(pool.retired)} retired cells")
