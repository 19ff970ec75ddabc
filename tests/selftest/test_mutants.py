"""Every check can fail: planted faults are killed by the checker that each names; clean runs are green."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from parity.commands.mutants import command
from parity.engines.numerics import ROW
from parity.errors import ExitCode, UsageError
from parity.mutants import all_mutants, cases, find_mutant
from parity.mutants.mutant import Complaint, Killer, Mutant, Place, Reach, Trial, mutant
from parity.mutants.running import Status, judge_mutant, judge_mutants, mutant_worker, select_trials
from parity.mutants.seam import in_batches
from parity.mutants.trials import exact_trial
from parity.records import Outcome
from parity.run.contained import run_case

# The planted off-by-ones of the main job: which session must be named, and at which of its generated tokens.
OFF_BY_ONES = {
    "position_off_by_one": (1, 0),
    "prefix_shared_one_token_too_far": (1, 0),
    "recurrent_state_one_token_late": (1, 0),
    "cell_below_the_last_one": (1, 2),
}
MUTANTS = all_mutants()


def test_registry_holds_at_least_sixty_faults_of_every_part() -> None:
    parts = {mutant.part for mutant in MUTANTS}
    assert len(MUTANTS) >= 60
    assert parts >= {
        "rows",
        "sampling",
        "cells",
        "prefix",
        "states",
        "window",
        "visibility",
        "phases",
        "resume",
        "preemption",
        "admission",
        "budget",
        "cancel",
        "ends",
        "failures",
        "oracle",
        "checkers",
    }
    assert {trial.family for mutant in MUTANTS for trial in mutant.trials} == set(cases.FAMILIES)


@pytest.mark.parametrize(
    "mutant",
    [m for m in MUTANTS if select_trials(m, fast=True)[0].place is Place.EXACT],
    ids=lambda mutant: mutant.name,
)
def test_exact_engine_mutant_is_killed(mutant: Mutant) -> None:
    report = judge_mutant(mutant, select_trials(mutant, fast=True))
    assert report.status is Status.KILLED, [
        trial for trial in report.trials if trial.status is not Status.KILLED
    ]


@pytest.mark.parametrize(
    "mutant",
    [m for m in MUTANTS if select_trials(m, fast=True)[0].place is Place.REAL],
    ids=lambda mutant: mutant.name,
)
def test_llama_cpp_mutant_is_killed(mutant: Mutant) -> None:
    report = judge_mutant(mutant, select_trials(mutant, fast=True))
    assert report.status is Status.KILLED, report.trials


@pytest.mark.parametrize(
    ("name", "trial"),
    [
        (name, trial)
        for name in OFF_BY_ONES
        for trial in find_mutant(name).trials
        if trial.place is Place.REAL
    ],
    ids=lambda value: value if isinstance(value, str) else value.family,
)
def test_planted_off_by_one_on_llama_cpp_names_session_and_step(name: str, trial: Trial) -> None:
    outcome = run_planted(name, trial)
    session, step = OFF_BY_ONES[name]
    first = min(outcome.divergences, key=lambda divergence: (divergence.scheduler_step, divergence.session))
    assert (first.session, first.step) == (session, step), outcome.divergences


def run_planted(name: str, trial: Trial) -> Outcome:
    """The outcome of a trial's case on llama.cpp with the fault planted in the worker."""
    return run_case(trial.case, profile=ROW, mutant=name, worker=mutant_worker())


def test_function_without_a_docstring_is_no_mutant() -> None:
    make = mutant(part="self-test", killers=(Killer.BITS,), trials=(exact_trial(cases.mixed("llama")),))

    def unexplained(reach: Reach) -> None:
        reach()

    with pytest.raises(ValueError, match="mutant unexplained: needs a sentence"):
        make(unexplained)


def test_survivor_is_not_called_killed() -> None:
    clean = exact_trial(cases.mixed("llama"))
    harmless = Mutant(
        name="harmless",
        fault="None at all.",
        part="self-test",
        killers=(Killer.BITS,),
        trials=(clean,),
        plant=in_batches(lambda: lambda plan, batch: batch),
    )
    assert judge_mutant(harmless).status is Status.UNREACHED

    def reached(reach: Reach) -> Any:
        reach()
        return harmless.plant(Reach())

    survivor = Mutant(
        name="survivor",
        fault="One that nobody sees.",
        part="self-test",
        killers=(Killer.BITS,),
        trials=(clean,),
        plant=reached,
    )
    assert judge_mutant(survivor).status is Status.SURVIVED


def test_mutant_killed_by_another_checker_survives() -> None:
    mutant = find_mutant("session_ends_twice")
    other = Mutant(
        name="other",
        fault=mutant.fault,
        part=mutant.part,
        killers=(Killer.BITS,),
        plant=mutant.plant,
        trials=mutant.trials,
    )
    assert judge_mutant(other).status is Status.SURVIVED


def test_trial_that_is_red_without_the_fault_is_broken() -> None:
    red = Trial(name="red", run=lambda: (Complaint(Killer.BITS, "always"),))
    mutant = Mutant(
        name="any",
        fault="Any.",
        part="self-test",
        killers=(Killer.BITS,),
        trials=(red,),
        plant=find_mutant("session_ends_twice").plant,
    )
    assert judge_mutant(mutant).status is Status.BROKEN


def test_command_writes_totals_and_says_who_killed_what(tmp_path: Path) -> None:
    out = tmp_path / "mutants.json"
    result = CliRunner().invoke(
        command, ["session_ends_twice", "token_budget_not_charged", "--json", str(out)], standalone_mode=False
    )
    assert result.return_value is ExitCode.PASS
    assert "killed" in result.output and "ends: session 0 ended twice" in result.output
    summary = json.loads(out.read_text())
    assert (summary["total"], summary["killed"], summary["survived"], summary["unreached"]) == (2, 2, [], [])
    assert summary["slowest_s"] < 10


def test_command_refuses_an_unknown_name() -> None:
    result = CliRunner().invoke(command, ["no_such_mutant"], standalone_mode=False)
    assert isinstance(result.exception, UsageError)
    assert "no_such_mutant" in str(result.exception)


def test_selection_leaves_out_mutants_of_other_families() -> None:
    reports = judge_mutants(
        [find_mutant("window_one_position_short")], lambda m: select_trials(m, family="llama")
    )
    assert reports == []
