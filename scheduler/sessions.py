"""The session table: the one module that applies events to session state.

Everything here mutates, nothing decides.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace

from scheduler.records import (
    ChunkResult, Completion, FinishReason, IllegalTransition, Phase, Request, SessionState, SessionView,
)
from scheduler.resume import PreemptionIntent, ReleaseReceipt, ResumeTicket

MAX_SPENT_GENERATIONS = 65_536  # cancelled ids whose old generations are still refused


class SessionTable:
    """Live sessions: their views, their queue, their output. An ended one leaves a ``Completion`` and is
    forgotten.

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
        self._next_generation: OrderedDict[str, int] = OrderedDict()

    def apply_submission(self, request: Request, now_ms: float) -> SessionView:
        """A new waiting session.

        Raises ``IllegalTransition`` for an id that is live or a generation that is spent.
        """
        request_id = request.request_id
        if request_id in self.views:
            raise IllegalTransition(f"request id is in use: {request_id}")
        if request.generation < self._next_generation.get(request_id, 0):
            raise IllegalTransition(f"generation {request.generation} of {request_id} was cancelled")
        view = SessionView(request, self._submissions, SessionState.WAITING, 0, 0, 0, 0, 0, 0, True, now_ms,
                           None, None)
        self._submissions += 1
        self.outputs[request_id] = []
        self.waiting[request_id] = None
        return self._put(view)

    def apply_entry(self, request_id: str, cached: int, ticket: ResumeTicket | None) -> SessionView:
        """WAITING or SUSPENDED -> RUNNING with ``cached`` rows there; a resume needs the ticket of its epoch.
        """
        view = self.views[request_id]
        if view.state is SessionState.SUSPENDED:
            if ticket is None or (ticket.key.request_id, ticket.key.epoch) != (request_id, view.epoch):
                raise IllegalTransition(f"resume without the ticket of epoch {view.epoch}: {request_id}")
            if ticket.ready_tokens != cached:
                raise IllegalTransition(
                    f"ticket for {ticket.ready_tokens} rows, {cached} are there: {request_id}"
                )
            del self.suspended[request_id], self.releases[request_id]
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

    def apply_chunk(self, item: ChunkResult, now_ms: float) -> SessionView:
        """Progress of one completed chunk."""
        view, computed, token = self.views[item.request_id], item.after, item.token
        first, last, emitted = view.first_emitted_ms, view.last_emitted_ms, view.emitted
        if token is not None:
            self.outputs[item.request_id].append(token)
            emitted, last, first = emitted + 1, now_ms, now_ms if first is None else first
        if view.phase_at(item.before) is not Phase.REBUILD:
            client = view.request.client_id
            self.service[client] = self.service.get(client, 0) + computed - item.before
        return self._put(SessionView(
            view.request, view.index, view.state, emitted, computed, max(view.committed, computed),
            view.cached,
            view.version + 1, view.epoch, view.ready, view.submitted_ms, first, last))

    def apply_preemption(self, intent: PreemptionIntent) -> SessionView:
        """RUNNING -> PREEMPT_PENDING: nothing is free yet, and late results of the old epoch are void."""
        view = self.views[intent.key.request_id]
        if view.state is not SessionState.RUNNING or intent.key.epoch != view.epoch:
            raise IllegalTransition(f"preemption of a session that is {view.state.value}: {intent}")
        del self.running[view.request_id]
        return self._put(replace(view, state=SessionState.PREEMPT_PENDING, epoch=view.epoch + 1,
                                 version=view.version + 1))

    def apply_release(self, receipt: ReleaseReceipt) -> SessionView:
        """PREEMPT_PENDING -> SUSPENDED by a confirmed release of this epoch."""
        view = self.views[receipt.key.request_id]
        if (
            view.state is not SessionState.PREEMPT_PENDING
            or receipt.key.epoch != view.epoch
            or not receipt.confirmed
        ):
            raise IllegalTransition(f"release that does not match the suspension: {receipt}")
        self.releases[view.request_id] = receipt
        self.suspended[view.request_id] = None
        return self._put(replace(view, state=SessionState.SUSPENDED, computed=0, cached=0,
                                 version=view.version + 1))

    def apply_end(self, request_id: str, reason: FinishReason, error: str = "") -> None:
        """Any live state -> its terminal one; exactly one completion per accepted session."""
        view = self.views.pop(request_id)
        for queue in (self.waiting, self.running, self.suspended, self.releases):
            queue.pop(request_id, None)
        generation = view.request.generation
        if reason is FinishReason.CANCELLED:
            self._next_generation[request_id] = generation + 1
            if len(self._next_generation) > MAX_SPENT_GENERATIONS:
                self._next_generation.popitem(last=False)
        output = tuple(self.outputs.pop(request_id))
        self.completions.append(Completion(request_id, generation, output, reason, error))
        self.version += 1

    def finish_reason(self, view: SessionView) -> FinishReason | None:
        """Why the session is over after its latest token, or None."""
        if view.emitted and self.outputs[view.request_id][-1] in view.request.stop_token_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if view.emitted >= view.request.max_tokens else None

    def _put(self, view: SessionView) -> SessionView:
        self.views[view.request.request_id] = view
        self.version += 1
        return view
