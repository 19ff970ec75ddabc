"""Cases run in worker processes: an abort in llama.cpp costs one case, not the run."""

from __future__ import annotations

from parity.numerics import NumericsProfile
from parity.profiles import profile_of
from parity.records import Case, Outcome, Verdict, outcome_from_data
from parity.runner import check_case
from parity.worker import DEFAULT_TIMEOUT_S, WorkerDied, shared_worker


def run_case(
    case: Case,
    *,
    profile: NumericsProfile | None = None,
    n_threads: int = 1,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    stage_processes: bool = False,
    mutant: str | None = None,
) -> Outcome:
    """Run a case contained; ``profile`` None takes the one that the self-test found for the model.

    ``mutant`` names a fault to be planted in the worker. A crash or a hang is an outcome (verdict fail,
    ``crashed``), with the engine's own message.
    """
    check_case(case)
    if profile is None:
        profile = profile_of(case.model).profile
    worker = shared_worker(profile.environment)
    arguments = {
        "case": case.to_json(),
        "profile": profile.to_json(),
        "n_threads": n_threads,
        "stage_processes": stage_processes,
    }
    entry = "parity.runner:run_case_here" if mutant is None else "parity.mutants.running:run_planted_here"
    try:
        return outcome_from_data(
            case, worker.call(entry, {**arguments, "mutant": mutant}, timeout_s=timeout_s)
        )
    except WorkerDied as death:
        return Outcome(
            case=case, verdict=Verdict.FAIL, crashed=True, reason=death.reason, stderr=death.stderr
        )
