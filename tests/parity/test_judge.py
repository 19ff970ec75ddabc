"""Stock placement: a changed token is excused by the noise of other sessions, and never if it moved far."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from parity.cases.strategies import landmark
from parity.checkers.checker import Expectation
from parity.checkers.identity import Comparison
from parity.checkers.noise import Change, weigh_noise
from parity.history import Run
from parity.records import Outcome, Verdict, outcome_from_data, outcome_to_data
from parity.run.judge import count_changes
from scheduler.limits import Layout

CASE = landmark("llama", Layout.STOCK)
ROW = np.random.default_rng(0).normal(size=200).astype(np.float32)
SPREAD = float(ROW.std())


def changes_of(moved: dict[int, list[float]], *, margin: float = 3.0) -> dict[int, Change]:
    """Sessions whose rows moved so far, in shares of the spread; session 0 changed its last token."""
    rows = {s: [ROW + np.float32(share * SPREAD) for share in shares] for s, shares in moved.items()}
    comparisons = []
    for session, shares in moved.items():
        first = next((step for step, share in enumerate(shares) if share), None)
        last = len(shares) - 1 if session == 0 else None
        comparisons.append(Comparison(session, first, last, False))
    alone = SimpleNamespace(logits=lambda session: [ROW] * 9, margin=lambda session, step: margin * SPREAD)
    expectation = Expectation({}, alone, Run(CASE))
    return weigh_noise(Run(CASE, logits=rows), expectation, comparisons).changes


def test_row_that_moved_far_is_not_excused_by_itself() -> None:
    few = {0: [0.0, 1.5, 1.5], 1: [0.01, 0.01]}  # logits go wrong one token before the token does
    assert changes_of(few) == {0: Change.UNEXPLAINED}
    assert changes_of({0: [0.0, 1.5, 1.5]}) == {0: Change.UNEXPLAINED}
    assert changes_of({0: [0.0, 0.4, 0.4], 1: [0.01, 0.01]}) == {0: Change.UNEXPLAINED}


def test_row_that_moved_far_is_not_excused_by_others_that_did_too() -> None:
    assert changes_of({0: [0.0, 1.5, 1.5], 1: [1.5] * 5, 2: [1.5] * 5}) == {0: Change.UNEXPLAINED}


@pytest.mark.parametrize(
    ("moved", "margin", "change"),
    [
        ([0.02, 0.02], 0.03, Change.NEAR_TIE),
        ([0.02, 0.9], 3.0, Change.CARRIED_ON),
        ([0.4, 0.9], 3.0, Change.CARRIED_ON),  # others move so far that this is usual here
    ],
)
def test_rounding_is_told_by_margin(moved: list[float], margin: float, change: Change) -> None:
    assert changes_of({0: moved, 1: [0.05, 0.05]}, margin=margin) == {0: change}


def test_changed_tokens_come_out_of_the_worker_by_class() -> None:
    case = replace(CASE, sessions=CASE.sessions[:1], faults=())
    outcome = Outcome(case=case, verdict=Verdict.PASS, changes=count_changes({0: Change.NEAR_TIE}))
    back = outcome_from_data(case, json.loads(json.dumps(outcome_to_data(outcome))))
    assert back.changes == {"near-tie": 1}
