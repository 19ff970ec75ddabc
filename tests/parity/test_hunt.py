"""The hunt finds what it was made for, and is red where it proves nothing."""

from __future__ import annotations

from collections import Counter

import pytest

from parity.campaign.hunt import Hunt, draw_case, judge_hunted, run_hunt
from parity.checkers.marks import POLICY_MATTERED
from parity.errors import UsageError
from parity.mutants import find_mutant
from parity.mutants.mutant import Reach
from parity.records import Outcome, Verdict
from scheduler.policies import policy_names


def test_every_contract_holds_over_generated_workloads() -> None:
    """All policies, memory classes, layouts, tight and roomy, with drawn options and faults."""
    policies = policy_names()
    hunt = run_hunt(range(40 * len(policies)))
    assert [outcome.problems for outcome in hunt.failures] == []
    assert hunt.cases == Counter(dict.fromkeys(policies, 40))
    assert len(hunt.kinds) == 15, "five families in three layouts"
    assert hunt.missing() == [] and hunt.verdict is Verdict.PASS
    totals = sum(hunt.marks.values(), Counter())
    assert all(totals[mark] for mark in ("shared", "preempted", "rebuilt_lower", "cut_shares")), totals


@pytest.mark.nightly
def test_every_contract_holds_over_many_generated_workloads() -> None:
    hunt = run_hunt(range(10_000, 30_000))
    assert [outcome.problems for outcome in hunt.failures] == []
    assert hunt.verdict is Verdict.PASS


@pytest.mark.parametrize(
    "name", ["each_admitted_alone", "blocked_session_is_the_victim", "newest_is_the_victim"]
)
def test_the_hunt_finds_a_planted_fault(name: str) -> None:
    with find_mutant(name).plant(Reach()):
        hunt = run_hunt(range(3000), ["vllm_priority" if "victim" in name else "fcfs"])
    assert hunt.verdict is Verdict.FAIL
    assert "giving way" in hunt.failures[0].problems[0]


def test_a_policy_that_never_decided_otherwise_than_fcfs_makes_the_hunt_red() -> None:
    hunt = Hunt()
    case = draw_case(0, ["orca"])
    hunt.add(Outcome(case=case, verdict=Verdict.PASS), Counter({POLICY_MATTERED: 0}))
    assert (hunt.missing(), hunt.verdict) == (["orca"], Verdict.FAIL)
    hunt.add(Outcome(case=case, verdict=Verdict.PASS), Counter({POLICY_MATTERED: 1}))
    assert (hunt.missing(), hunt.verdict) == ([], Verdict.PASS)
    assert Hunt().verdict is Verdict.UNKNOWN


def test_a_case_is_its_number() -> None:
    names = policy_names()
    assert draw_case(7, names) == draw_case(7, names) != draw_case(7 + len(names), names)
    assert draw_case(7, names).policy == names[7]
    outcome, marks = judge_hunted(draw_case(7, names))
    assert outcome.verdict is Verdict.PASS and marks == judge_hunted(draw_case(7, names))[1]


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(UsageError, match="nobody"):
        run_hunt(range(1), ["nobody"])


@pytest.mark.parametrize("number", [1_064_462, 1_103_595])
def test_a_drawn_case_is_one_that_its_policy_takes(number: int) -> None:
    """Pools of two cells, drawn with a threshold of long prefills of four tokens."""
    outcome, _ = judge_hunted(draw_case(number, policy_names()))
    assert outcome.verdict is Verdict.PASS, outcome.reason
