"""What may be said: a theorem is claimed only where its premises were observed, and is then held to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from parity.checkers.service import ServiceLedger, merged_spans, service_of
from parity.history import Run, session_index
from scheduler.records import Phase

PREMISES = ("algorithm", "both_backlogged", "work_conserving", "no_preemption", "whole_prompts", "bounds")


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundClaim:
    """VTC Theorem 4.4 for two clients: ``gap <= 2U``, ``U = max(w_p L_input, w_q M)``;
    claimed with all premises only.

    ``bound`` None is no claim. Raises ValueError for a bound without its premises.
    """

    premises: Mapping[str, bool]
    gap: int
    bound: int | None

    def __post_init__(self) -> None:
        missing = [name for name, holds in self.premises.items() if not holds]
        if self.bound is not None and (missing or list(self.premises) != list(PREMISES)):
            raise ValueError(
                f"theorem claimed without its premises: {', '.join(missing) or 'incomplete list'}"
            )

    @property
    def verdict(self) -> str:
        """``holds``, ``violated``, or ``not claimed`` without a bound."""
        if self.bound is None:
            return "not claimed"
        return "holds" if self.gap <= self.bound else "violated"

    @property
    def line(self) -> str:
        """The claim as one line, with the premises that fail."""
        if self.bound is None:
            missing = ", ".join(name for name, holds in self.premises.items() if not holds)
            return f"not claimed: without {missing}; gap {self.gap}"
        return f"{self.verdict}: gap {self.gap}, bound {self.bound}, all premises observed"


def claim_vtc_bound(
    run: Run,
    first: str,
    second: str,
    *,
    start_ms: float,
    stop_ms: float,
    max_input_tokens: int,
    max_running_tokens: int,
    input_weight: int,
    output_weight: int,
) -> BoundClaim:
    """Look for the premises in a run between ``start_ms`` and ``stop_ms``, and
    claim the bound on the gap there only if all hold.

    ``both_backlogged``: each client has requests *waiting* all the time, as the theorem's backlog is the
    queue and what runs is out of it. ``whole_prompts``: prompts are computed whole in the step in which they
    enter, so that service is completed where Algorithm 2 charges it.
    """
    ledger = service_of(run, input_weight=input_weight, output_weight=output_weight, until_ms=stop_ms)
    options = dict(run.case.policy_options)
    premises = {
        "algorithm": run.case.policy == "vtc"
        and options.get("input_weight", 1) == input_weight
        and options.get("output_weight", 2) == output_weight,
        "both_backlogged": all(
            any(start <= start_ms and stop_ms <= stop for start, stop in _queued(run, ledger, client))
            for client in (first, second)
        ),
        "work_conserving": _is_work_conserving(run, stop_ms),
        "no_preemption": not any(record.preempted for record in run.records if record.now_ms <= stop_ms),
        "whole_prompts": _computes_whole_prompts(run, stop_ms),
        "bounds": max(len(session.prompt) for session in run.case.sessions) <= max_input_tokens
        and max(
            (
                sum(view.num_prompt_tokens + view.emitted for view in traced.flight.views.values())
                for traced in run.trace
            ),
            default=0,
        )
        <= max_running_tokens,
    }
    unit = max(input_weight * max_input_tokens, output_weight * max_running_tokens)
    return BoundClaim(
        premises=premises,
        gap=ledger.gap_between(first, second, start_ms=start_ms, stop_ms=stop_ms),
        bound=2 * unit if all(premises.values()) else None,
    )


def _queued(run: Run, ledger: ServiceLedger, client_id: str) -> list[tuple[float, float]]:
    """Intervals in ms in which a request of the client was waiting to enter."""
    entered: dict[int, float] = {}
    for traced in run.trace:
        for request_id in traced.flight.views:
            entered.setdefault(session_index(request_id), traced.flight.started_ms)
    return merged_spans(
        (item.arrival_ms, entered.get(item.session, float("inf") if item.ended_ms is None else item.ended_ms))
        for item in ledger.served
        if item.client_id == client_id
    )


def _computes_whole_prompts(run: Run, stop_ms: float) -> bool:
    """Whether every session that entered had its whole prompt computed in that step, none of it shared."""
    entered: dict[str, None] = {}
    for traced in run.trace:
        if traced.flight.started_ms >= stop_ms:
            break
        for chunk in traced.flight.plan.chunks:
            if chunk.request_id not in entered:
                entered[chunk.request_id] = None
                whole = traced.flight.views[chunk.request_id].num_prompt_tokens
                if (chunk.start, chunk.stop) != (0, whole) or traced.result is None:
                    return False
    return True


def _is_work_conserving(run: Run, stop_ms: float) -> bool:
    """No step left a session out that was running, or one waiting although there was room for any of them."""
    largest = max(len(session.prompt) + session.max_tokens for session in run.case.sessions)
    for traced, record in zip(run.trace, run.records, strict=True):
        if traced.flight.started_ms >= stop_ms:
            break
        plan, views = traced.flight.plan, traced.flight.views
        if len(plan.chunks) < record.running:
            return False
        reserved = sum(view.future_rows for view in views.values() if view.phase is Phase.DECODE)
        full = (
            len(plan.chunks) >= run.case.max_num_seqs
            or plan.ledger.num_tokens >= plan.ledger.max_num_batched_tokens
            or record.cells_available - reserved < largest
        )
        if record.waiting and not full:
            return False
    return True
