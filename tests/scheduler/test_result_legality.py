"""Every negative case of a result, and the receipts and tickets of a resume, one change each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from scheduler.legality import validate_result
from scheduler.loop import Flight
from scheduler.records import (
    ChunkResult,
    IllegalTransition,
    IterationResult,
    Request,
    SessionState,
    SessionView,
)
from scheduler.resume import (
    Preservation,
    PreservationReceipt,
    ReleaseReceipt,
    issue_ticket,
    preservation_receipt,
    suspension_key,
)
from tests.scheduler.serving import Serving, request

NOW_MS = 30.0


@pytest.fixture
def flown() -> tuple[Flight, IterationResult]:
    """``d`` decodes, ``f`` ends its prefill, ``p`` is in the middle of its own, ``b`` rebuilds."""
    serving = Serving(cells=200, max_num_batched_tokens=12, max_chunk_tokens=4, prefix_cache=False)
    serving.submit(
        request("d", 2, 9, client_id="x"),
        request("b", 8, 9, client_id="y"),
        request("f", 8, 4),
        request("p", 30, 4, client_id="x"),
    )
    serving.step(2)
    serving.scheduler.preempt("b", serving.now_ms)
    serving.step()
    flight = serving.launch()
    return flight, serving.engine.execute(flight.plan, flight.batch, NOW_MS)


def item(result: IterationResult, name: str) -> ChunkResult:
    return next(chunk for chunk in result.chunks if chunk.request_id == name)


def changed(name: str, **change: int | None) -> Callable[[IterationResult], IterationResult]:
    def mutate(result: IterationResult) -> IterationResult:
        chunks = tuple(
            chunk._replace(**change) if chunk.request_id == name else chunk for chunk in result.chunks
        )
        assert chunks != result.chunks
        return replace(result, chunks=chunks)

    return mutate


def foreign(result: IterationResult) -> IterationResult:
    return replace(result, chunks=(*result.chunks, result.chunks[0]._replace(request_id="gone")))


def twice(result: IterationResult) -> IterationResult:
    return replace(result, chunks=(*result.chunks, result.chunks[0]))


def too_far(result: IterationResult) -> IterationResult:
    return changed("p", after=item(result, "p").after + 1)(result)


def debit(client: str, rows: int) -> Callable[[IterationResult], IterationResult]:
    return lambda result: replace(
        result, debits={**result.debits, client: result.debits.get(client, 0) + rows}
    )


def half_done(result: IterationResult) -> IterationResult:
    """One row of a chunk completed and truly debited: the others are in the engine, and in no book."""
    done = item(result, "p")
    short = changed("p", after=done.before + 1)(result)
    return debit("x", done.before + 1 - done.after)(short)


def left_out(result: IterationResult) -> IterationResult:
    """Nothing is said of a chunk, and nothing debited for it."""
    done = item(result, "p")
    told = tuple(chunk for chunk in result.chunks if chunk is not done)
    return debit("x", done.before - done.after)(replace(result, chunks=told))


NEGATIVE = [
    ("another decision", lambda result: replace(result, decision_id=result.decision_id + 1)),
    ("moves a clock wrongly", lambda result: replace(result, started_ms=NOW_MS - 1)),
    ("moves a clock wrongly", lambda result: replace(result, finished_ms=result.started_ms - 1)),
    ("unplanned work", foreign),
    ("unplanned work", twice),
    ("unplanned work", changed("d", generation=1)),
    ("outside the planned interval", too_far),
    ("outside the planned interval", changed("p", before=0)),
    ("a token is emitted exactly", changed("d", token=None)),
    ("a token is emitted exactly", changed("f", token=None)),
    ("a token is emitted exactly", changed("p", token=7)),
    ("a token is emitted exactly", changed("b", token=7)),
    ("debits are not", debit("y", 1)),
    ("debits are not", debit("x", 1)),
    ("debits are not", debit("x", -1)),
    ("chunk completed in part", half_done),
    ("planned work has no result", left_out),
    ("another epoch", changed("b", epoch=0)),
    ("another epoch", changed("d", epoch=1)),
    ("another state version", lambda result: replace(result, input_version=result.input_version + 1)),
]


def test_true_result_is_accepted_and_charges_no_rebuild(flown: tuple[Flight, IterationResult]) -> None:
    flight, result = flown
    validate_result(flight.plan, result, flight.views, now_ms=NOW_MS)
    assert {chunk.request_id for chunk in result.chunks} == {"d", "b", "f", "p"}
    assert item(result, "b").after > item(result, "b").before
    assert "y" not in result.debits


@pytest.mark.parametrize(
    ("rule", "mutate"), NEGATIVE, ids=[f"{i}-{rule}" for i, (rule, _) in enumerate(NEGATIVE)]
)
def test_result_with_one_change_is_rejected(
    rule: str, mutate: Callable[[IterationResult], IterationResult], flown: tuple[Flight, IterationResult]
) -> None:
    flight, result = flown
    with pytest.raises(IllegalTransition, match=rule):
        validate_result(flight.plan, mutate(result), flight.views, now_ms=NOW_MS)


# -- resume


def suspended(prompt: int, emitted: int, committed: int, epoch: int = 11) -> SessionView:
    asked = Request(request_id="s", prompt=tuple(range(prompt)), max_tokens=20)
    return SessionView(
        asked, 0, SessionState.SUSPENDED, emitted, 0, committed, 0, 9, epoch, True, 0.0, None, None
    )


@pytest.mark.parametrize(
    ("kind", "ready", "target", "rebuild"),
    [
        (Preservation.EXACT, 6, 6, (6, 6)),
        (Preservation.RECOMPUTE, 0, 6, (0, 6)),
        (Preservation.PARTIAL, 4, 7, (4, 7)),
        (Preservation.FAILED, 3, 5, (0, 5)),
    ],
)
def test_ticket_rebuilds_exactly_what_is_not_ready(
    kind: Preservation, ready: int, target: int, rebuild: tuple[int, int]
) -> None:
    view = suspended(prompt=4, emitted=target - 3, committed=target)
    key = suspension_key(view)
    ticket = issue_ticket(
        view,
        ReleaseReceipt(key, True, target),
        PreservationReceipt(key, kind, ready),
        allocation_ready=True,
        stages_ready=True,
    )
    assert (ticket.ready_tokens, ticket.target_tokens) == rebuild
    assert view.limit_at(rebuild[1]) == target + 1  # then one decoded row


@pytest.mark.parametrize(
    ("part", "change"),
    [
        ("not suspended", {"view": {"state": SessionState.RUNNING}}),
        ("not suspended", {"view": {"state": SessionState.PREEMPT_PENDING}}),
        ("another generation, snapshot or epoch", {"release": {"epoch": 10}}),
        ("another generation, snapshot or epoch", {"preservation": {"epoch": 10}}),
        ("another generation, snapshot or epoch", {"release": {"generation": 1}}),
        ("another generation, snapshot or epoch", {"release": {"snapshot": 5}}),
        ("another generation, snapshot or epoch", {"preservation": {"request_id": "t"}}),
        ("release still pending", {"confirmed": False}),
        ("promotion still in flight", {"promoted": False}),
        ("allocation not ready", {"allocation_ready": False}),
        ("stages not ready", {"stages_ready": False}),
        ("ready prefix of 8", {"ready": 8}),
        ("ready prefix of -1", {"ready": -1}),
    ],
)
def test_ticket_needs_every_part(part: str, change: dict) -> None:
    view = suspended(prompt=4, emitted=3, committed=6)
    key = suspension_key(view)
    release = ReleaseReceipt(replace(key, **change.get("release", {})), change.get("confirmed", True), 6)
    preservation = PreservationReceipt(
        replace(key, **change.get("preservation", {})),
        Preservation.PARTIAL,
        change.get("ready", 2),
        change.get("promoted", True),
    )
    with pytest.raises(IllegalTransition, match=part):
        issue_ticket(
            replace(view, **change.get("view", {})),
            release,
            preservation,
            allocation_ready=change.get("allocation_ready", True),
            stages_ready=change.get("stages_ready", True),
        )


def test_ticket_before_the_first_token_takes_what_others_computed() -> None:
    view = suspended(prompt=9, emitted=0, committed=3)
    ticket = issue_ticket(
        view,
        ReleaseReceipt(suspension_key(view), True, 3),
        preservation_receipt(view, 7),
        allocation_ready=True,
        stages_ready=True,
    )
    assert (ticket.ready_tokens, ticket.target_tokens) == (7, 7)


def test_pending_release_frees_nothing_and_is_not_applied() -> None:
    serving = Serving()
    serving.submit(request("s", 4, 4))
    serving.step()
    key = suspension_key(serving.view("s"))
    with pytest.raises(IllegalTransition, match="does not match"):
        serving.scheduler.table.apply_release(ReleaseReceipt(key, False, 4))
    assert serving.view("s").state is SessionState.RUNNING
