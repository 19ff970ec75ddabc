"""A step between launch and commit: the plan as it will run, its batch, and
the sessions as they were then.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import Literal

from scheduler.engine import Batch, Call, Sample
from scheduler.records import (
    AllocationResult,
    BudgetLedger,
    IntentKind,
    IterationPlan,
    Preemption,
    PreemptionCause,
    SessionView,
)
from scheduler.telemetry import StepRecord

ENTRIES = (IntentKind.ADMIT, IntentKind.RESUME)


@dataclass(slots=True)
class Flight:
    """A step between launch and commit. ``views`` are the planned sessions as they were at launch;
    ``preemptions`` are those since the step before, ``allocations`` what the memory said to each intent to
    enter. ``late`` says what becomes of a session when the step
    returns: "cancel", or why it is preempted.
    """

    plan: IterationPlan
    batch: Batch
    views: dict[str, SessionView]
    started_ms: float
    late: dict[str, Literal["cancel"] | PreemptionCause] = field(default_factory=dict)
    preemptions: list[Preemption] = field(default_factory=list)
    allocations: tuple[AllocationResult, ...] = ()
    record: StepRecord = field(default_factory=StepRecord)


def compose_batch(
    plan: IterationPlan,
    views: dict[str, SessionView],
    outputs: dict[str, list[int]],
    stages: tuple[tuple[Call, ...], ...],
    shards: tuple[int, ...] = (),
    num_shards: int = 1,
) -> Batch:
    """The rows of a plan in plan order, what is sampled from them, and the calls that compute them."""
    tokens: list[int] = []
    positions: list[int] = []
    offsets, samples = [0], []
    for chunk, view in zip(plan.chunks, views.values(), strict=True):
        start, stop, request = chunk.start, chunk.stop, view.request
        count = len(request.prompt)
        tokens += request.prompt[start:stop]
        if stop > count:
            tokens += outputs[chunk.request_id][max(start - count, 0) : stop - count]
        positions += range(start, stop)
        offsets.append(len(positions))
        if start >= view.committed and stop >= count:  # a decode, or the end of the prompt; never a rebuild
            samples.append(Sample(len(positions) - 1, chunk.request_id, stop, request.sampling))
    return Batch(
        tuple(tokens),
        tuple(positions),
        tuple(offsets),
        tuple(samples),
        tuple([view.epoch for view in views.values()]),
        tuple([view.request.client_id for view in views.values()]),
        tuple([view.committed for view in views.values()]),
        stages,
        shards,
        num_shards,
    )


def rows_of(plan: IterationPlan) -> list[tuple[str, int, int]]:
    """(request id, first batch row, rows) of every chunk, in plan order."""
    rows, first = [], 0
    for chunk in plan.chunks:
        count = chunk.stop - chunk.start
        rows.append((chunk.request_id, first, count))
        first += count
    return rows


def plan_without(plan: IterationPlan, request_ids: Collection[str]) -> IterationPlan:
    """The plan less whole sessions and their entries, its ledger and evidence recounted."""
    if not request_ids:
        return plan
    kept = [i for i, chunk in enumerate(plan.chunks) if chunk.request_id not in request_ids]
    chunks = tuple(plan.chunks[i] for i in kept)
    ledger = BudgetLedger(
        plan.ledger.max_num_batched_tokens,
        plan.ledger.max_num_seqs,
        sum(chunk.stop - chunk.start for chunk in chunks),
        len(chunks),
    )
    intents = tuple(
        intent
        for intent in plan.intents
        if intent.kind not in ENTRIES or intent.request_id not in request_ids
    )
    return replace(
        plan, chunks=chunks, ledger=ledger, intents=intents, order=tuple(plan.order[i] for i in kept)
    )
