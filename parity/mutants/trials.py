"""Trials: a case on the exact engine or on llama.cpp, and what the checkers said about it."""

from __future__ import annotations

from collections.abc import Callable

from parity.engines.numerics import ROW
from parity.mutants.mutant import Complaint, Killer, Place, Trial
from parity.records import Case, Outcome
from parity.run.runner import process_runner, run_exact_case


def complaints_of(outcome: Outcome) -> tuple[Complaint, ...]:
    """What an outcome complains about, by checker; one that broke has noticed nothing of its own.

    Raises ValueError for a checker that is no killer.
    """
    return tuple(
        Complaint(Killer.INTERNAL if "exception" in found.data else Killer(found.checker), found.text)
        for found in outcome.findings
    )


def run_real_case(case: Case) -> Outcome:
    """Run a case on llama.cpp in this process, which must be a worker; tiny float models, so row numerics."""
    return process_runner(1).run(case, ROW)


def exact_trial(case: Case, name: str = "") -> Trial:
    """A case on the exact engine."""
    return _trial(case, name, Place.EXACT, run_exact_case)


def real_trial(case: Case, name: str = "") -> Trial:
    """A case on llama.cpp."""
    return _trial(case, name, Place.REAL, run_real_case)


def _trial(case: Case, name: str, place: Place, run: Callable[[Case], Outcome]) -> Trial:
    return Trial(
        name=name or f"{case.family} {case.layout.value} {place.value}",
        family=case.family,
        place=place,
        case=case,
        run=lambda: complaints_of(run(case)),
    )
