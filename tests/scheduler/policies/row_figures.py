"""Row arithmetic of chunks and reservations, read off the trace of a run or given as intervals."""

from __future__ import annotations

from collections.abc import Iterable

from parity.history import Run
from scheduler.records import IntentKind, IterationPlan, Phase


def causal_pairs(start: int, stop: int) -> int:
    """Query-key pairs of a chunk of c rows at s: ``c*s + c*(c + 1)/2``; over a prompt
    of S rows they sum to S(S+1)/2.
    """
    count = stop - start
    return count * start + count * (count + 1) // 2


def history_rows(chunks: Iterable[tuple[int, int]]) -> int:
    """Rows computed earlier that later chunks read again: the sum of the chunks' starts.

    No measure of traffic.
    """
    return sum(start for start, _ in chunks)


def prefill_chunks(run: Run, session: int) -> list[tuple[int, int]]:
    """Completed prefill intervals of a session in order."""
    chunks = []
    for traced in run.trace:
        for item in traced.result.chunks if traced.result is not None else ():
            view = traced.flight.views[item.request_id]
            if item.request_id == f"s{session}" and view.phase_at(item.before) is Phase.PREFILL:
                chunks.append((item.before, item.after))
    return chunks


def realised_rows(plan: IterationPlan, *, used_rows: int, hidden_rows: dict[str, int]) -> int:
    """Rows that the sessions which a plan lets in will need in the end, on top of ``used_rows``.

    ``hidden_rows`` is revealed to this evaluation only, after the plan is made.
    """
    entered = [
        intent.request_id for intent in plan.intents if intent.kind in (IntentKind.ADMIT, IntentKind.RESUME)
    ]
    return used_rows + sum(hidden_rows[request_id] for request_id in entered)
