"""The two cases in which the default policy once ran for ever: every policy ends on them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from parity.cases.strategies import within_limits
from parity.records import Case, Verdict
from parity.run.runner import run_exact_case
from scheduler.policies import policy_names

CASES = Path(__file__).parents[1] / "regressions"


@pytest.mark.parametrize("name", ["livelock_falcon_h1", "livelock_llama"])
@pytest.mark.parametrize("policy", policy_names())
def test_every_policy_ends_where_a_shared_prefix_lies_high(name: str, policy: str) -> None:
    case = Case.from_json((CASES / f"{name}.json").read_text())
    outcome = run_exact_case(within_limits(replace(case, policy=policy)))
    assert (outcome.verdict, outcome.problems) == (Verdict.PASS, ())
    assert outcome.sessions == len(case.sessions)
