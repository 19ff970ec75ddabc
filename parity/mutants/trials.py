"""Trials: a case on the exact engine or on llama.cpp, and what the checkers said about it."""

from __future__ import annotations

from collections.abc import Callable

from parity.engines.numerics import ROW
from parity.mutants.records import Complaint, Killer, Place, Trial
from parity.records import Case, Outcome
from parity.run.runner import process_runner, run_exact_case

_KILLER_OF_PROBLEM = (
    ("liveness", Killer.LIVENESS),
    ("legality", Killer.LEGALITY),
    ("conservation", Killer.CONSERVATION),
    ("memory", Killer.MEMORY),
    ("not reproducible", Killer.REPRODUCIBILITY),
    ("ends", Killer.ENDS),
    ("engine", Killer.ENGINE),
    ("internal", Killer.INTERNAL),
    ("giving way", Killer.CONTRACT),
    ("session", Killer.ENDS),
)


def complaints_of(outcome: Outcome) -> tuple[Complaint, ...]:
    """What an outcome complains about, by checker."""
    complaints = [Complaint(Killer.CRASH, outcome.reason)] if outcome.crashed else []
    for problem in outcome.problems:
        killer = next((killer for prefix, killer in _KILLER_OF_PROBLEM if problem.startswith(prefix)), None)
        if killer is None:
            raise ValueError(f"a problem that no checker is known for: {problem}")
        complaints.append(Complaint(killer, problem))
    for divergence in outcome.divergences:
        where = f"session {divergence.session} from its token {divergence.step} on"
        complaints.append(Complaint(Killer.BITS, where))
        if divergence.expected_token != divergence.actual_token:
            complaints.append(Complaint(Killer.BYTES, where))
    return tuple(complaints)


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
