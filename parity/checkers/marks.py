"""Marks: what a run did, proved by its plans, calls and results. A suite whose mark is zero is red."""

from __future__ import annotations

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
    opened: dict[int, str] = {}
    for facts in facts_of(run):
        _count_step(facts.traced, marks, chunked, opened)
        marks["shared"] += len(facts.shared)
        marks["preempted"] += len(facts.displaced)
        marks["resumed"] += len(facts.resumed)
        marks["rebuilt"] += bool(facts.rebuilt)
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
    marks["cancelled_in_flight"] = sum(
        fault.in_flight and fault.kind is FaultKind.CANCEL and (fault.step, fault.session) in planned
        for fault in run.fired
    )
    return dict(marks)


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
)

# Not of one run but of two: the policy planned the case otherwise than fcfs does. A suite under another
# policy that never has it proves nothing of that policy.
POLICY_MATTERED = "policy_mattered"


def possible_marks(layout: Layout, *, pads: bool) -> tuple[str, ...]:
    """Marks that a run in a layout can have: all but padding rows where there are none (``pads``: whether the
    kernels need company for a lone row; only the unified layout gives it).
    """
    return tuple(mark for mark in MARKS if mark != "padded_call" or (pads and layout is Layout.UNIFIED))


def _count_step(
    traced: TraceStep, marks: Counter[str], chunked: Counter[int], opened: dict[int, str]
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
    marks["seeded"] += sum(sample.sampling.temperature > 0 for sample in flight.batch.samples)
    if not flight.batch.stages:
        return
    owner_of_row = [chunk.request_id for chunk in flight.plan.chunks for _ in range(chunk.stop - chunk.start)]
    for call in flight.batch.stages[0]:
        marks["padded_call"] += PAD_ROW in call.rows
        for row, seq_id in zip(call.rows, call.seq_ids, strict=True):
            if row == PAD_ROW:
                continue
            owner = owner_of_row[row]
            if opened.get(seq_id, owner) != owner:
                marks["id_reused"] += 1
            opened[seq_id] = owner
