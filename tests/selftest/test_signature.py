"""Failures are one kind or two: different faults are stored as different cases, one fault as one."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from parity.campaign.campaign import Found, Plan, Tally, keep_failures
from parity.cases.shrink import fault_signature, is_same_fault
from parity.mutants import cases, find_mutant, sharing_cases
from parity.mutants.mutant import Reach
from parity.records import Case, Divergence, Outcome, Session, Verdict
from parity.run.runner import run_exact_case

OVERSHARED, NOT_REPLAYED = "prefix_shared_one_token_too_far", "replay_without_generated_tokens"
PLAN = Plan(families=("llama",), exact=True)


def with_company(case: Case) -> Case:
    """The case beside a stranger that changes which traits its failure has, and nothing about the fault."""
    stranger = Session(prompt=tuple(range(200, 209)), max_tokens=9, arrival_step=2)
    return replace(case, sessions=(*case.sessions, stranger), max_num_batched_tokens=5)


def failures_of(*found: Case) -> Tally:
    """What a campaign that met these failing cases would have counted."""
    tally = Tally()
    for number, case in enumerate(found):
        outcome = run_exact_case(case)
        assert outcome.verdict is Verdict.FAIL
        signature = list(fault_signature(outcome))
        failure = {"case": case.to_json(), "signature": signature, "text": "", "stderr": outcome.stderr}
        answer = {"cases": 1, "sessions": outcome.sessions, "marks": {}, "pairs": {}, "failures": [failure]}
        tally.add({"number": number, **answer})
    return tally


def test_two_faults_are_stored_as_two_cases_and_each_once(tmp_path: Path) -> None:
    shared, preempted = sharing_cases.shared_prefix("llama"), cases.preempted("llama")
    with ExitStack() as stack:
        for name in (OVERSHARED, NOT_REPLAYED):
            stack.enter_context(find_mutant(name).plant(Reach()))
        tally = failures_of(shared, preempted, with_company(shared), with_company(preempted))
        assert len(tally.found) > 2  # before they are small they look different
        keep_failures(tally, PLAN, tmp_path)
    assert [found.count for found in tally.found.values()] == [2, 2]
    assert sorted(found.path for found in tally.found.values()) == sorted(map(str, tmp_path.iterdir()))
    assert len({found.path for found in tally.found.values()}) == 2


def divergence(**changes: object) -> Divergence:
    plain = {
        "session": 0, "step": 0, "scheduler_step": 3, "expected_token": 1, "actual_token": 2, "margin": 0.5,
        "distance": 3.0, "neighbours": (), "chunks": ((0, 5),), "cells": (1, 2, 3, 4, 5),
    }  # fmt: skip
    return Divergence(**{**plain, **changes})


def signature_of(*divergences: Divergence, family: str = "llama") -> tuple[str, ...]:
    case = cases.mixed(family)
    return fault_signature(Outcome(case=case, verdict=Verdict.FAIL, divergences=divergences))


@pytest.mark.parametrize(
    "other",
    [
        {"step": 2},
        {"distance": 1e-5},
        {"neighbours": (1,)},
        {"chunks": ((3, 5),)},
        {"chunks": ((0, 3), (3, 5))},
        {"chunks": ((0, 5), (0, 7))},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_divergences_of_other_traits_are_other_failures(other: dict) -> None:
    assert signature_of(divergence(**other)) != signature_of(divergence())


def test_divergence_is_signed_by_the_session_that_went_wrong_first() -> None:
    follower = divergence(session=1, scheduler_step=9, step=4, neighbours=(0,))
    assert signature_of(follower, divergence()) == signature_of(divergence())
    assert signature_of(divergence(), family="gemma2") != signature_of(divergence())


def test_smaller_case_may_lose_a_trait_and_never_gets_one() -> None:
    plain, shared = signature_of(divergence()), signature_of(divergence(chunks=((3, 5),)))
    assert is_same_fault(shared, plain) and not is_same_fault(plain, shared)
    assert not is_same_fault(plain, ()) and not is_same_fault(plain, ("crash", "#"))
    assert is_same_fault(("crash", "#"), ("crash", "#"))


def test_what_a_dying_worker_said_is_kept_beside_the_case(tmp_path: Path) -> None:
    said = "GGML_ASSERT(cell.has_seq_id(seq_id)) failed"
    case = cases.mixed("llama")  # passes when it runs again, so nothing else is said
    tally = Tally(found={("crash", "#"): Found(("crash", "#"), case, "crash: #", stderr=said)})
    keep_failures(tally, PLAN, tmp_path)
    (found,) = tally.found.values()
    assert Path(found.path).with_suffix(".stderr.txt").read_text() == said
    assert "not when run again" in found.text
