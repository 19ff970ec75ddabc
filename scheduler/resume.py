"""Preemption as a protocol: intent, release, preservation, ticket; bound by (request, generation, snapshot, epoch).

The epoch is monotone, so a receipt of an earlier suspension can never satisfy a later one (no ABA).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from scheduler.records import IllegalTransition, SessionState, SessionView


class Preservation(Enum):
    """What of the computed rows outlived the release."""

    EXACT = "exact"
    PARTIAL = "partial"
    RECOMPUTE = "recompute"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class SuspensionKey:
    """Binds every receipt to one suspension of one session."""

    request_id: str
    generation: int
    snapshot: int
    epoch: int


@dataclass(frozen=True, slots=True)
class PreemptionIntent:
    """Written by a policy: release is wished, nothing is free yet."""

    key: SuspensionKey
    reason: str


@dataclass(frozen=True, slots=True)
class ReleaseReceipt:
    """Written by the allocator: the cells are available (``confirmed``) or the release is still pending."""

    key: SuspensionKey
    confirmed: bool
    rows: int


@dataclass(frozen=True, slots=True)
class PreservationReceipt:
    """Written by the store: the first ``ready_tokens`` rows of the session can be had without computing them."""

    key: SuspensionKey
    kind: Preservation
    ready_tokens: int
    promoted: bool = True


@dataclass(frozen=True, slots=True)
class ResumeTicket:
    """Written on resume: rebuild exactly ``[ready_tokens, target_tokens)``, emit nothing, then go on."""

    key: SuspensionKey
    ready_tokens: int
    target_tokens: int


def suspension_key(view: SessionView) -> SuspensionKey:
    """The key of the suspension that ``view`` is in, or would enter now."""
    return SuspensionKey(view.request_id, view.request.generation, view.committed, view.epoch)


def issue_ticket(view: SessionView, release: ReleaseReceipt, preservation: PreservationReceipt, *,
                 allocation_ready: bool, stages_ready: bool) -> ResumeTicket:
    """The conjunction that a resume needs. Raises ``IllegalTransition`` naming the first part that is missing.

    ``target = p + e - 1`` when a token was emitted, else what had been computed of the prompt: the committed frontier.
    """
    key = suspension_key(view)
    if view.state not in (SessionState.SUSPENDED, SessionState.RESUME_PENDING):
        raise IllegalTransition(f"resume of a session that is {view.state.value}: {view.request_id}")
    if release.key != key or preservation.key != key:
        raise IllegalTransition(f"receipt of another generation or epoch: {release.key}, {preservation.key}, not {key}")
    if not release.confirmed:
        raise IllegalTransition(f"release still pending: {view.request_id}")
    if not preservation.promoted:
        raise IllegalTransition(f"promotion still in flight: {view.request_id}")
    if not allocation_ready or not stages_ready:
        raise IllegalTransition(f"allocation or stages not ready: {view.request_id}")
    ready = 0 if preservation.kind is Preservation.FAILED else preservation.ready_tokens
    # Before the first token a prefix that others computed meanwhile may reach past what this session had computed.
    target = max(view.committed, ready) if view.emitted == 0 else view.committed
    if not 0 <= ready <= target:
        raise IllegalTransition(f"ready prefix of {ready} outside [0, {target}]: {view.request_id}")
    return ResumeTicket(key, ready, target)
