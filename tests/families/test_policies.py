"""No policy changes a session's bits on llama.cpp: every policy on two families,
on all nightly; generated cases.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from parity.cases.strategies import landmark
from parity.plugin import family_params
from parity.records import Verdict
from parity.run.contained import run_case
from parity.run.explain import explain_outcome
from parity.suites.suite import run_suite
from scheduler.limits import Layout
from scheduler.policies import policy_names

# Marks that a policy's own shape rules out on the fixed case.
WITHOUT = {
    "fixed_batch": ("mixed_step",),
    "single_lane": ("concurrent", "mixed_step"),
    "sglang_adder": ("mixed_step",),
}
# One policy of its own kind per family for generated cases: preempting, queueing, chunking, quota, client
# order.
SPREAD = {
    "llama": "vllm_fcfs",
    "deepseek2": "fastserve_mlfq",
    "gemma2": "sarathi",
    "falcon_h1": "sglang_adder",
    "qwen3next": "vtc_completed",
}


def spread() -> list:
    """(family, policy): every policy on two families, so every family under seven
    policies; the rest is nightly.
    """
    families, pairs = family_params(), []
    for number, policy in enumerate(policy_names()):
        for offset, family in enumerate(families):
            often = (number + offset) % len(families) < 2
            marks = (*family.marks, *(() if often else (pytest.mark.nightly,)))
            pairs.append(pytest.param(*family.values, policy, marks=marks, id=f"{family.values[0]}-{policy}"))
    return pairs


@pytest.mark.parametrize(("family", "policy"), spread())
def test_policy_changes_no_bit_of_a_session(family: str, policy: str) -> None:
    outcome = run_case(landmark(family, Layout.UNIFIED, policy=policy))

    assert outcome.verdict is Verdict.PASS, explain_outcome(outcome)
    assert outcome.bit_identical == outcome.byte_identical == outcome.sessions >= 8
    for mark in ("chunked", "shared", "preempted", "rebuilt", "concurrent", "mixed_step"):
        assert outcome.marks[mark] or mark in WITHOUT.get(policy, ()), mark


@pytest.mark.parametrize("family", family_params())
def test_generated_cases_under_a_spread_of_policies(family: str, tmp_path: Path) -> None:
    result = run_suite(
        family,
        Layout.UNIFIED,
        policy=SPREAD[family],
        min_sessions=60,
        failures=tmp_path,
        marks=("shared", "preempted", "resumed", "chunked", "concurrent"),
    )

    assert result.verdict is Verdict.PASS, f"{result.reason}\n{result.explanation}"
    assert result.bit_identical == result.sessions >= 60
