"""What may be said: a theorem is claimed only where its premises were observed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from parity.checkers.service import service_of
from parity.history import Run
from scheduler.records import Phase


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


PREMISES = ("algorithm", "both_backlogged", "work_conserving", "no_preemption", "bounds")


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
    claim the bound only if all hold.
    """
    ledger = service_of(run, input_weight=input_weight, output_weight=output_weight, until_ms=stop_ms)
    options = dict(run.case.policy_options)
    premises = {
        "algorithm": run.case.policy == "vtc"
        and options.get("input_weight", 1) == input_weight
        and options.get("output_weight", 2) == output_weight,
        "both_backlogged": any(
            start <= start_ms and stop_ms <= stop for start, stop in ledger.joint_backlog(first, second)
        ),
        "work_conserving": _is_work_conserving(run, stop_ms),
        "no_preemption": not any(record.preempted for record in run.records if record.now_ms <= stop_ms),
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
        premises=premises, gap=ledger.gap(first, second), bound=2 * unit if all(premises.values()) else None
    )


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
