"""No server that is wrong on purpose passes; right ones do, at the tier that they keep."""

from __future__ import annotations

import pytest

from parity.endpoint.judge import Fault, SystemTier, in_report_order
from parity.endpoint.noise import Baseline
from parity.records import Verdict
from tests.parity.endpoint.conftest import Rounded, check
from tests.parity.endpoint.stand_in import StandIn
from tests.parity.endpoint.wrong_servers import (
    WRONG,
    ConstantLogprobs,
    DropsStreams,
    Empty,
    FailsWhileBusy,
    OneAnswerForAll,
    OneAtATime,
    RandomReasoning,
    ZeroLogprobs,
)

# What is wrong is that nothing is proved; all others are found at fault.
UNKNOWN = (OneAtATime, ZeroLogprobs, OneAnswerForAll, Empty, ConstantLogprobs, DropsStreams)


@pytest.mark.parametrize("server", WRONG, ids=lambda server: server.__name__)
def test_wrong_server_never_passes(server: type[StandIn], baseline: Baseline) -> None:
    is_chat = server is RandomReasoning
    found, _, _ = check(server, chat=is_chat, baseline=None if is_chat else baseline)
    assert found.verdict is (Verdict.UNKNOWN if server in UNKNOWN else Verdict.FAIL), found.faults[:3]


def test_right_server_passes_with_bits() -> None:
    found, report, _ = check(StandIn)
    assert (found.verdict, found.tier, found.faults, found.unproved) == (
        Verdict.PASS,
        SystemTier.BITS,
        [],
        [],
    )
    assert report["compared"] == report["prompts"] > 18 and report["disconnects"] > 0
    assert report["ran_together"].startswith("two streams took")
    assert all(told == planted > 0 for told, planted in report["canaries"].values())


def test_right_server_that_rounds_passes_against_a_baseline_and_is_unknown_without(
    baseline: Baseline,
) -> None:
    found, report, _ = check(Rounded, baseline=baseline)
    assert (found.verdict, found.faults) == (Verdict.PASS, [])
    assert found.tier is not SystemTier.BITS and 0 < report["largest_distance"] < found.limit.distance
    found, _, _ = check(Rounded, seed=3)
    assert found.verdict is not Verdict.FAIL and not found.faults


def test_tier_that_is_demanded_is_never_lowered(baseline: Baseline) -> None:
    found, _, _ = check(Rounded, baseline=baseline, tier=SystemTier.BITS)
    assert found.verdict is Verdict.FAIL and found.faults[0].kind == "tier"
    found, _, _ = check(Rounded, seed=3, tier=SystemTier.ROUNDING)
    assert found.verdict is not Verdict.FAIL
    assert found.verdict is Verdict.PASS or "tier rounding needs a baseline" in found.unproved


def test_right_server_without_log_probabilities_reaches_bytes_and_not_bits() -> None:
    class TextOnly(StandIn):
        shows_logprobs = False

    found, _, _ = check(TextOnly)
    assert (found.verdict, found.tier) == (Verdict.PASS, SystemTier.BYTES)
    found, _, _ = check(TextOnly, tier=SystemTier.BITS)
    assert found.verdict is Verdict.UNKNOWN and "no bits to compare: none are shown" in found.unproved


def test_errors_under_load_are_faults_though_retries_hide_them() -> None:
    found, report, _ = check(FailsWhileBusy)
    assert {fault.kind for fault in found.faults} == {"error under load"}
    assert report["retries"] > 0 and report["failed"] == 0


def test_whole_answers_prove_no_concurrency() -> None:
    found, _, _ = check(StandIn, stream=False)
    assert found.verdict is Verdict.UNKNOWN
    assert "nothing shows that two sessions ever ran together" in found.unproved


def test_fault_that_names_a_prompt_stands_before_a_rate() -> None:
    rate = Fault(kind="too often", text="9 of 10 questions")
    small = Fault(kind="distance", text="a little", question=3, size=0.3, limit=0.2)
    large = Fault(kind="distance", text="much", question=7, size=2.9, limit=0.2)
    assert in_report_order([rate, small, large]) == [large, small, rate]
