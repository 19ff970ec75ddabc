"""Each transition between queues happens by its own receipt, and by nothing else."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scheduler.records import FinishReason, IllegalTransition, SessionState
from scheduler.resume import (
    PreemptionIntent,
    ReleaseReceipt,
    ResumeTicket,
    issue_ticket,
    preservation_receipt,
    suspension_key,
)
from scheduler.sessions import SessionTable
from tests.scheduler.serving import request

NAME = "s"
QUEUES = (
    SessionState.WAITING,
    SessionState.RUNNING,
    SessionState.PREEMPT_PENDING,
    SessionState.SUSPENDED,
)


def table_in(state: SessionState) -> SessionTable:
    """One session that was taken to ``state`` step by step."""
    table = SessionTable()
    table.apply_submission(request(NAME, 4, 3), 0.0)
    if state is not SessionState.WAITING:
        table.apply_entry(NAME, 0, None)
    if state in (SessionState.PREEMPT_PENDING, SessionState.SUSPENDED):
        table.apply_preemption(PreemptionIntent(suspension_key(table.views[NAME])))
    if state is SessionState.SUSPENDED:
        table.apply_release(release(table))
    return table


def release(table: SessionTable, *, confirmed: bool = True) -> ReleaseReceipt:
    return ReleaseReceipt(suspension_key(table.views[NAME]), confirmed, 0)


def ticket(table: SessionTable) -> ResumeTicket:
    view = table.views[NAME]
    preserved = preservation_receipt(view, 0)
    return issue_ticket(view, table.releases[NAME], preserved, allocation_ready=True, stages_ready=True)


def queues_of(table: SessionTable) -> list[str]:
    return [name for name in ("waiting", "running", "suspended") if NAME in getattr(table, name)]


@pytest.mark.parametrize(
    ("state", "queues"),
    [*zip(QUEUES, (["waiting"], ["running"], [], ["suspended"]), strict=True)],
    ids=lambda value: value.value if isinstance(value, SessionState) else "",
)
def test_session_is_in_the_queue_of_its_state_and_in_no_other(state: SessionState, queues: list[str]) -> None:
    table = table_in(state)
    assert table.views[NAME].state is state
    assert queues_of(table) == queues


def test_suspended_session_runs_again_by_the_ticket_of_its_epoch() -> None:
    table = table_in(SessionState.SUSPENDED)
    table.apply_entry(NAME, 0, ticket(table))
    assert table.views[NAME].state is SessionState.RUNNING
    assert (queues_of(table), table.releases) == (["running"], {})


def test_suspended_session_never_runs_without_the_ticket_of_its_epoch() -> None:
    table = table_in(SessionState.SUSPENDED)
    right = ticket(table)
    stale = replace(right, key=replace(right.key, epoch=right.key.epoch - 1))
    for wrong in (None, stale):
        with pytest.raises(IllegalTransition, match="without the ticket of epoch 1"):
            table.apply_entry(NAME, 0, wrong)
    with pytest.raises(IllegalTransition, match="not for 1 rows"):
        table.apply_entry(NAME, 1, right)
    assert queues_of(table) == ["suspended"]


@pytest.mark.parametrize("state", [SessionState.RUNNING, SessionState.PREEMPT_PENDING])
def test_only_waiting_and_suspended_sessions_enter(state: SessionState) -> None:
    with pytest.raises(IllegalTransition, match="does not wait"):
        table_in(state).apply_entry(NAME, 0, None)


@pytest.mark.parametrize("state", [state for state in QUEUES if state is not SessionState.RUNNING])
def test_only_a_running_session_is_preempted(state: SessionState) -> None:
    table = table_in(state)
    with pytest.raises(IllegalTransition, match="what does not run"):
        table.apply_preemption(PreemptionIntent(suspension_key(table.views[NAME])))


def test_preemption_of_an_earlier_epoch_is_refused() -> None:
    table = table_in(SessionState.SUSPENDED)
    table.apply_entry(NAME, 0, ticket(table))
    early = replace(suspension_key(table.views[NAME]), epoch=0)
    with pytest.raises(IllegalTransition, match="what does not run"):
        table.apply_preemption(PreemptionIntent(early))


@pytest.mark.parametrize("state", [state for state in QUEUES if state is not SessionState.PREEMPT_PENDING])
def test_only_a_pending_preemption_is_released(state: SessionState) -> None:
    table = table_in(state)
    with pytest.raises(IllegalTransition, match="does not match the suspension"):
        table.apply_release(release(table))


def test_pending_preemption_stays_until_its_own_release_is_confirmed() -> None:
    table = table_in(SessionState.PREEMPT_PENDING)
    late = replace(release(table), key=replace(release(table).key, epoch=0))
    for wrong in (release(table, confirmed=False), late):
        with pytest.raises(IllegalTransition, match="does not match the suspension"):
            table.apply_release(wrong)
    assert (table.views[NAME].state, table.releases) == (SessionState.PREEMPT_PENDING, {})
    table.apply_release(release(table))
    assert table.views[NAME].state is SessionState.SUSPENDED


@pytest.mark.parametrize("state", QUEUES)
def test_session_is_cancelled_out_of_every_queue_and_its_generation_is_spent(state: SessionState) -> None:
    table = table_in(state)
    table.apply_end(NAME, FinishReason.CANCELLED)
    assert (table.views, queues_of(table), table.releases) == ({}, [], {})
    assert [end.reason for end in table.completions] == [FinishReason.CANCELLED]
    with pytest.raises(IllegalTransition, match="generation was cancelled"):
        table.apply_submission(request(NAME, 4, 3), 0.0)
