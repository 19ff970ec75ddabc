"""``vllm_priority``: ``vllm_fcfs`` with a waiting queue ordered by priority
and the least favoured as victim.
"""

from __future__ import annotations

from dataclasses import replace

from scheduler.policies.vllm_fcfs import VllmFcfs
from scheduler.policy.state import SchedulerState
from scheduler.records import PolicyIdentity, SessionView


class VllmPriority(VllmFcfs):
    """Lower numbers are favoured.

    The victim is ``max(running, key=(priority, arrival))``: maybe the requester.
    """

    identity = PolicyIdentity("vllm_priority")
    contract = replace(
        VllmFcfs.contract,
        protected_identity="priority class, within it order of arrival",
        decision="rows of each running request, then of waiting ones by priority; whom to preempt",
        progress="low priorities starve while higher ones keep arriving; nobody preempts the highest",
    )

    def queue_key(self, state: SchedulerState, view: SessionView) -> tuple:
        return (view.request.priority, view.request.arrival_ms, view.index)

    victim_tie_break = "later arrival, then later submission"

    def victim_key(self, state: SchedulerState, view: SessionView) -> tuple:
        return (view.request.priority, view.request.arrival_ms, view.index)
