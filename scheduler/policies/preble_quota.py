"""``preble_quota``: waiting requests grouped by cached fraction, picked in proportion
(shaped like Preble's local policy).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

from scheduler.policy.base import Policy
from scheduler.policy.contract import CELLS, FORECAST, HIDDEN_LENGTH, TOKENS, Contract
from scheduler.policy.state import SchedulerState
from scheduler.records import PolicyIdentity, SessionView


class PrebleQuota(Policy):
    """Group g of n holds the requests whose cached fraction of the prompt is in ``[1 - (g + 1)/n, 1 - g/n)``.

    A cycle gives group g ``quotas[g]`` picks, groups with more of their prompt cached first; a group
    without waiting requests gives its turn away, and a cycle begins when no waiting group has picks
    left. So no group is suppressed.
    """

    identity = PolicyIdentity("preble_quota")
    contract = Contract(
        scheduling_unit="one step; the choice is which group's request enters",
        protected_identity="cache-hit group",
        visible_state=("cached prompt tokens of waiting requests", "picks left in the cycle"),
        decision="whose request enters next",
        unknown_future=f"{HIDDEN_LENGTH}: {FORECAST}",
        objective="use what is cached without suppressing what is not",
        metric="picks by group",
        denominator="picks of one cycle",
        assumptions=("a resident prefix is found by exact identity",),
        foreign_owners=(CELLS, TOKENS, "resident prefixes and their eviction: the memory"),
        not_reproduced=(
            "Preble's distributed placement",
            "its priority groups and their weights",
            "any service bound between clients of one group",
        ),
        starvation_free=True,
        progress="every group, in each cycle; within a group, order of submission",
        source="Preble, local policy; M5.2 0x09A",
    )

    def __init__(self, *, quotas: tuple[int, ...] = (2, 1), **seams: Any) -> None:
        super().__init__(**seams)
        self.quotas = tuple(quotas)
        if not self.quotas or min(self.quotas) < 1:
            raise ValueError(f"quotas {quotas}: every group needs at least 1")

    def start(self) -> tuple[int, ...]:
        return self.quotas

    def observe(
        self, memory: tuple[int, ...], event: str, view: SessionView, now_ms: float, amount: int = 0
    ) -> Any:
        if event != "admitted":
            return memory
        return self._picked(memory, self.group(view.cached, view.num_prompt_tokens))

    def group(self, cached: int, prompt_tokens: int) -> int:
        """Group of a request: 0 has the most of its prompt cached."""
        groups = len(self.quotas)
        return groups - 1 - min(cached * groups // prompt_tokens, groups - 1)

    def _picked(self, left: tuple[int, ...], group: int) -> tuple[int, ...]:
        before = left if left[group] else self.quotas
        return tuple(count - (index == group) for index, count in enumerate(before))

    def waiting_order(self, state: SchedulerState) -> Iterator[SessionView]:
        left = state.policy_memory
        queues: dict[int, deque[SessionView]] = {group: deque() for group in range(len(self.quotas))}
        for request_id in state.waiting:
            view = state.views[request_id]
            if view.ready:
                queues[self.group(state.memory.cached_tokens(view), view.num_prompt_tokens)].append(view)
        while any(queues.values()):
            nonempty = [group for group, queue in queues.items() if queue]
            group = next((group for group in nonempty if left[group]), nonempty[0])
            yield queues[group].popleft()
            left = self._picked(left, group)
