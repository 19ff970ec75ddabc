"""Every family's tiny model answers as its goldens say: tokens on every machine,
logits where the provenance matches.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from syrupy.assertion import SnapshotAssertion

from parity.gate.plan import GateJob
from parity.gate.result import CheckKind
from parity.golden.cases import PLANS, GoldenMode, golden_path, load_prompts
from parity.golden.extension import GoldenExtension
from parity.golden.record import MIN_MARGIN, Golden, find_differences
from parity.golden.run import run_golden
from parity.plugin import family_params, gate_params
from scheduler.limits import Layout

MODES = [mode.value for mode in GoldenMode]


def load_golden(family: str, mode: str) -> Golden:
    path = golden_path(family, GoldenMode(mode))
    return Golden.from_text(path.read_text(encoding="utf-8"), where=str(path))


@pytest.fixture
def golden(snapshot: SnapshotAssertion) -> Any:
    return snapshot.use_extension(GoldenExtension)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("job", gate_params(CheckKind.GOLDEN))
def test_outputs_are_the_golden_ones(job: GateJob, mode: str, golden: Any) -> None:
    run = run_golden(job.family, GoldenMode(mode), load_prompts(job.family)[GoldenMode(mode)])
    assert not run.problems, "\n".join(
        run.problems
    )  # concurrent equals solo, and the mode exercised its marks
    assert run.golden == golden


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", family_params())
def test_streams_give_the_golden_tokens(family: str, mode: str) -> None:
    """Another layout, another attention kernel: other roundings, the same tokens."""
    run = run_golden(family, GoldenMode(mode), load_prompts(family)[GoldenMode(mode)], layout=Layout.STREAMS)
    assert not run.problems, "\n".join(run.problems)
    assert [s.tokens for s in run.golden.sessions] == [s.tokens for s in load_golden(family, mode).sessions]


@pytest.mark.parametrize("family", family_params())
def test_goldens_have_large_margins_and_reasons(family: str) -> None:
    for mode in MODES:
        golden = load_golden(family, mode)
        assert golden.margin >= MIN_MARGIN, mode
        assert golden.reason, mode
        assert (golden.family, golden.mode) == (family, mode)
        assert len(golden.sessions) == PLANS[GoldenMode(mode)].count


@pytest.mark.parametrize("family", family_params())
def test_golden_folder_holds_nothing_unused(family: str) -> None:
    expected = {f"{mode}.json" for mode in MODES} | {"prompts.yaml"}
    assert {path.name for path in golden_path(family, GoldenMode.SHORT).parent.iterdir()} == expected


@pytest.mark.parametrize("family", family_params())
def test_golden_test_notices_one_changed_token(family: str) -> None:
    golden = load_golden(family, "short")
    first = golden.sessions[1]
    wrong = replace(first, tokens=(*first.tokens[:3], first.tokens[3] + 1, *first.tokens[4:]))
    changed = replace(golden, sessions=(golden.sessions[0], wrong, *golden.sessions[2:]))
    assert find_differences(golden, changed)[0] == "session 1: tokens differ from generated token 3 on"
