"""Every family across stages: complete rows, exact hand-off, exact states, and
concurrent parity on every pinned split.

Everything that touches llama.cpp runs in a worker process, so that an abort fails one
test with the engine's message.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from parity.gate.plan import GateJob
from parity.gate.result import CheckKind
from parity.models import resolve_model
from parity.models.facts import LayerKind, read_facts
from parity.models.families import Mark, MemoryComponent, load_family
from parity.models.splits import Split, check_split_legal, load_splits
from parity.plugin import family_params, gate_params
from parity.processes import shared_worker
from parity.records import Verdict
from parity.run.contained import run_case
from parity.run.explain import explain_outcome
from parity.run.profiles import profile_of
from parity.suites.states import SAVED_AT
from parity.suites.suite import MIN_SESSIONS, crowd_case, dense_cases, pinned_splits, run_split_suite


def split_params() -> list:
    """One parameter per pinned split of a tiny row, under its family's marker."""
    return [
        pytest.param(split, marks=family.marks, id=f"{family.values[0]}-{split.name}")
        for family in family_params()
        for split in pinned_splits(family.values[0])
    ]


@pytest.mark.parametrize("family", family_params())
def test_manifest_row_is_complete(family: str) -> None:
    """Digest, layers, components, marks; and splits that start stages on every kind
    of layer, in two to four stages.
    """
    known = load_family(family)
    row, file = known.row("tiny"), resolve_model(family)
    facts = read_facts(file.path)
    states = any(kind.has_state for kind in facts.layers)

    assert row.locked and file.sha256 == row.sha256
    assert (facts.architecture, facts.n_layer) == (known.architecture, row.n_layer)
    assert known.marks == tuple(Mark)
    assert MemoryComponent.ATTENTION_CELLS in known.components
    assert (MemoryComponent.WINDOW_CELLS in known.components) == (LayerKind.WINDOW in facts.layers)
    assert (MemoryComponent.RECURRENT_SLOTS in known.components) == states == known.is_hybrid
    assert (
        known.row("real").n_layer
        == {split.n_layer for split in load_splits(family) if split.row == "real"}.pop()
    )

    splits = pinned_splits(family)
    for split in splits:
        assert split.sha256 == file.sha256 and split.why
        check_split_legal(facts, split, sha256=file.sha256)
    assert {len(split.stages) for split in splits} == {2, 3, 4}
    labels = {facts.layer_label(layer) for layer in range(facts.n_layer)}
    assert {label for split in splits for label in split.first_layers} == labels


@pytest.mark.parametrize("split", split_params())
def test_activation_handoff_matches_full_model(split: Split) -> None:
    report = shared_worker(()).call(
        "parity.suites.states:check_handoff_here", {"model": split.family, "split": split.name}
    )

    assert report["differing"] == []
    assert report["stages"] == len(split.stages)
    assert report["rows"] == sum((1, 37, 64, 130)) + 4 * 32


@pytest.mark.parametrize("job", gate_params(CheckKind.STATES))
def test_cache_state_restore_matches_recompute(job: GateJob) -> None:
    report = shared_worker(()).call("parity.suites.states:check_states_here", {"family": job.family})

    assert report["differing"] == []
    assert report["compared"] == 10 * len(SAVED_AT)


@pytest.mark.parametrize("family", family_params())
def test_cache_state_restore_of_a_chain_matches_recompute(family: str) -> None:
    arguments = {"family": family, "split": pinned_splits(family)[-1].name, "lengths": [16, 63]}
    report = shared_worker(()).call("parity.suites.states:check_states_here", arguments)

    assert report["differing"] == []
    assert report["compared"] == 10 * 2


@pytest.mark.parametrize("job", gate_params(CheckKind.SPLIT))
def test_concurrent_parity_across_stages(job: GateJob, tmp_path: Path) -> None:
    split = next(split for split in pinned_splits(job.family) if split.name == job.split)
    result = run_split_suite(job.family, split, min_sessions=job.sessions, failures=tmp_path)

    assert result.verdict is Verdict.PASS, f"{result.reason}\n{result.explanation}"
    assert result.bit_identical == result.byte_identical == result.sessions >= job.sessions


@pytest.mark.parametrize("family", family_params())
def test_dense_cases_across_the_most_stages(family: str) -> None:
    split = max(pinned_splits(family), key=lambda split: len(split.stages))
    profile, marks, sessions = profile_of(split.family), Counter(), 0
    assert profile.exact, profile.reason
    for case in dense_cases(split.family, split):
        outcome = run_case(case, profile=profile.profile)
        assert outcome.verdict is Verdict.PASS, explain_outcome(outcome)
        assert outcome.bit_identical == outcome.byte_identical == outcome.sessions
        marks.update(outcome.marks)
        sessions += outcome.sessions

    assert sessions >= MIN_SESSIONS
    wanted = [*(mark.value for mark in load_family(split.family).marks), "overlapped", "preempted_in_flight"]
    assert [mark for mark in wanted if not marks[mark]] == []


@pytest.mark.parametrize("in_processes", [False, True], ids=["one process", "processes"])
@pytest.mark.parametrize("family", family_params())
def test_chains_in_two_shards(family: str, in_processes: bool) -> None:
    """A chain for each shard, two steps in flight, sessions preempted on their way."""
    split = pinned_splits(family)[0]
    case = replace(crowd_case(family, split, 1), shards=2)
    outcome = run_case(case, profile=profile_of(family).profile, stage_processes=in_processes)

    assert outcome.verdict is Verdict.PASS, explain_outcome(outcome)
    assert outcome.bit_identical == outcome.sessions > 0
    for mark in ("sharded", "overlapped", "preempted", "preempted_in_flight"):
        assert outcome.marks[mark], mark
