"""What may be said: a theorem is claimed only where its premises were observed, and is then held to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from parity.checkers.service import ServiceLedger, merged_spans, service_of
from parity.history import Run, TraceStep, session_index
from scheduler.records import Phase
from scheduler.telemetry import StepRecord

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """What the premises are looked for in: the policy, ``lengths`` as (prompt, max_tokens) of every request,
    the steps with their records, and the service.
    """

    policy: str
    options: Mapping[str, Any]
    lengths: Sequence[tuple[int, int]]
    max_num_seqs: int
    trace: Sequence[TraceStep]
    records: Sequence[StepRecord]
    ledger: ServiceLedger

    def most_running_tokens(self) -> int:
        """The most prompt and output tokens of the sessions of one step."""
        return max((_tokens(traced) for traced in self.trace), default=0)

    def waits(self, client_id: str) -> list[tuple[float, float]]:
        """Intervals in ms in which a request of the client was waiting to enter."""
        entered: dict[int, float] = {}
        for traced in self.trace:
            for request_id in traced.flight.views:
                entered.setdefault(session_index(request_id), traced.flight.started_ms)
        return merged_spans(
            (
                item.arrival_ms,
                entered.get(item.session, float("inf") if item.ended_ms is None else item.ended_ms),
            )
            for item in self.ledger.served
            if item.client_id == client_id
        )

    def longest_joint_wait(self, first: str, second: str) -> tuple[float, float]:
        """The longest interval in ms in which both clients had requests waiting; (0, 0) without one."""
        joint = (
            (max(a, c), min(b, d))
            for a, b in self.waits(first)
            for c, d in self.waits(second)
            if max(a, c) < min(b, d)
        )
        return max(joint, key=lambda span: span[1] - span[0], default=(0.0, 0.0))


def _tokens(traced: TraceStep) -> int:
    return sum(view.num_prompt_tokens + view.emitted for view in traced.flight.views.values())


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
    """``judge_vtc_bound`` of a case's run."""
    case = run.case
    observed = Observed(
        policy=case.policy,
        options=dict(case.policy_options),
        lengths=[(len(session.prompt), session.max_tokens) for session in case.sessions],
        max_num_seqs=case.max_num_seqs,
        trace=run.trace,
        records=run.records,
        ledger=service_of(run, input_weight=input_weight, output_weight=output_weight, until_ms=stop_ms),
    )
    return judge_vtc_bound(
        observed,
        first,
        second,
        start_ms=start_ms,
        stop_ms=stop_ms,
        max_input_tokens=max_input_tokens,
        max_running_tokens=max_running_tokens,
        input_weight=input_weight,
        output_weight=output_weight,
    )


def judge_vtc_bound(
    observed: Observed,
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
    """Look for the premises between ``start_ms`` and ``stop_ms``, and claim the bound on
    the gap there only if all hold.

    ``both_backlogged``: each client has requests *waiting* all the time, as the theorem's backlog is the
    queue and what runs is out of it. ``whole_prompts``: prompts are computed whole in the step in which they
    enter, so that service is completed where Algorithm 2 charges it.
    """
    options, records = observed.options, observed.records
    premises = {
        "algorithm": observed.policy == "vtc"
        and options.get("input_weight", 1) == input_weight
        and options.get("output_weight", 2) == output_weight,
        "both_backlogged": start_ms < stop_ms
        and all(
            any(start <= start_ms and stop_ms <= stop for start, stop in observed.waits(client))
            for client in (first, second)
        ),
        "work_conserving": _is_work_conserving(observed, stop_ms),
        "no_preemption": not any(record.preempted for record in records if record.now_ms <= stop_ms),
        "whole_prompts": _computes_whole_prompts(observed, stop_ms),
        "bounds": max(prompt for prompt, _ in observed.lengths) <= max_input_tokens
        and observed.most_running_tokens() <= max_running_tokens,
    }
    unit = max(input_weight * max_input_tokens, output_weight * max_running_tokens)
    return BoundClaim(
        premises=premises,
        gap=observed.ledger.gap_between(first, second, start_ms=start_ms, stop_ms=stop_ms),
        bound=2 * unit if all(premises.values()) else None,
    )


def _computes_whole_prompts(observed: Observed, stop_ms: float) -> bool:
    """Whether every session that entered had its whole prompt computed in that step, none of it shared."""
    entered: dict[str, None] = {}
    for traced in observed.trace:
        if traced.flight.started_ms >= stop_ms:
            break
        for chunk in traced.flight.plan.chunks:
            if chunk.request_id not in entered:
                entered[chunk.request_id] = None
                whole = traced.flight.views[chunk.request_id].num_prompt_tokens
                if (chunk.start, chunk.stop) != (0, whole) or traced.result is None:
                    return False
    return True


def _is_work_conserving(observed: Observed, stop_ms: float) -> bool:
    """No step left a session out that was running, or one waiting although there was room for any of them."""
    largest = max(prompt + most for prompt, most in observed.lengths)
    for traced, record in zip(observed.trace, observed.records, strict=True):
        if traced.flight.started_ms >= stop_ms:
            break
        plan, views = traced.flight.plan, traced.flight.views
        if len(plan.chunks) < record.running:
            return False
        reserved = sum(view.future_rows for view in views.values() if view.phase is Phase.DECODE)
        full = (
            len(plan.chunks) >= observed.max_num_seqs
            or plan.ledger.num_tokens >= plan.ledger.max_num_batched_tokens
            or record.cells_available - reserved < largest
        )
        if record.waiting and not full:
            return False
    return True
