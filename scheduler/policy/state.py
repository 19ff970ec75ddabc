"""What a policy sees."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from scheduler.records import SessionView

if TYPE_CHECKING:
    from scheduler.memory import Memory
    from scheduler.shards import ShardedMemory


@dataclass(frozen=True, slots=True)
class SchedulerState:
    """What a policy sees: written by the loop, one per decision. The collections are read-only."""

    decision_id: int
    version: int
    now_ms: float
    waiting: Collection[str]
    running: Collection[str]
    suspended: Collection[str]
    views: Mapping[str, SessionView]
    memory: Memory | ShardedMemory
    max_num_batched_tokens: int
    max_num_seqs: int
    max_chunk_tokens: int
    service: Mapping[str, int]
    policy_memory: Any = None
    seqs_per_step: int | None = None  # None: max_num_seqs; less when several steps are in flight

    @property
    def step_seqs(self) -> int:
        """Sessions that this step may run."""
        return self.max_num_seqs if self.seqs_per_step is None else self.seqs_per_step

    def in_shard(self, shard: Memory) -> SchedulerState:
        """The same state for a choice within one shard of the memory: those who run in it, and its facts."""
        if shard is self.memory:
            return self
        return replace(
            self, running=[name for name in self.running if name in shard.residences], memory=shard
        )
