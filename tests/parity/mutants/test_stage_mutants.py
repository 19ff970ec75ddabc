"""A fault of the hand-off is caught in every family, and the complaint names
what a person needs to find it.
"""

from __future__ import annotations

import re

import pytest

from parity.mutants import all_mutants
from parity.mutants.mutant import Killer, Mutant, Trial
from parity.mutants.running import Status, judge_trial

MUTANTS = tuple(mutant for mutant in all_mutants() if mutant.part == "hand-off")

# Bits: session and token; the engine: stage and layers, or the stage's file that could not be loaded.
NAMED = {
    Killer.BITS.value: re.compile(r"session \d+ from its token \d+ on"),
    Killer.ENGINE.value: re.compile(
        r"stage \d \(layers \d+:\d+\): |model cannot be loaded in .*-\d+-\d+\.gguf"
    ),
}
ISSUE = {
    "stage_rows_swapped",
    "stage_last_row_dropped",
    "stage_scale_twice",
    "stage_layer_kinds_not_reindexed",
    "stage_missed_remove",
}


@pytest.mark.parametrize(
    ("mutant", "trial"),
    [
        pytest.param(
            mutant,
            trial,
            marks=getattr(pytest.mark, f"family_{trial.family}"),
            id=f"{mutant.name}-{trial.family}",
        )
        for mutant in MUTANTS
        for trial in mutant.trials
    ],
)
def test_fault_of_the_handoff_is_caught_and_named(mutant: Mutant, trial: Trial) -> None:
    report = judge_trial(mutant, trial)

    assert report.status is Status.KILLED, report
    assert NAMED[report.killer].search(report.text), report
    assert report.trial == f"{trial.family} {trial.case.split}"


def test_every_fault_that_the_issue_names_is_planted() -> None:
    assert {mutant.name for mutant in MUTANTS} >= ISSUE
    families = {mutant.name: set(mutant.families) for mutant in MUTANTS}
    everywhere = {"llama", "deepseek2", "gemma2", "falcon_h1", "qwen3next"}
    assert families["stage_rows_swapped"] == families["stage_missed_remove"] == everywhere
    assert families["stage_layer_kinds_not_reindexed"] == {"gemma2", "deepseek2", "qwen3next"}
