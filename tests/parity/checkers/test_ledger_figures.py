"""Published figures and claims: one denominator each, observed premises."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parity.checkers.claims import BoundClaim, claim_vtc_bound
from parity.checkers.outcomes import DENOMINATORS, End, Figure, ledger_of, served_sessions
from parity.records import Fault, FaultKind
from parity.run.runner import replay
from parity.suites.policies import busy_case
from scheduler.policy.cost import ExclusiveCost
from scheduler.records import FinishReason, ServiceLevel
from tests.parity.checkers.test_ledgers import served

# -----------------------------------------------------------------------------------------------------------


def test_a_completion_conditioned_figure_shown_as_offered_is_refused() -> None:
    with pytest.raises(ValueError, match="offered_attainment is counted over offered"):
        Figure(name="offered_attainment", count=122, over=122, denominator="completed")


@pytest.mark.parametrize("name", sorted(DENOMINATORS))
def test_every_figure_has_one_denominator(name: str) -> None:
    ledger = ledger_of([served((1.0,)), served((), End.REJECTED), served((2.0,), End.OPEN)], window_ms=500.0)
    figure = ledger.figure(name)
    assert figure.denominator == DENOMINATORS[name]
    for other in {*DENOMINATORS.values()} - {figure.denominator}:
        with pytest.raises(ValueError):
            replace(figure, denominator=other)


def test_three_attainments_and_four_rates_differ_in_their_denominators() -> None:
    cohort = [
        served((1.0, 2.0)),
        served((9.0,), slo=ServiceLevel(ttft_ms=1.0)),
        served((), End.REJECTED),
        served((1.0,), End.OPEN),
    ]
    values = {name: figure.value for name, figure in ledger_of(cohort, window_ms=2000.0).figures().items()}
    assert {name: str(value) for name, value in values.items()} == {
        "offered_attainment": "1/4",
        "accepted_attainment": "1/3",
        "completed_attainment": "1/2",
        "offered_rate": "2",
        "request_throughput": "1",
        "request_goodput": "1/2",
        "token_throughput": "2",
        "token_goodput": "1",
    }


def test_a_fraction_of_nothing_is_undefined() -> None:
    ledger = ledger_of([served((), End.REJECTED)], window_ms=1.0)
    assert ledger.figure("completed_attainment").value is None
    assert ledger.figure("offered_attainment").value == 0


@given(st.lists(st.sampled_from(list(End)), max_size=30), st.sampled_from([None, 1.0]))
def test_outcomes_always_close(ends: list[End], limit: float | None) -> None:
    cohort = [served((2.0,), end, ServiceLevel(ttft_ms=limit)) for end in ends]
    ledger = ledger_of(cohort, window_ms=1.0)
    assert ledger.offered == ledger.valid + ledger.missed + ledger.rejected + ledger.open == len(ends)
    assert ledger.completed == ends.count(End.COMPLETED)
    with pytest.raises(ValueError, match="do not close"):
        replace(ledger, offered=len(ends) + 1)


# -- claims
#


def test_a_theorem_without_its_premises_is_refused() -> None:
    claim = claim_vtc_bound(
        replay(busy_case("fcfs")).run,
        "a",
        "b",
        start_ms=0.0,
        stop_ms=100.0,
        max_input_tokens=99,
        max_running_tokens=999,
        input_weight=1,
        output_weight=2,
    )
    assert claim.premises["algorithm"] is False and claim.bound is None
    with pytest.raises(ValueError, match="without its premises: algorithm"):
        replace(claim, bound=16)
    with pytest.raises(ValueError, match="incomplete list"):
        BoundClaim(premises={}, gap=0, bound=16)


def test_a_cancelled_session_is_missed_and_a_window_that_closes_early_leaves_sessions_open() -> None:
    faults = (Fault(kind=FaultKind.CANCEL, step=6, session=1),)
    run = replay(busy_case("fcfs", faults=faults)).run
    assert run.completions[1].reason is FinishReason.CANCELLED
    whole = ledger_of(served_sessions(run), window_ms=1e6)
    early = ledger_of(served_sessions(run, until_ms=100.0), window_ms=100.0)
    assert (whole.cancelled, whole.open) == (1, 0)
    assert early.open > 0 and early.emitted_tokens < whole.emitted_tokens


def test_the_cost_model_refuses_nonsense() -> None:
    for bad in ((0.0, 1), (10.0, 0), (float("nan"), 1)):
        with pytest.raises(ValueError):
            ExclusiveCost(*bad)
