"""Preemption as a protocol: intent, release, preservation, ticket; bound by
(request, generation, snapshot, epoch).

The epoch is monotone, so a receipt of an earlier suspension can never satisfy a later one (no ABA).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from scheduler.legality import require
from scheduler.records import PolicyIdentity, PreemptionMode, PreemptionReason, SessionState, SessionView


class Preservation(Enum):
    """What of the computed rows outlived the release."""

    EXACT, PARTIAL, RECOMPUTE, FAILED = "exact", "partial", "recompute", "failed"


@dataclass(frozen=True, slots=True)
class SuspensionKey:
    """Binds every receipt to one suspension of one session."""

    request_id: str
    generation: int
    snapshot: int
    epoch: int


@dataclass(frozen=True, slots=True)
class PreemptionIntent:
    """Release is wished, nothing is free yet: how (``mode``, or ``fallback`` where that cannot be had), down
    to how many rows, why, and by which decision of which policy.
    """

    key: SuspensionKey
    reason: PreemptionReason = PreemptionReason.ASKED
    mode: PreemptionMode = PreemptionMode.RECOMPUTE
    fallback: PreemptionMode = PreemptionMode.RECOMPUTE
    target_rows: int = 0
    policy: PolicyIdentity | None = None
    decision_id: int = 0


@dataclass(frozen=True, slots=True)
class ReleaseReceipt:
    """Written by the memory: ``rows`` are available (``confirmed``), or the release is still pending."""

    key: SuspensionKey
    confirmed: bool
    rows: int


@dataclass(frozen=True, slots=True)
class PreservationReceipt:
    """Written by the memory: the first ``ready_tokens`` rows can be had without
    computing them, once promoted.
    """

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


def preservation_receipt(view: SessionView, ready_tokens: int) -> PreservationReceipt:
    """What recompute preemption can promise: rows that are in the pool for other reasons."""
    kind = Preservation.PARTIAL if ready_tokens else Preservation.RECOMPUTE
    kind = Preservation.EXACT if ready_tokens >= view.committed > 0 else kind
    return PreservationReceipt(suspension_key(view), kind, ready_tokens)


def issue_ticket(
    view: SessionView,
    release: ReleaseReceipt,
    preservation: PreservationReceipt,
    *,
    allocation_ready: bool,
    stages_ready: bool,
) -> ResumeTicket:
    """The conjunction that a resume needs. Raises ``IllegalTransition`` naming
    the first part that is missing.

    The target is the committed frontier: ``p + e - 1`` once a token was emitted, else what was computed of
    the prompt, or what others have computed of it meanwhile.
    """
    key, name = suspension_key(view), view.request_id
    require(view.state in (SessionState.SUSPENDED, SessionState.RESUME_PENDING), "not suspended", name)
    same = release.key == key == preservation.key
    require(same, "receipt of another generation, snapshot or epoch", release)
    require(release.confirmed, "release still pending", name)
    require(preservation.promoted, "promotion still in flight", name)
    require(allocation_ready, "allocation not ready", name)
    require(stages_ready, "stages not ready", name)
    ready = 0 if preservation.kind is Preservation.FAILED else preservation.ready_tokens
    target = view.committed if view.emitted else max(view.committed, ready)
    require(0 <= ready <= target, f"ready prefix of {ready} outside [0, {target}]", name)
    return ResumeTicket(key, ready, target)
