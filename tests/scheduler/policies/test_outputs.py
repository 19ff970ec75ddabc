"""The one invariant: no policy changes any session's output, although every policy schedules differently."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings

from parity.cases.strategies import cases, within_limits
from parity.records import Case
from parity.run.runner import expected_answers, replay
from parity.suites.policies import busy_case, crowded_case
from scheduler.limits import Layout
from scheduler.policies import contracts, make_policy, policy_names
from scheduler.records import FinishReason, ServiceLevel

POLICIES = policy_names()
CALM = settings(max_examples=15, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


def with_variety(case: Case) -> Case:
    """The case with clients, priorities and objectives, which is what policies look at."""
    sessions = tuple(
        replace(
            session, client_id="abc"[i % 3], priority=(i * 7) % 3, slo=ServiceLevel(tbt_ms=40.0 * (1 + i % 2))
        )
        for i, session in enumerate(case.sessions)
    )
    return replace(case, sessions=sessions)


@pytest.mark.parametrize(
    ("family", "layout"),
    [("llama", Layout.UNIFIED), ("qwen3next", Layout.UNIFIED), ("gemma2", Layout.STREAMS)],
)
def test_all_policies_give_identical_outputs_and_differ_in_their_traces(family: str, layout: Layout) -> None:
    marks: Counter[str] = Counter()

    @CALM
    @given(cases(family, layout))
    def run(case: Case) -> None:
        case = with_variety(case)
        expected = expected_answers(case)
        schedules = {}
        for policy in POLICIES:
            played = replay(within_limits(replace(case, policy=policy)))
            assert played.run.problems == [], policy
            for index, end in played.run.completions.items():
                whole = end.reason in (FinishReason.LENGTH, FinishReason.STOP)
                alone = expected[index].tokens
                assert end.tokens == (alone if whole else alone[: len(end.tokens)]), (policy, index)
            schedules[policy] = played.schedule
        for policy in POLICIES:
            marks[policy] += schedules[policy] != schedules["fcfs"]
        marks["cases"] += 1
        marks["differing pairs"] += len({str(schedule) for schedule in schedules.values()}) > 1

    run()
    assert marks["cases"] == 15
    assert marks["differing pairs"] > marks["cases"] // 4
    busy = [policy for policy in POLICIES if marks[policy]]
    assert len(busy) >= 8, marks


def test_every_policy_schedules_some_workload_in_a_way_of_its_own() -> None:
    """Only layer_ready without facts and sarathi_serve without a budget of its own
    are the default by definition.
    """
    crowd = [
        replace(with_variety(crowded_case("fcfs")), max_num_seqs=3, pool_cells=60, num_sequences=5),
        with_variety(busy_case("fcfs")),
    ]
    default = [replay(case).schedule for case in crowd]
    same = [
        policy
        for policy in POLICIES
        if [replay(replace(case, policy=policy)).schedule for case in crowd] == default
    ]
    assert same == ["fcfs", "layer_ready", "sarathi_serve"]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_policy_is_listed_with_a_complete_contract_of_its_own_name(policy: str) -> None:
    made = make_policy(policy)
    assert made.identity.policy_id == policy
    assert made.contract is contracts()[policy]
    assert made.contract.not_reproduced or policy in ("fcfs", "static_priority")


def test_the_registry_refuses_unknown_names_and_options() -> None:
    with pytest.raises(ValueError, match="unknown policy"):
        make_policy("best_policy")
    with pytest.raises(ValueError, match="policy orca"):
        make_policy("orca", chunk=3)
    with pytest.raises(ValueError, match="policy fcfs"):
        make_policy("fcfs", overload={"kind": "queue", "nonsense": 1})


def test_every_policy_of_the_table_is_there() -> None:
    assert set(contracts()) >= {
        "fixed_batch",
        "single_lane",
        "orca",
        "sarathi",
        "sarathi_serve",
        "vllm_fcfs",
        "vllm_priority",
        "sglang_adder",
        "least_slack",
        "fastserve_mlfq",
        "vtc",
        "vtc_completed",
        "preble_quota",
        "aging",
        "layer_ready",
        "dist_goodput",
        "scorpio_guard",
    }
