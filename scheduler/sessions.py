"""The session table: the one module that applies events to session state. Everything here mutates; nothing decides."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace

from scheduler.records import (
    ChunkResult, Completion, FinishReason, IllegalTransition, Phase, Request, SessionState, SessionView,
)
from scheduler.resume import Preservation, PreservationReceipt, ReleaseReceipt, ResumeTicket, suspension_key

_STATE_OF = {FinishReason.LENGTH: SessionState.FINISHED, FinishReason.STOP: SessionState.FINISHED,
             FinishReason.CANCELLED: SessionState.CANCELLED, FinishReason.FAILED: SessionState.FAILED}


class SessionTable:
    """Live sessions: their views, their queue, their output. An ended session leaves a ``Completion`` and is forgotten.

    Queues are ordered by entry; ``waiting`` gives its head in constant time however long it is.
    """

    def __init__(self) -> None:
        self.views: dict[str, SessionView] = {}
        self.outputs: dict[str, list[int]] = {}
        self.waiting: OrderedDict[str, None] = OrderedDict()
        self.running: OrderedDict[str, None] = OrderedDict()
        self.suspended: OrderedDict[str, None] = OrderedDict()
        self.releases: dict[str, ReleaseReceipt] = {}
        self.completions: list[Completion] = []
        self.service: dict[str, int] = {}
        self.version = 0
        self._submissions = 0
        self._next_generation: dict[str, int] = {}

    def apply_submission(self, request: Request, now_ms: float) -> SessionView:
        """A new waiting session. Raises ``IllegalTransition`` for an id that is live or a generation that is spent."""
        request_id = request.request_id
        if request_id in self.views:
            raise IllegalTransition(f"request id is in use: {request_id}")
        if request.generation < self._next_generation.get(request_id, 0):
            raise IllegalTransition(f"generation {request.generation} of {request_id} was cancelled")
        view = SessionView(request, self._submissions, SessionState.WAITING, 0, 0, 0, 0, 0, 0, True, now_ms, None, None)
        self._submissions += 1
        self.views[request_id] = view
        self.outputs[request_id] = []
        self.waiting[request_id] = None
        self.version += 1
        return view

    def apply_entry(self, request_id: str, cached: int, ticket: ResumeTicket | None) -> SessionView:
        """WAITING or SUSPENDED -> RUNNING with ``cached`` rows shared; a resume needs its ticket."""
        view = self.views[request_id]
        if view.state is SessionState.SUSPENDED:
            if ticket is None or (ticket.key.request_id, ticket.key.epoch) != (request_id, view.epoch):
                raise IllegalTransition(f"resume without the ticket of epoch {view.epoch}: {request_id}")
            if ticket.ready_tokens != cached:
                raise IllegalTransition(f"ticket promises {ticket.ready_tokens} rows, {cached} are there: {request_id}")
            del self.suspended[request_id]
            self.releases.pop(request_id, None)
        elif view.state is SessionState.WAITING:
            del self.waiting[request_id]
        else:
            raise IllegalTransition(f"entry of a session that is {view.state.value}: {request_id}")
        self.running[request_id] = None
        return self._put(replace(view, state=SessionState.RUNNING, computed=cached, cached=cached,
                                 committed=max(view.committed, cached), version=view.version + 1))

    def apply_ready(self, request_id: str, ready: bool) -> None:
        """A foreign owner (a stage, a layer loader) says whether the session's next work can run."""
        view = self.views[request_id]
        if view.ready != ready:
            self._put(replace(view, ready=ready, version=view.version + 1))

    def apply_chunk(self, item: ChunkResult, now_ms: float) -> Phase:
        """Progress of one completed chunk; returns the phase that it was."""
        view = self.views[item.request_id]
        phase, computed, token = view.phase, item.after, item.token
        first, last, emitted = view.first_emitted_ms, view.last_emitted_ms, view.emitted
        if token is not None:
            self.outputs[item.request_id].append(token)
            emitted, last = emitted + 1, now_ms
            first = now_ms if first is None else first
        if phase is not Phase.REBUILD:
            client = view.request.client_id
            self.service[client] = self.service.get(client, 0) + computed - item.before
        self._put(SessionView(view.request, view.index, view.state, emitted, computed, max(view.committed, computed),
                              view.cached, view.version + 1, view.epoch, view.ready, view.submitted_ms, first, last))
        return phase

    def apply_preemption(self, request_id: str) -> SessionView:
        """RUNNING -> PREEMPT_PENDING: nothing is free yet, and late results of the old epoch are void."""
        view = self.views[request_id]
        if view.state is not SessionState.RUNNING:
            raise IllegalTransition(f"preemption of a session that is {view.state.value}: {request_id}")
        del self.running[request_id]
        return self._put(replace(view, state=SessionState.PREEMPT_PENDING, epoch=view.epoch + 1,
                                 version=view.version + 1))

    def apply_release(self, receipt: ReleaseReceipt) -> None:
        """PREEMPT_PENDING -> SUSPENDED by a confirmed release of this epoch."""
        view = self.views[receipt.key.request_id]
        if view.state is not SessionState.PREEMPT_PENDING or receipt.key.epoch != view.epoch or not receipt.confirmed:
            raise IllegalTransition(f"release that does not match the suspension: {receipt}")
        self.releases[view.request_id] = receipt
        self.suspended[view.request_id] = None
        self._put(replace(view, state=SessionState.SUSPENDED, computed=0, cached=0, version=view.version + 1))

    def apply_end(self, request_id: str, reason: FinishReason, error: str = "") -> Completion:
        """Any live state -> its terminal one; exactly one completion per accepted session."""
        view = self.views.pop(request_id)
        for queue in (self.waiting, self.running, self.suspended):
            queue.pop(request_id, None)
        self.releases.pop(request_id, None)
        generation = view.request.generation
        if reason is FinishReason.CANCELLED:
            self._next_generation[request_id] = generation + 1
        completion = Completion(request_id, generation, tuple(self.outputs.pop(request_id)), reason, error)
        self.completions.append(completion)
        self.version += 1
        return completion

    def finish_reason(self, view: SessionView) -> FinishReason | None:
        """Why the session is over after its latest token, or None."""
        if view.emitted and self.outputs[view.request_id][-1] in view.request.stop_token_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if view.emitted >= view.request.max_tokens else None

    def _put(self, view: SessionView) -> SessionView:
        self.views[view.request.request_id] = view
        self.version += 1
        return view


def recompute_receipt(view: SessionView, cached: int) -> PreservationReceipt:
    """Recompute preemption keeps nothing of its own: what is ready is what a resident prefix holds now."""
    kind = Preservation.EXACT if cached >= view.committed > 0 else (
        Preservation.PARTIAL if cached else Preservation.RECOMPUTE)
    return PreservationReceipt(suspension_key(view), kind, cached)
