"""Frozen records of the scheduler; each docstring says who writes them.

Counts of one session: ``p`` prompt tokens, ``e`` emitted tokens, ``c`` computed rows (in the pool now) and
``k`` committed rows (the furthest frontier ever reached: it survives a preemption and never moves back).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple


class SessionState(Enum):
    """Queues: RUNNING -> PREEMPT_PENDING -> SUSPENDED -> RUNNING, and each may end. RESUME_PENDING is for
    owners that get ready over several steps; rows that are recomputed are never awaited.
    """

    WAITING, RUNNING, PREEMPT_PENDING = "waiting", "running", "preempt_pending"
    SUSPENDED, RESUME_PENDING = "suspended", "resume_pending"
    FINISHED, CANCELLED, FAILED = "finished", "cancelled", "failed"


class Phase(Enum):
    """What an interval of a session is; derived from its counts, never given."""

    PREFILL, DECODE, REBUILD = "prefill", "decode", "rebuild"


class FinishReason(Enum):
    """Why a session ended."""

    LENGTH, STOP, CANCELLED, FAILED = "length", "stop", "cancelled", "failed"


class IntentKind(Enum):
    """What a plan asks the queues to do. DEFER only records that a session was considered and passed over."""

    ADMIT, RESUME, REJECT, PREEMPT, DEFER = "admit", "resume", "reject", "preempt", "defer"


class PreemptionReason(Enum):
    """Why a running session gave way. All but the first two are wishes of somebody, not a lack of cells."""

    NO_CELLS = "no_cells"  # another session's rows found no cells: the policy chose the victim
    OWN_CELLS_TOO_HIGH = (
        "own_cells_too_high"  # cells enough, none above its own last one: it is rebuilt lower
    )
    POLICY_INTENT = "policy_intent"  # the plan asked for it
    ASKED = "asked"  # the caller of the scheduler asked for it
    ENGINE_FAILURE = "engine_failure"  # the engine's memory is in doubt
    ESCALATION = "escalation"  # nobody got further: the oldest session runs alone


class PreemptionMode(Enum):
    """What becomes of a preempted session's rows."""

    RECOMPUTE = "recompute"  # all are released, and computed again after a resume
    REBUILD_TAIL = "rebuild_tail"  # the first ones stay, the last ones are computed again lower in the pool


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Greedy when ``temperature`` is 0, else sampling keyed by (seed, session, position): never by batch row.
    ``key`` stands for the session; empty, its request id does.
    """

    temperature: float = 0.0
    seed: int = 0
    top_k: int = 0
    top_p: float = 1.0
    key: str = ""

    def __post_init__(self) -> None:
        if not self.temperature >= 0 or not 0 < self.top_p <= 1 or self.top_k < 0:
            raise ValueError(f"sampling out of range: {self}")


@dataclass(frozen=True, slots=True)
class ServiceLevel:
    """Latency objectives in ms, None for none: first token from arrival, then from emission to emission."""

    ttft_ms: float | None = None
    tbt_ms: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One session's question, written by the caller. Holds no realised
    output length: that is hidden truth.
    """

    request_id: str
    prompt: tuple[int, ...]
    max_tokens: int
    generation: int = 0
    client_id: str = "default"
    priority: int = 0
    arrival_ms: float = 0.0
    slo: ServiceLevel = ServiceLevel()
    sampling: SamplingParams = SamplingParams()
    stop_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.prompt:
            raise ValueError(f"request {self.request_id}: the prompt is empty")
        if self.max_tokens < 1:
            raise ValueError(f"request {self.request_id}: max_tokens {self.max_tokens} is below 1")

    @property
    def num_rows(self) -> int:
        """Cells that the session needs alone: the last emitted token is never computed."""
        return len(self.prompt) + self.max_tokens - 1


@dataclass(frozen=True, slots=True)
class PolicyIdentity:
    """Name and version of the policy that made a plan."""

    policy_id: str
    version: int = 1


@dataclass(frozen=True, slots=True)
class SessionView:
    """One session as policies see it; replaced, never changed, by ``scheduler.sessions``. ``index`` numbers
    submissions; ``cached`` counts the tokens that were there at the last entry, without being computed.
    """

    request: Request
    index: int
    state: SessionState
    emitted: int
    computed: int
    committed: int
    cached: int
    version: int
    epoch: int
    ready: bool
    submitted_ms: float
    first_emitted_ms: float | None
    last_emitted_ms: float | None

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.prompt)

    @property
    def future_rows(self) -> int:
        """Rows that the session may still write: whole need minus what is computed."""
        return len(self.request.prompt) + self.request.max_tokens - 1 - self.computed

    @property
    def next_rows(self) -> int:
        """The least that must be kept free for the session, whatever a forecast says: what it has to
        rebuild, and one row of progress.

        With less, two sessions can take each other's cells in turn for ever.
        """
        return min(self.future_rows, self.committed - self.computed + 1)

    @property
    def phase(self) -> Phase:
        """Phase of the next row."""
        return self.phase_at(self.computed)

    def phase_at(self, start: int) -> Phase:
        """Phase of an interval from ``start``."""
        if start < self.committed:
            return Phase.REBUILD
        return Phase.DECODE if self.emitted else Phase.PREFILL

    def limit_at(self, start: int) -> int:
        """Where an interval from ``start`` must stop: the committed frontier,
        the prompt's end, or one row on.
        """
        if start < self.committed:
            return self.committed
        return start + 1 if self.emitted else len(self.request.prompt)


@dataclass(frozen=True, slots=True)
class PlannedChunk:
    """Half-open interval ``[start, stop)`` of one session's tokens, bound to
    the snapshot it was planned from.
    """

    request_id: str
    generation: int
    version: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReservationEstimate:
    """Written by the policy: ``rows`` that a session may still append, beside ``reserved_rows`` of others,
    under a hard ceiling and a watermark below it. It allocates nothing. Every intent to enter has its own.
    """

    request_id: str
    generation: int
    rows: int
    reserved_rows: int
    hard_rows: int
    watermark_rows: int

    @property
    def soft_rows(self) -> int:
        """``C_hard - W`` (M5.2, F28)."""
        return self.hard_rows - self.watermark_rows

    @property
    def fits(self) -> bool:
        """``R + A <= C_soft`` (F29)."""
        return self.reserved_rows + self.rows <= self.soft_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocationRequest:
    """Written by the policy for the memory: rows wished for one session, in one epoch of the pool."""

    request_id: str
    generation: int
    epoch: int
    rows: int


class Allocation(Enum):
    """What the memory says: the rows are there, not now, or never in this pool."""

    GRANTED, UNAVAILABLE, FAILED = "granted", "unavailable", "failed"


@dataclass(frozen=True, slots=True)
class AllocationResult:
    """A fact about one request of one epoch, from what the memory has and never from the estimate."""

    request: AllocationRequest
    allocation: Allocation


@dataclass(frozen=True, slots=True)
class QueueIntent:
    """A wish of the plan: intent is not release, and not admission. One to enter has its estimate, and the
    shard of the memory to enter.
    """

    kind: IntentKind
    request_id: str
    generation: int
    reason: str = ""
    estimate: ReservationEstimate | None = None
    shard: int = 0


@dataclass(frozen=True, slots=True)
class BudgetLedger:
    """What the plan spends of the step's two budgets."""

    max_num_batched_tokens: int
    max_num_seqs: int
    num_tokens: int
    num_seqs: int


@dataclass(frozen=True, slots=True)
class IterationPlan:
    """Written by a policy: what one step should run. ``order`` holds one comparable key per chunk."""

    decision_id: int
    input_version: int
    policy: PolicyIdentity
    chunks: tuple[PlannedChunk, ...]
    ledger: BudgetLedger
    intents: tuple[QueueIntent, ...] = ()
    order: tuple[tuple, ...] = ()


class ChunkResult(NamedTuple):
    """What happened to one chunk: progress before and after, and the emitted token if there is one."""

    request_id: str
    generation: int
    epoch: int
    before: int
    after: int
    token: int | None = None


@dataclass(frozen=True, slots=True)
class IterationResult:
    """Written by an engine: every chunk of the plan, completed whole. ``input_version`` is that of the plan
    that was run; ``debits`` charges completed prefill and decode rows to clients, never a rebuild.
    """

    decision_id: int
    input_version: int
    chunks: tuple[ChunkResult, ...]
    debits: Mapping[str, int]
    started_ms: float
    finished_ms: float


@dataclass(frozen=True, slots=True)
class PreemptionCause:
    """Why a session gives way, known before it does; the fields are those of ``Preemption``."""

    decision_id: int
    reason: PreemptionReason
    requester: str | None = None
    wanted_rows: int = 0
    available_rows: int = 0
    candidates: tuple[str, ...] = ()
    scores: tuple[tuple, ...] = ()
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Preemption:
    """One session that gave way, and why it was this one. Written by the loop, once per suspension.

    ``scores`` holds the policy's score inputs of every candidate, in the order of the running queue; the
    greatest is the victim's unless ``reason`` says that nobody was chosen. The requester's ``wanted_rows``
    found no cells when ``available_rows`` were left, wherever they lie. ``released_rows`` are rows that
    stopped being computed, ``freed_cells`` (by stage) what that made available: cells that somebody shares
    stay taken. ``kept_rows`` are those that stayed; with mode ``REBUILD_TAIL`` the fallback, if no
    rows can stay, is ``RECOMPUTE``. ``suspensions`` counts earlier ones of the same session.
    """

    decision_id: int
    policy: PolicyIdentity
    victim: str
    client_id: str
    epoch: int
    reason: PreemptionReason
    mode: PreemptionMode
    is_fallback: bool
    requester: str | None
    wanted_rows: int
    available_rows: int
    candidates: tuple[str, ...]
    scores: tuple[tuple, ...]
    tie_break: str
    released_rows: int
    kept_rows: int
    freed_cells: tuple[int, ...]
    suspensions: int
    note: str = ""


@dataclass(frozen=True, slots=True)
class Refusal:
    """Typed answer to a submission that is not accepted; ``retryable`` says whether waiting can help."""

    request_id: str
    reason: str
    retryable: bool
    needed: int = 0
    available: int = 0


@dataclass(frozen=True, slots=True)
class Completion:
    """The end of an accepted session; exactly one per session."""

    request_id: str
    generation: int
    tokens: tuple[int, ...]
    reason: FinishReason
    error: str = ""


class SchedulerFailure(Exception):
    """The scheduler cannot go on by itself; every exception that ``step`` and its parts raise on purpose.

    After one from ``begin`` the books are whole and nothing is in flight; after one from ``finish`` the step
    is still in flight and must be ended with ``fail``. ``abandon`` does either and ends every live session
    with a typed error, after which the scheduler serves on: no thread has to end.
    """


class IllegalTransition(SchedulerFailure):
    """A plan, result or receipt that is not legal; the message names the rule and the session."""


class PolicyFailure(SchedulerFailure):
    """A policy raised; the message names it and what it raised, which is the ``__cause__``."""


class NoProgress(SchedulerFailure):
    """No new row and no end for too long, even with the oldest session alone; the message names that one."""
