"""``sglang_adder``: prefill batches under separate budgets, chunk-led gates, warm and cold requests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from scheduler.policy.base import PlanBuilder, Policy
from scheduler.policy.contract import CELLS, FORECAST, HIDDEN_LENGTH, TOKENS, Contract
from scheduler.policy.state import SchedulerState
from scheduler.records import IntentKind, IterationPlan, Phase, PolicyIdentity, SessionState, SessionView

WARM_TOKENS = 64  # cached tokens from which a request is warm


class Lead(Enum):
    """What began the prefill batch. A continued chunk is cold: its rows dominate the step."""

    NONE = "none"
    WARM = "warm"
    COLD = "cold"


class Verdict(Enum):
    """What the scan does with a candidate."""

    ADMIT = "admit"
    SKIP = "skip"
    STOP = "stop"


@dataclass(frozen=True, slots=True, kw_only=True)
class Affinity:
    """Bounds of the warm and cold rule: skips a pass, deferred passes, age of a cold request."""

    max_skips: int = 16
    max_passes: int = 3
    max_age_ms: float = 5000.0

    def judge(self, *, warm: bool, lead: Lead, skips: int, passes: int, age_ms: float) -> Verdict:
        """Warm joins anything, cold joins an empty or cold-led batch, else it is
        skipped until a bound stops the scan.

        Stopping, not forcing: the cold request waits for the same step either way, and leads the next batch.
        """
        if warm or lead is not Lead.WARM:
            return Verdict.ADMIT
        if skips >= self.max_skips or passes >= self.max_passes or age_ms >= self.max_age_ms:
            return Verdict.STOP
        return Verdict.SKIP


@dataclass(frozen=True, slots=True, kw_only=True)
class AdderLimits:
    """Budgets of one prefill batch; None is no limit.

    Every one stops adding and none blocks a batch's first session. Extended tokens are counted in whole
    pages, session by session: that is what they take. Raises ValueError for a limit below 1.
    """

    max_requests: int | None = None
    chunk_tokens: int | None = None
    max_extend_tokens: int | None = None
    max_cached_tokens: int | None = None
    max_buffer_bytes: int | None = None
    buffer_bytes_per_token: int = 1
    page_tokens: int = 16

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}: must be at least 1")

    def paged(self, tokens: int) -> int:
        """``tokens`` in whole pages."""
        return -(-tokens // self.page_tokens) * self.page_tokens

    def extend_limit(self) -> int | None:
        """``min(user limit, chunk budget)`` when both exist, the chunk budget when only that exists."""
        limits = [limit for limit in (self.max_extend_tokens, self.chunk_tokens) if limit is not None]
        return min(limits, default=None)


@dataclass(slots=True)
class _Batch:
    """What the prefill batch of one plan holds so far."""

    lead: Lead = Lead.NONE
    requests: int = 0
    extend: int = 0  # in whole pages
    cached: int = 0
    skips: int = 0

    def add(self, *, extend: int, cached: int, lead: Lead) -> None:
        self.lead = lead if self.lead is Lead.NONE else self.lead
        self.requests += 1
        self.extend += extend
        self.cached += cached


class SglangAdder(Policy):
    """A step is a prefill batch if there is one to make, else all decodes.

    Continued chunks come first, their carried rows counting as cached tokens and buffer, and stay alone. With
    ``mix_chunked`` only a chunk that was cut ends the scan; a tail chunk leaves headroom for followers,
    unless it is carried on from a position that is not page-aligned. ``warm_cold`` turns the warm and cold
    rule on; it is off under ``priority_scheduling``. Both are off by default, as the notes leave them.
    """

    identity = PolicyIdentity("sglang_adder")
    contract = Contract(
        scheduling_unit="one prefill batch, or one step of all decodes",
        protected_identity="head of the queue: it leads a batch after a bounded number of deferrals",
        visible_state=("cached tokens", "carried rows of chunks", "age and deferred passes of cold requests"),
        decision="who joins the prefill batch",
        unknown_future=f"{HIDDEN_LENGTH}: {FORECAST}",
        objective="a cold prompt does not join a batch of cache hits",
        metric="tokens, cached tokens and buffer bytes of a prefill batch",
        denominator="prefill batches",
        assumptions=("buffer bytes grow with cached and extended tokens", "a page holds page_tokens rows"),
        foreign_owners=(CELLS, TOKENS, "resident prefixes: the memory"),
        not_reproduced=(
            "context-parallel staging and the real buffer estimator",
            "load-back from host memory",
            "the new-token ratio: declared maxima are reserved",
        ),
        starvation_free=False,
        progress="a cold request leads a batch after max_passes or max_age_ms; decodes starve while prefill "
        "batches can be made",
        source="sglang, PrefillAdder: commit notes on budgets, chunked batches, warm and cold",
    )

    def __init__(
        self,
        *,
        max_skips: int = 16,
        max_passes: int = 3,
        max_age_ms: float = 5000.0,
        warm_tokens: int = WARM_TOKENS,
        warm_cold: bool = False,
        mix_chunked: bool = False,
        priority_scheduling: bool = False,
        max_requests: int | None = None,
        chunk_tokens: int | None = None,
        max_extend_tokens: int | None = None,
        max_cached_tokens: int | None = None,
        max_buffer_bytes: int | None = None,
        buffer_bytes_per_token: int = 1,
        page_tokens: int = 16,
        **seams: Any,
    ) -> None:
        super().__init__(**seams)
        if min(max_skips, max_passes) < 0 or not max_age_ms >= 0 or warm_tokens < 1:
            raise ValueError(f"affinity out of range: {max_skips}, {max_passes}, {max_age_ms}, {warm_tokens}")
        self.affinity = Affinity(max_skips=max_skips, max_passes=max_passes, max_age_ms=max_age_ms)
        self.limits = AdderLimits(
            max_requests=max_requests,
            chunk_tokens=chunk_tokens,
            max_extend_tokens=max_extend_tokens,
            max_cached_tokens=max_cached_tokens,
            max_buffer_bytes=max_buffer_bytes,
            buffer_bytes_per_token=buffer_bytes_per_token,
            page_tokens=page_tokens,
        )
        self.warm_tokens, self.mix_chunked = warm_tokens, mix_chunked
        self.priority_scheduling = priority_scheduling
        self.warm_cold = warm_cold and not priority_scheduling

    # -- deferred passes

    def start(self) -> Mapping[str, int]:
        return {}

    def planned(self, state: SchedulerState, plan: IterationPlan) -> Any:
        memory = dict(state.policy_memory)
        for intent in plan.intents:
            if intent.kind is IntentKind.DEFER:
                memory[intent.request_id] = memory.get(intent.request_id, 0) + 1
        return memory

    def observe(
        self, memory: Mapping[str, int], event: str, view: SessionView, now_ms: float, amount: int = 0
    ) -> Any:
        if event in ("admitted", "cancelled", "failed") and view.request_id in memory:
            return {
                request_id: count for request_id, count in memory.items() if request_id != view.request_id
            }
        return memory

    # -- the batch

    def order_key(self, state: SchedulerState, view: SessionView) -> tuple:
        running = view.state is SessionState.RUNNING
        return (
            not running,
            view.request.priority if self.priority_scheduling and not running else 0,
            view.state is not SessionState.SUSPENDED,
            view.index,
        )

    def chunk_tokens(self, state: SchedulerState, view: SessionView, available: int) -> int:
        """A prompt that is cut is cut at a page boundary, if there is one within reach."""
        running = view.state is SessionState.RUNNING
        start = view.computed if running else state.memory.cached_tokens(view)
        if view.limit_at(start) - start <= available:
            return available
        page = self.limits.page_tokens
        return (
            (start + available) // page * page - start
            if (start + available) // page * page > start
            else available
        )

    def plan_iteration(self, state: SchedulerState) -> IterationPlan:
        plan, batch = PlanBuilder(state, self), _Batch()
        running = sorted((state.views[r] for r in state.running), key=lambda view: view.index)
        self._continue_chunks(plan, batch, [v for v in running if v.phase is not Phase.DECODE])
        if not plan.closed:
            self._admit(plan, batch, state)
        if batch.lead is Lead.NONE:
            self.fill(plan, (view for view in running if view.phase is Phase.DECODE))
        return plan.build()

    def _continue_chunks(self, plan: PlanBuilder, batch: _Batch, partial: list[SessionView]) -> None:
        for view in partial:
            if batch.lead is not Lead.NONE and not self.mix_chunked:
                return
            rows = plan.add(view, limit=self._extend_left(batch))
            if rows:
                batch.add(extend=self.limits.paged(rows), cached=view.computed, lead=Lead.COLD)
                cut = view.computed + rows < view.limit_at(view.computed)
                if cut or view.computed % self.limits.page_tokens or not self.mix_chunked:
                    plan.closed = True
                    return

    def _extend_left(self, batch: _Batch) -> int | None:
        """Rows that the chunk budget leaves; the user's limit stops adding but never cuts."""
        chunk = self.limits.chunk_tokens
        return None if chunk is None else max(chunk - batch.extend, 0)

    def _admit(self, plan: PlanBuilder, batch: _Batch, state: SchedulerState) -> None:
        queue = (state.views[request_id] for request_id in (*state.suspended, *state.waiting))
        for view in sorted(queue, key=lambda view: self.order_key(state, view)):
            if plan.closed:
                return
            if not view.ready:
                continue
            reason = self.rejects(state, view) if view.state is SessionState.WAITING else None
            if reason is not None:
                plan.reject(view, reason)
                continue
            cached = plan.cached_tokens(view)
            warm = cached >= self.warm_tokens
            verdict = self._judge(batch, state, view, warm=warm)
            if verdict is Verdict.SKIP:
                batch.skips += 1
                plan.defer(view, "cold behind a warm-led batch")
                continue
            left = plan.tokens_left
            if (
                verdict is Verdict.STOP
                or not self._fits(batch, view, cached, left)
                or not plan.enter(view, limit=self._extend_left(batch))
            ):
                return
            rows = left - plan.tokens_left
            batch.add(extend=self.limits.paged(rows), cached=cached, lead=Lead.WARM if warm else Lead.COLD)
            plan.closed = cached + rows < view.limit_at(cached)

    def _judge(self, batch: _Batch, state: SchedulerState, view: SessionView, *, warm: bool) -> Verdict:
        if not self.warm_cold:
            return Verdict.ADMIT
        return self.affinity.judge(
            warm=warm,
            lead=batch.lead,
            skips=batch.skips,
            passes=state.policy_memory.get(view.request_id, 0),
            age_ms=state.now_ms - view.request.arrival_ms,
        )

    def _fits(self, batch: _Batch, view: SessionView, cached: int, tokens_left: int) -> bool:
        """Whether a batch that has somebody in it may take one more; an empty one takes anybody."""
        if batch.lead is Lead.NONE:
            return True
        limits, chunk_left = self.limits, self._extend_left(batch)
        rows = min(view.limit_at(cached) - cached, tokens_left if chunk_left is None else chunk_left)
        extend, total_cached = batch.extend + limits.paged(rows), batch.cached + cached
        bounds = (
            (limits.max_requests, batch.requests + 1),
            (limits.extend_limit(), extend),
            (limits.max_cached_tokens, total_cached),
            (limits.max_buffer_bytes, (extend + total_cached) * limits.buffer_bytes_per_token),
        )
        return all(limit is None or value <= limit for limit, value in bounds)
