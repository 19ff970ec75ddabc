"""Row arithmetic of batches, chunks, reservations and queues: from numbers, or read off the trace of a run.

The numbers F.. are the formulas of the source document (M5.2, registry 0x11A).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction

from parity.history import Run
from scheduler.records import IntentKind, IterationPlan, Phase

# -- slots


@dataclass(frozen=True, slots=True)
class Slots:
    """Slot-iterations of a batch: ``useful`` ran a session, ``available`` could have."""

    iterations: int
    useful: int
    available: int

    @property
    def idle(self) -> int:
        """F10."""
        return self.available - self.useful

    @property
    def utilization(self) -> Fraction:
        """F11."""
        return Fraction(self.useful, self.available)


def frozen_batch(outputs: Sequence[int]) -> Slots:
    """A cohort that lasts as long as its longest member, one slot each: ``I = max G`` (F08), ``B max(G)``
    available and ``sum(G)`` useful (F09).
    """
    longest = max(outputs)
    return Slots(longest, sum(outputs), len(outputs) * longest)


def slots_of(run: Run, *, slots: int) -> Slots:
    """Slot-iterations of a run: every step that ran anything had ``slots``."""
    sizes = [len(traced.flight.plan.chunks) for traced in run.trace if traced.flight.plan.chunks]
    return Slots(len(sizes), sum(sizes), slots * len(sizes))


# -- chunks


def chunk_bounds(total: int, size: int) -> list[tuple[int, int]]:
    """``total`` rows cut into half-open chunks of ``size``, the last maybe shorter (F42, F68)."""
    return [(start, min(start + size, total)) for start in range(0, total, size)]


def check_partition(chunks: Sequence[tuple[int, int]], total: int) -> list[str]:
    """Problems of chunks that must cover ``[0, total)`` in order, each row once (F42)."""
    problems, frontier = [], 0
    for start, stop in chunks:
        if start != frontier or stop <= start:
            problems.append(f"chunk [{start}, {stop}) does not go on from {frontier}")
        frontier = stop
    return problems if frontier == total else [*problems, f"chunks end at {frontier} of {total}"]


def visible_rows(start: int, row: int) -> list[int]:
    """Rows that row ``row`` of a chunk from ``start`` sees: what is committed, then the chunk's own (F43)."""
    return [*range(start), *range(start, row + 1)]


def causal_pairs(start: int, stop: int) -> int:
    """Query-key pairs of a chunk of c rows at s: ``c*s + c*(c + 1)/2`` (F44); over a prompt of S rows they
    sum to ``total_pairs(S)`` (F45, F46).
    """
    count = stop - start
    return count * start + count * (count + 1) // 2


def total_pairs(rows: int) -> int:
    """``S(S + 1)/2`` (F46)."""
    return rows * (rows + 1) // 2


def history_rows(chunks: Iterable[tuple[int, int]]) -> int:
    """Rows computed earlier that later chunks read again: the sum of the chunks' starts (F47).

    No measure of traffic.
    """
    return sum(start for start, _ in chunks)


def equal_chunk_history(size: int, chunks: int) -> int:
    """``C M (M - 1) / 2``: the history of M equal chunks of C rows (F48)."""
    return size * chunks * (chunks - 1) // 2


def history_bytes(chunks: Iterable[tuple[int, int]], *, row_bytes: int) -> int:
    """A proxy of bytes exposed again, at ``row_bytes`` a row (F49)."""
    return history_rows(chunks) * row_bytes


def piggybacked_decodes(decodes: int, *, chunk: int, prompt: int, budget: int, seqs: int) -> int:
    """Decodes that ride with one chunk: ``min(D, max(B_tok - min(C, S), 0), max(B_seq - 1, 0))`` (F70)."""
    return min(decodes, max(budget - min(chunk, prompt), 0), max(seqs - 1, 0))


def prefill_chunks(run: Run, session: int) -> list[tuple[int, int]]:
    """Completed prefill intervals of a session in order."""
    chunks = []
    for traced in run.trace:
        for item in traced.result.chunks if traced.result is not None else ():
            view = traced.flight.views[item.request_id]
            if item.request_id == f"s{session}" and view.phase_at(item.before) is Phase.PREFILL:
                chunks.append((item.before, item.after))
    return chunks


# -- cadence


def cadence_dilation(mixed_ms: Sequence[float], decode_only_ms: float) -> list[float]:
    """How much longer each mixed step keeps a decode waiting than a step of decodes alone, as a factor."""
    return [service_ms / decode_only_ms for service_ms in mixed_ms]


def imbalance_area_ms(service_ms: Sequence[float]) -> float:
    """``I = n max(t) - sum(t)``: idle area of microbatches of unequal service times.

    A proxy: neither a bubble's duration nor a speedup.
    """
    return len(service_ms) * max(service_ms) - sum(service_ms)


# -- queue and capacity


def backlog_after(arrivals: Sequence[int], capacity: Sequence[int], *, start: int = 0) -> list[int]:
    """Unfinished rows after each step: ``Q = max(0, Q + A - C)`` (F40)."""
    backlog, queue = [], start
    for arrived, served in zip(arrivals, capacity, strict=True):
        queue = max(0, queue + arrived - served)
        backlog.append(queue)
    return backlog


def unavoidable_rows(demand: int, capacity: int) -> int:
    """Rows that cannot be served in the window whatever the order: ``max(D - C, 0)`` (F41)."""
    return max(demand - capacity, 0)


# -- memory


def resident_bytes(layers: Iterable[Sequence[int]]) -> int:
    """Bytes on the device, request by request and layer by layer (F64)."""
    return sum(map(sum, layers))


def realised_rows(plan: IterationPlan, *, used_rows: int, hidden_rows: dict[str, int]) -> int:
    """Rows that the sessions which a plan lets in will need in the end, on top of ``used_rows``.

    ``hidden_rows`` is revealed to this evaluation only, after the plan is made.
    """
    entered = [
        intent.request_id for intent in plan.intents if intent.kind in (IntentKind.ADMIT, IntentKind.RESUME)
    ]
    return used_rows + sum(hidden_rows[request_id] for request_id in entered)
