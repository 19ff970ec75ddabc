"""``vtc``: virtual token counters (Fairness in Serving Large Language Models, OSDI 2024, Algorithm 2)."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from scheduler.policy.base import Policy
from scheduler.policy.contract import CELLS, HIDDEN_LENGTH, TOKENS, Contract
from scheduler.policy.state import SchedulerState
from scheduler.records import PolicyIdentity, SessionState, SessionView

MAX_DEPARTED = 1024  # clients that are remembered although they have no request


@dataclass(frozen=True, slots=True)
class Counters:
    """Weighted service by client as the algorithm charges it, and who has waiting requests.

    ``charged`` is what was charged ahead of completion and is not yet settled, by request (``vtc_completed``
    only). Of clients without a live request the ``MAX_DEPARTED`` with the largest counters are remembered: a
    smaller one is what the lift makes up for soonest.
    """

    counters: Mapping[str, int] = field(default_factory=dict)
    waiting: Mapping[str, int] = field(default_factory=dict)
    last_left: str | None = None
    done: Mapping[str, int] = field(default_factory=dict)
    live: Mapping[str, int] = field(default_factory=dict)
    charged: Mapping[str, int] = field(default_factory=dict)

    def charge(self, client: str, amount: int) -> Counters:
        return replace(self, counters={**self.counters, client: self.counters.get(client, 0) + amount})

    def lifted(self, client: str) -> Counters:
        """A client without waiting requests becomes active: no credit for the time when it wanted nothing."""
        active = [self.counters.get(other, 0) for other, count in self.waiting.items() if count]
        if self.waiting.get(client, 0):
            floor = 0
        elif active:
            floor = min(active)
        else:
            floor = 0 if self.last_left is None else self.counters.get(self.last_left, 0)
        counter = max(self.counters.get(client, 0), floor)
        return replace(
            self,
            counters={**self.counters, client: counter},
            waiting={**self.waiting, client: self.waiting.get(client, 0) + 1},
            live={**self.live, client: self.live.get(client, 0) + 1},
        )

    def ended(self, client: str) -> Counters:
        """One request of the client is over; a client that has no other one has departed."""
        live = {**self.live, client: self.live[client] - 1}
        waiting = self.waiting
        if not live[client]:
            del live[client]
            waiting = {name: count for name, count in waiting.items() if name != client}
        counters, done = dict(self.counters), dict(self.done)
        departed = [name for name in counters if name not in live and name != self.last_left]
        for name in sorted(departed, key=lambda name: (counters[name], name))[: -MAX_DEPARTED or None]:
            del counters[name]
            done.pop(name, None)
        return replace(self, counters=counters, waiting=waiting, done=done, live=live)

    def left(self, client: str) -> Counters:
        """One request of the client stops waiting."""
        count = self.waiting[client] - 1
        return replace(
            self, waiting={**self.waiting, client: count}, last_left=self.last_left if count else client
        )


class Vtc(Policy):
    """The earliest waiting request of the active client with the smallest counter enters, while it fits.

    Charges ``input_weight * prompt tokens`` when a request enters and
    ``output_weight`` for every output token.
    """

    identity = PolicyIdentity("vtc")
    contract = Contract(
        scheduling_unit="one step; the choice is which client's request enters",
        protected_identity="client",
        visible_state=("counters", "clients with waiting requests", "prompt lengths", "available rows"),
        decision="whose request enters next",
        unknown_future=HIDDEN_LENGTH + ": output is charged as it comes",
        objective="equal weighted service of backlogged clients",
        metric="w_p * input tokens + w_q * output tokens by client",
        denominator="the interval in which both clients are continuously backlogged",
        assumptions=(
            "both clients backlogged for the whole interval",
            "lift and charging as in Algorithm 2",
            "work conservation",
            "no preemption",
            "finite L_input and M",
        ),
        foreign_owners=(CELLS, TOKENS),
        not_reproduced=(
            "the paper's serving system",
            "the bound 2 max(w_p L_input, w_q M) outside its premises: a "
            "token budget that leaves a decode out of a step, or a preemption, voids it",
        ),
        starvation_free=True,
        progress="every client that waits: the smallest counter enters next, and served ones grow",
        source="VTC, Algorithm 2 and Theorem 4.4; M5.2 0x09A",
    )

    def __init__(self, *, input_weight: int = 1, output_weight: int = 2, **seams: Any) -> None:
        super().__init__(**seams)
        if input_weight < 0 or output_weight < 0:
            raise ValueError(f"service weights {input_weight} and {output_weight}: must not be negative")
        self.input_weight, self.output_weight = input_weight, output_weight

    def start(self) -> Counters:
        return Counters()

    def observe(self, memory: Counters, event: str, view: SessionView, now_ms: float, amount: int = 0) -> Any:
        client = view.request.client_id
        if event == "submitted":
            return memory.lifted(client)
        if event == "admitted":
            return memory.left(client).charge(client, self.input_weight * view.num_prompt_tokens)
        if event == "emitted":
            return memory.charge(client, self.output_weight)
        if event in ("finished", "cancelled", "failed"):
            waited = view.state is SessionState.WAITING
            return (memory.left(client) if waited else memory).ended(client)
        return memory

    def waiting_order(self, state: SchedulerState) -> Iterator[SessionView]:
        """Next the earliest of the least served client; taking the one after it means that it has entered."""
        counters = dict(state.policy_memory.counters)
        queues: dict[str, deque[SessionView]] = {}
        for request_id in state.waiting:
            view = state.views[request_id]
            if view.ready:
                queues.setdefault(view.request.client_id, deque()).append(view)
        while queues:
            client = min(queues, key=lambda name: (counters[name], name))
            view = queues[client].popleft()
            if not queues[client]:
                del queues[client]
            yield view
            counters[client] += self.entry_charge(state, view)

    def entry_charge(self, state: SchedulerState, view: SessionView) -> int:
        """What a request is charged when it enters."""
        return self.input_weight * view.num_prompt_tokens
