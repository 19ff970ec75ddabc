"""Runs mutants: each trial clean and planted, on llama.cpp in a worker process that may die."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from time import perf_counter
from typing import Any

from parity.mutants import find_mutant
from parity.mutants.mutant import Complaint, Killer, Mutant, Place, Reach, Trial
from parity.processes import Worker, WorkerDied


def select_trials(mutant: Mutant, *, family: str | None = None, fast: bool = False) -> tuple[Trial, ...]:
    """Trials to run: of one family, and in the fast form one on llama.cpp only
    where the exact engine has none.
    """
    trials = tuple(trial for trial in mutant.trials if family is None or trial.family == family)
    if not fast:
        return trials
    exact = tuple(trial for trial in trials if trial.place is Place.EXACT)
    return exact or trials[:1]


CLEAN_TIMEOUT_S = 60.0


class Status(Enum):
    """What became of a mutant or of one of its trials; ``broken`` means that the
    trial is red without the fault.
    """

    KILLED = "killed"
    SURVIVED = "survived"
    UNREACHED = "not reached"
    BROKEN = "broken"


_WORST_FIRST = (Status.BROKEN, Status.UNREACHED, Status.SURVIVED, Status.KILLED)


@dataclass(frozen=True, slots=True)
class TrialReport:
    """One trial: ``complaints`` of the planted run, by whom it was killed, or
    what was wrong with the clean run.
    """

    trial: str
    status: Status
    killer: str
    text: str
    seconds: float


@dataclass(frozen=True, slots=True)
class MutantReport:
    """All trials of a mutant; its status is the worst of theirs."""

    name: str
    fault: str
    part: str
    families: tuple[str, ...]
    trials: tuple[TrialReport, ...]

    @property
    def status(self) -> Status:
        return next(status for status in _WORST_FIRST if any(t.status is status for t in self.trials))

    @property
    def seconds(self) -> float:
        return sum(trial.seconds for trial in self.trials)


@dataclass(frozen=True, slots=True)
class Attempt:
    """What a trial said without and with the fault, and how often the fault changed something."""

    clean: tuple[Complaint, ...]
    planted: tuple[Complaint, ...]
    reached: int


def attempt_here(mutant: Mutant, trial: Trial) -> Attempt:
    """Run a trial in this process, first clean."""
    clean = trial.run()
    reach = Reach()
    with mutant.plant(reach):
        planted = trial.run()
    return Attempt(clean, planted, reach.count)


def attempt_in_worker(arguments: dict[str, Any]) -> dict[str, Any]:
    """Entry point of the worker: one half of a trial. JSON in, JSON out."""
    mutant = find_mutant(arguments["mutant"])
    trial = mutant.trials[arguments["trial"]]
    reach = Reach()
    if arguments["planted"]:
        with mutant.plant(reach):
            complaints = trial.run()
    else:
        complaints = trial.run()
    return {"reached": reach.count, "complaints": [[c.killer.value, c.text] for c in complaints]}


@functools.cache
def mutant_worker() -> Worker:
    """The worker of this process for mutants: never the one that cases run in,
    because a fault may leave traces.
    """
    return Worker()


def attempt_contained(mutant: Mutant, trial: Trial) -> Attempt:
    """Run a trial in the worker. A death of the worker is a complaint of the run that it happened in."""
    halves = []
    for planted in (False, True):
        arguments = {"mutant": mutant.name, "trial": mutant.trials.index(trial), "planted": planted}
        try:
            answer = mutant_worker().call(
                "parity.mutants.running:attempt_in_worker",
                arguments,
                timeout_s=mutant.timeout_s if planted else CLEAN_TIMEOUT_S,
            )
            halves.append(
                (
                    tuple(Complaint(Killer(killer), text) for killer, text in answer["complaints"]),
                    answer["reached"],
                )
            )
        except WorkerDied as death:
            halves.append(((Complaint(Killer.CRASH, death.reason),), 1))
        except RuntimeError as error:
            halves.append(((Complaint(Killer.INTERNAL, str(error)),), 1))
    return Attempt(halves[0][0], halves[1][0], halves[1][1])


def judge_trial(mutant: Mutant, trial: Trial) -> TrialReport:
    """Run one trial and say what it came to."""
    begin = perf_counter()
    attempt = (attempt_here if trial.place is Place.EXACT else attempt_contained)(mutant, trial)
    kills = [c for c in attempt.planted if c.killer in mutant.killers]
    others = "; ".join(f"{c.killer.value}: {c.text}" for c in attempt.planted) or "nobody complained"
    if attempt.clean:
        status, killer, text = Status.BROKEN, "", f"red without the fault: {attempt.clean[0].text}"
    elif kills:
        status, killer, text = Status.KILLED, kills[0].killer.value, kills[0].text
    elif not attempt.reached:
        status, killer, text = Status.UNREACHED, "", "the fault changed nothing"
    else:
        status, killer, text = Status.SURVIVED, "", others
    if status is Status.KILLED and not attempt.reached:
        status, killer, text = (
            Status.UNREACHED,
            "",
            f"complaints without the fault having changed anything: {others}",
        )
    return TrialReport(trial.name, status, killer, text, perf_counter() - begin)


def judge_mutant(mutant: Mutant, trials: Iterable[Trial] | None = None) -> MutantReport:
    """Run a mutant's trials, or some of them."""
    reports = tuple(judge_trial(mutant, trial) for trial in (mutant.trials if trials is None else trials))
    return MutantReport(mutant.name, mutant.fault, mutant.part, mutant.families, reports)


def judge_mutants(
    mutants: Iterable[Mutant],
    select: Callable[[Mutant], tuple[Trial, ...]],
    on_report: Callable[[MutantReport], None] = lambda report: None,
) -> list[MutantReport]:
    """Run ``select``-ed trials of mutants; one without any is left out."""
    reports = []
    for mutant in mutants:
        trials = select(mutant)
        if trials:
            reports.append(judge_mutant(mutant, trials))
            on_report(reports[-1])
    return reports
