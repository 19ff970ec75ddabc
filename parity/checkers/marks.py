"""Marks: what a run did, proved by its plans, calls and results. A suite whose mark is zero is red."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter

from parity.checkers.residence import facts_of
from parity.history import Run, TraceStep, session_index
from parity.records import FaultKind
from scheduler.engine import PAD_ROW
from scheduler.limits import Layout
from scheduler.records import FinishReason, Phase


def count_marks(run: Run) -> dict[str, int]:
    """All marks of one run, zero ones included."""
    marks = Counter(dict.fromkeys(MARKS, 0))
    chunked: Counter[int] = Counter()
    opened: dict[tuple[int, int], str] = {}
    for facts in facts_of(run):
        _count_step(facts.traced, marks, chunked, opened)
        marks["shared"] += len(facts.shared)
        marks["preempted"] += len(facts.displaced)
        marks["resumed"] += len(facts.resumed)
        marks["rebuilt"] += bool(facts.rebuilt)
        marks["moved"] += len(facts.moved)
        marks["pool_full"] += facts.full
        marks["engine_failed"] += facts.failed
    marks["chunked"] = sum(count > 1 for count in chunked.values())
    for completion in run.completions.values():
        marks["cancelled"] += completion.reason is FinishReason.CANCELLED
        marks["stopped"] += completion.reason is FinishReason.STOP
    marks["refused"] = len(run.refusals)
    marks["resubmitted"] = sum(earlier.session in run.completions for earlier in run.earlier)
    planned = {
        (traced.step, session_index(chunk.request_id))
        for traced in run.trace
        for chunk in traced.flight.plan.chunks
    }
    for kind, mark in ((FaultKind.CANCEL, "cancelled_in_flight"), (FaultKind.PREEMPT, "preempted_in_flight")):
        marks[mark] = sum(
            fault.in_flight and fault.kind is kind and (fault.step, fault.session) in planned
            for fault in run.fired
        )
    marks["overlapped"] = _count_overlapped(run)
    return dict(marks)


def _count_overlapped(run: Run) -> int:
    """Tokens that were given to their caller after a later step with rows had been begun."""
    busy = [traced.step for traced in run.trace if traced.flight.plan.chunks]
    return sum(
        bisect_right(busy, given) > bisect_right(busy, emitted)
        for session, steps in run.emitted_at.items()
        for emitted, given in zip(steps, run.given_at[session], strict=True)
    )


MARKS = (
    "mixed_step",
    "chunked",
    "shared",
    "preempted",
    "resumed",
    "cancelled",
    "id_reused",
    "pool_full",
    "rebuilt",
    "padded_call",
    "one_token_chunk",
    "concurrent",
    "seeded",
    "stopped",
    "refused",
    "engine_failed",
    "cancelled_in_flight",
    "resubmitted",
    "preempted_in_flight",
    "overlapped",
    "sharded",
    "moved",
)

# Not of one run but of two: the policy planned the case otherwise than fcfs does. A suite under another
# policy that never has it proves nothing of that policy.
POLICY_MATTERED = "policy_mattered"


def possible_marks(
    layout: Layout, *, pads: bool, overlaps: bool = False, in_shards: bool = False
) -> tuple[str, ...]:
    """Marks that a run in a layout can have: all but padding rows where there are none (``pads``: whether the
    kernels need company for a lone row; only the unified layout gives it), steps that overlap where only
    one is in flight, and what takes several shards where there is one.
    """
    impossible = {"padded_call"} - ({"padded_call"} if pads and layout is Layout.UNIFIED else set())
    impossible |= set() if overlaps else {"overlapped"}
    impossible |= set() if in_shards else {"sharded", "moved"}
    return tuple(mark for mark in MARKS if mark not in impossible)


def _count_step(
    traced: TraceStep, marks: Counter[str], chunked: Counter[int], opened: dict[tuple[int, int], str]
) -> None:
    flight = traced.flight
    phases = []
    for chunk in flight.plan.chunks:
        phase = flight.views[chunk.request_id].phase_at(chunk.start)
        phases.append(phase)
        if phase is Phase.PREFILL:
            chunked[session_index(chunk.request_id)] += 1
            marks["one_token_chunk"] += chunk.stop - chunk.start == 1
    marks["mixed_step"] += Phase.DECODE in phases and Phase.PREFILL in phases
    marks["concurrent"] += len(phases) > 1
    marks["sharded"] += len(set(flight.batch.shards)) > 1
    marks["seeded"] += sum(sample.sampling.temperature > 0 for sample in flight.batch.samples)
    owner_of_row = [chunk.request_id for chunk in flight.plan.chunks for _ in range(chunk.stop - chunk.start)]
    for context, call in flight.batch.first_calls():
        marks["padded_call"] += PAD_ROW in call.rows
        for row, seq_id in zip(call.rows, call.seq_ids, strict=True):
            if row == PAD_ROW:
                continue
            owner = owner_of_row[row]
            if opened.get((context, seq_id), owner) != owner:
                marks["id_reused"] += 1
            opened[context, seq_id] = owner
