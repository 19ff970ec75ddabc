"""The session table: the one module that applies events to session state. It mutates and decides nothing."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace

from scheduler.legality import require
from scheduler.records import (
    ChunkResult,
    Completion,
    FinishReason,
    IllegalTransition,
    Phase,
    Request,
    SessionState,
    SessionView,
)
from scheduler.resume import PreemptionIntent, ReleaseReceipt, ResumeTicket

MAX_SPENT_GENERATIONS = 4096  # cancelled ids whose old generations are still refused
MAX_DEPARTED_CLIENTS = 1024  # clients without a live session whose service is remembered, the latest


class SessionTable:
    """Live sessions: their views, their queue, their output. An ended one leaves a
    ``Completion`` and is forgotten.

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
        self.service: dict[str, int] = {}  # completed rows by client
        self._live: dict[str, int] = {}  # sessions by client
        self._departed: OrderedDict[str, None] = OrderedDict()  # clients with service and no session
        self.version = self._submissions = 0
        self._next_generation: OrderedDict[str, int] = OrderedDict()

    def apply_submission(self, request: Request, now_ms: float) -> SessionView:
        """A new waiting session. Raises ``IllegalTransition`` for an id that is live
        or a generation that is spent.
        """
        name = request.request_id
        require(name not in self.views, "request id is in use", name)
        require(request.generation >= self._next_generation.get(name, 0), "generation was cancelled", request)
        self._submissions += 1
        client = request.client_id
        self._live[client] = self._live.get(client, 0) + 1
        self._departed.pop(client, None)
        self.outputs[name] = []
        self.waiting[name] = None
        return self._put(
            SessionView(
                request,
                self._submissions - 1,
                SessionState.WAITING,
                0,
                0,
                0,
                0,
                0,
                0,
                True,
                now_ms,
                None,
                None,
            )
        )

    def apply_entry(self, name: str, cached: int, ticket: ResumeTicket | None) -> SessionView:
        """WAITING or SUSPENDED -> RUNNING with ``cached`` rows there; a resume
        needs the ticket of its epoch.
        """
        view = self.views[name]
        if view.state is SessionState.SUSPENDED:
            if ticket is None or (ticket.key.request_id, ticket.key.epoch) != (name, view.epoch):
                raise IllegalTransition(f"resume without the ticket of epoch {view.epoch}: {name}")
            require(ticket.ready_tokens == cached, f"the ticket is not for {cached} rows", ticket)
            del self.suspended[name], self.releases[name]
        else:
            require(view.state is SessionState.WAITING, "entry of a session that does not wait", view)
            del self.waiting[name]
        self.running[name] = None
        return self._put(
            replace(
                view,
                state=SessionState.RUNNING,
                computed=cached,
                cached=cached,
                committed=max(view.committed, cached),
                version=view.version + 1,
            )
        )

    def apply_ready(self, name: str, ready: bool) -> None:
        """A foreign owner (a stage, a layer loader) says whether the session's next work can run."""
        view = self.views[name]
        if view.ready != ready:
            self._put(replace(view, ready=ready, version=view.version + 1))

    def apply_chunk(self, item: ChunkResult, phase: Phase, now_ms: float) -> SessionView:
        """Progress of one completed chunk."""
        view, computed = self.views[item.request_id], item.after
        first, last, emitted = view.first_emitted_ms, view.last_emitted_ms, view.emitted
        if item.token is not None:
            self.outputs[item.request_id].append(item.token)
            emitted, last, first = emitted + 1, now_ms, now_ms if first is None else first
        if phase is not Phase.REBUILD:
            client = view.request.client_id
            self.service[client] = self.service.get(client, 0) + computed - item.before
        committed = max(view.committed, computed)
        return self._put(
            SessionView(
                view.request,
                view.index,
                view.state,
                emitted,
                computed,
                committed,
                view.cached,
                view.version + 1,
                view.epoch,
                view.ready,
                view.submitted_ms,
                first,
                last,
            )
        )

    def apply_preemption(self, intent: PreemptionIntent) -> SessionView:
        """RUNNING -> PREEMPT_PENDING: nothing is free yet, and late results of the old epoch are void."""
        view = self.views[intent.key.request_id]
        running = view.state is SessionState.RUNNING and intent.key.epoch == view.epoch
        require(running, "preemption of what does not run", intent)
        del self.running[view.request_id]
        return self._put(
            replace(view, state=SessionState.PREEMPT_PENDING, epoch=view.epoch + 1, version=view.version + 1)
        )

    def apply_release(self, receipt: ReleaseReceipt) -> SessionView:
        """PREEMPT_PENDING -> SUSPENDED by a confirmed release of this epoch."""
        view = self.views[receipt.key.request_id]
        pending = view.state is SessionState.PREEMPT_PENDING and receipt.key.epoch == view.epoch
        require(pending and receipt.confirmed, "release that does not match the suspension", receipt)
        self.releases[view.request_id] = receipt
        self.suspended[view.request_id] = None
        return self._put(
            replace(view, state=SessionState.SUSPENDED, computed=0, cached=0, version=view.version + 1)
        )

    def apply_end(self, name: str, reason: FinishReason, error: str = "") -> None:
        """Any live state -> its terminal one; exactly one completion per accepted session."""
        view = self.views.pop(name)
        for queue in (self.waiting, self.running, self.suspended, self.releases):
            queue.pop(name, None)
        self._apply_departure(view.request.client_id)
        generation = view.request.generation
        if reason is FinishReason.CANCELLED:
            self._next_generation[name] = generation + 1
            if len(self._next_generation) > MAX_SPENT_GENERATIONS:
                self._next_generation.popitem(last=False)
        self.completions.append(Completion(name, generation, tuple(self.outputs.pop(name)), reason, error))
        self.version += 1

    def _apply_departure(self, client: str) -> None:
        """One session of the client is over; of those that have none left only the latest are remembered."""
        self._live[client] -= 1
        if self._live[client]:
            return
        del self._live[client]
        if client in self.service:
            self._departed[client] = None
        if len(self._departed) > MAX_DEPARTED_CLIENTS:
            del self.service[self._departed.popitem(last=False)[0]]

    def finish_reason(self, view: SessionView) -> FinishReason | None:
        """Why the session is over after its latest token, or None."""
        if view.emitted and self.outputs[view.request_id][-1] in view.request.stop_token_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if view.emitted >= view.request.max_tokens else None

    def _put(self, view: SessionView) -> SessionView:
        self.views[view.request.request_id] = view
        self.version += 1
        return view
