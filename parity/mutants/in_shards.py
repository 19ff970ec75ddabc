"""Faults of a memory in shards, to be planted."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from parity.engines.shards import ShardedEngine
from parity.mutants import cases
from parity.mutants.mutant import Killer, Reach, mutant
from parity.mutants.seam import in_method
from parity.mutants.trials import exact_trial, real_trial
from parity.records import Case, Fault, FaultKind, Session
from scheduler.memory import Memory
from scheduler.records import IterationPlan, IterationResult
from scheduler.shards import ShardedMemory


def in_two_shards(family: str, **settings: Any) -> Case:
    """Six sessions in two shards; four go on from one prompt, and one is preempted and comes back."""
    trunk = cases.session(60, 8).prompt
    sessions = [cases.session(60 + i, 6 + i, 9) for i in range(6)]
    for i in (0, 2, 3, 5):
        own = cases.session(60 + i, 3 + i).prompt
        sessions[i] = Session(prompt=trunk + own, max_tokens=7, arrival_step=2 * i)
    faults = (Fault(kind=FaultKind.PREEMPT, step=8, session=1),)
    return cases.case_of(
        family,
        tuple(sessions),
        **{"shards": 2, "pool_cells": 60, "prefix_block_tokens": 4, "faults": faults, **settings},
    )


PLAYED = tuple(exact_trial(in_two_shards(family)) for family in ("llama", "qwen3next"))
COMPUTED = (real_trial(in_two_shards("llama")),)


@mutant(
    in_method(ShardedEngine, "_parts"),
    part="shards",
    killers=(Killer.BYTES, Killer.ENGINE, Killer.CRASH),
    trials=PLAYED + COMPUTED,
)
def looked_up_in_the_wrong_shard(original: Callable[..., Any], reach: Reach) -> Callable[..., Any]:
    """In every fourth step the rows of the first two busy shards go to each other's engine."""

    def parts(self: ShardedEngine, plan: IterationPlan, batch: Any) -> list:
        made = original(self, plan, batch)
        if len(made) > 1 and plan.decision_id % 4 == 0:
            reach()
            first, second, *rest = made
            made = [first._replace(shard=second.shard), second._replace(shard=first.shard), *rest]
        return made

    return parts


@mutant(
    in_method(ShardedMemory, "__init__"),
    part="shards",
    killers=(Killer.CONSERVATION, Killer.LEGALITY, Killer.INTERNAL),
    trials=PLAYED,
)
def one_prefix_cache_over_all_shards(original: Callable[..., Any], reach: Reach) -> Callable[..., Any]:
    """A prefix that is resident in one shard is shared with sessions of every shard."""

    def make(self: ShardedMemory, *arguments: Any, **named: Any) -> None:
        original(self, *arguments, **named)
        for shard in self.shards[1:]:
            shard.prefix = self.shards[0].prefix
        reach()

    return make


@mutant(
    in_method(ShardedEngine, "_merged"),
    part="shards",
    killers=(Killer.LEGALITY,),
    trials=PLAYED,
)
def applied_in_order_of_arrival(original: Callable[..., Any], reach: Reach) -> Callable[..., Any]:
    """The results of the shard that finished first are applied first, whatever the plan says."""

    def merged(
        self: ShardedEngine, plan: IterationPlan, now_ms: float, results: Iterable[IterationResult]
    ) -> IterationResult:
        arrived = list(results)[::-1]
        whole = original(self, plan, now_ms, arrived)
        names = [chunk.request_id for result in arrived for chunk in result.chunks]
        chunks = {chunk.request_id: chunk for chunk in whole.chunks}
        if names != list(chunks):
            reach()
        return replace(whole, chunks=tuple(chunks[name] for name in names))

    return merged


@mutant(
    in_method(ShardedMemory, "place"),
    part="shards",
    killers=(Killer.CRASH,),
    trials=(
        exact_trial(in_two_shards("llama", pool_cells=24, policy="vllm_fcfs", prefix_cache=False, faults=())),
    ),
)
def rooms_of_other_shards_kept_after_a_blocked_one(
    original: Callable[..., Any], reach: Reach
) -> Callable[..., Any]:
    """When one shard lacks cells, what was placed in the shards before it is not taken back."""

    def place(self: ShardedMemory, chunks: Any) -> Any:
        for shard in self.shards:
            blocked = Memory.place(shard, [chunk for chunk in chunks if chunk[0] in shard.residences])
            if blocked is not None:
                if shard is not self.shards[0]:
                    reach()
                return blocked
        return None

    return place
