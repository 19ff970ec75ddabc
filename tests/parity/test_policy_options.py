"""Options of a policy: one parser, typed values, unknown ones refused with the known ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from parity.cases.policy_options import parse_policy_options
from parity.cases.strategies import OPTION_VALUES, cases, option_values
from parity.errors import UsageError
from parity.records import Case
from scheduler.limits import Layout
from scheduler.policies import make_policy, option_types, policy_names


@pytest.mark.parametrize(
    ("policy", "text", "value"),
    [
        ("sglang_adder", "mix_chunked=false", False),
        ("sglang_adder", "mix_chunked=True", True),
        ("sglang_adder", "chunk_tokens=none", None),
        ("sglang_adder", "chunk_tokens=64", 64),
        ("preble_quota", "quotas=2,1", [2, 1]),
        ("preble_quota", "quotas=[3, 1, 1]", [3, 1, 1]),
        ("aging", "quantum_ms=2.5", 2.5),
        ("fcfs", "reservation=maximum", "maximum"),
        (
            "fcfs",
            'reservation={"kind": "watermark", "watermark_rows": 8}',
            {"kind": "watermark", "watermark_rows": 8},
        ),
        ("layer_ready", 'facts={"s0": [["ready", 0]]}', {"s0": [["ready", 0]]}),
    ],
)
def test_a_value_is_read_as_the_type_that_the_policy_declares(policy: str, text: str, value: Any) -> None:
    assert parse_policy_options(policy, [text]) == ((text.partition("=")[0], value),)


def test_a_mapping_may_come_from_a_file(tmp_path: Path) -> None:
    forecasts = {"kind": "point", "forecasts": {"s0": {"point": 3}}}
    path = tmp_path / "forecast.json"
    path.write_text(json.dumps(forecasts))
    assert parse_policy_options("fcfs", [f"reservation=@{path}"]) == (("reservation", forecasts),)


@pytest.mark.parametrize(
    ("policy", "texts", "said"),
    [
        ("orca", ["chunk=3"], "no option 'chunk' in --policy-option; known: overload, slots"),
        ("orca", ["slots"], "policy option 'slots' has no value"),
        ("orca", ["slots=2.5"], "option slots: '2.5' is not a whole number"),
        ("orca", ["slots=9", "slots=10"], "slots is given twice"),
        ("sglang_adder", ["mix_chunked=0"], "option mix_chunked: '0' is not true or false"),
        ("aging", ["quantum_ms=nan"], "option quantum_ms: nan is not a number"),
        ("aging", ["quantum_ms=0"], "must be positive"),
        ("preble_quota", ["quotas=2,x"], "option quotas: 'x' is not a whole number"),
        ("fcfs", ["reservation=oracle"], "unknown reservation 'oracle'"),
        ("fcfs", ['overload={"kind": "queue", "most": 1}'], "overload has no 'most'"),
        ("fcfs", ["reservation={broken"], "reservation cannot be read"),
        ("fcfs", ["reservation=@nowhere.json"], "reservation cannot be read"),
        ("fastest", [], "unknown policy 'fastest'"),
    ],
)
def test_what_is_no_option_is_refused_in_one_line(policy: str, texts: list[str], said: str) -> None:
    with pytest.raises(UsageError) as refused:
        parse_policy_options(policy, texts)
    assert said in refused.value.line
    assert "\n" not in refused.value.line


@pytest.mark.parametrize(
    ("policy", "options", "said"),
    [
        ("sglang_adder", {"mix_chunked": 1}, "option mix_chunked: 1 is not true or false"),
        ("preble_quota", {"quotas": [1, True]}, "option quotas: True is not a whole number"),
        ("orca", {"chunk": 3}, "no option 'chunk'; known: overload, slots"),
        ("layer_ready", {"facts": [1]}, r"option facts: \[1\] is not a mapping"),
        ("fcfs", {"overload": 3}, "option overload: 3 is neither a kind of overload nor a mapping"),
    ],
)
def test_a_policy_takes_only_values_of_its_options_types(
    policy: str, options: dict[str, int | list[bool | int]], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        make_policy(policy, **options)


@pytest.mark.parametrize("policy", policy_names())
def test_every_option_of_every_policy_is_drawn_and_makes_the_policy(policy: str) -> None:
    """Facts about other subsystems and a profile's times have no value of their own to draw."""
    foreign = {"facts", "tick_ms", "tokens_per_tick", "max_buffer_bytes", "buffer_bytes_per_token"}
    foreign |= {"max_skips", "max_passes", "max_age_ms"}
    drawn = option_values(policy)
    assert set(option_types(policy)) - foreign <= set(drawn)
    assert set(drawn) <= set(option_types(policy))
    for name, values in drawn.items():
        for value in values:
            make_policy(policy, **{name: value})
    assert set(OPTION_VALUES) <= set(policy_names())


@settings(max_examples=30, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(st.data(), st.sampled_from([name for name in policy_names() if name != "fcfs"]))
def test_cases_for_a_policy_vary_what_it_looks_at_and_survive_a_file(data: Any, policy: str) -> None:
    case = data.draw(cases("llama", Layout.STOCK, policy=policy))
    make_policy(policy, **dict(case.policy_options))
    assert Case.from_json(case.to_json()) == case
    if policy.startswith("vllm_"):
        assert case.max_num_seqs <= case.max_num_batched_tokens


def test_cases_for_a_policy_have_several_clients_priorities_and_objectives() -> None:
    seen: dict[str, set] = {"clients": set(), "priorities": set(), "objectives": set(), "options": set()}

    @settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(cases("llama", Layout.STOCK, policy="vtc"))
    def look(case: Case) -> None:
        seen["clients"].update(session.client_id for session in case.sessions)
        seen["priorities"].update(session.priority for session in case.sessions)
        seen["objectives"].update(session.slo.ttft_ms for session in case.sessions)
        seen["options"].update(name for name, _ in case.policy_options)

    look()
    assert seen["clients"] == {"a", "b", "c"}
    assert seen["priorities"] == {0, 1, 2, 3}
    assert len(seen["objectives"]) == 5
    assert seen["options"] == {"input_weight", "output_weight", "reservation", "overload"}


def test_fixed_options_are_kept_in_every_case() -> None:
    @settings(max_examples=10, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(cases("llama", Layout.STOCK, policy="orca", policy_options=(("slots", 5000),)))
    def look(case: Case) -> None:
        assert case.policy_options == (("slots", 5000),)

    look()
