"""Cases run in worker processes: an abort in llama.cpp or a bug of ours costs one case, not the run."""

from __future__ import annotations

from parity.engines.numerics import ROW, NumericsProfile
from parity.processes import DEFAULT_TIMEOUT_S, CallFailed, Worker, WorkerDied, shared_worker
from parity.records import Case, Outcome, broken_outcome, crashed_outcome, outcome_from_data
from parity.run.profiles import profile_of
from parity.run.runner import check_case
from parity.run.under_test import OURS, Brought

Chunks = tuple[tuple[int, int], ...]


def run_case(
    case: Case,
    *,
    profile: NumericsProfile | None = None,
    n_threads: int = 1,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    stage_processes: bool = False,
    mutant: str | None = None,
    brought: Brought = OURS,
    chunks: Chunks = (),
    worker: Worker | None = None,
) -> Outcome:
    """Run a case contained; ``profile`` None takes the one that the self-test found for the model.

    ``brought`` is a user's scheduler or engine; a user's engine needs no profile. ``mutant`` names a fault to
    be planted in the worker, ``chunks`` are the intervals that session 0 is given, ``worker`` takes the place
    of this process's shared one. A crash or a hang is an outcome (verdict fail, ``crashed``) with the
    engine's own message, and so is an exception of the scheduler or a checker (verdict fail, a problem
    ``internal: ...``); both keep what the worker said in ``stderr``.
    """
    check_case(case)
    if profile is None:
        profile = ROW if brought.engine else profile_of(case.model).profile
    arguments = {
        "case": case.to_json(),
        "profile": profile.to_json(),
        "n_threads": n_threads,
        "stage_processes": stage_processes,
        "scheduler": brought.scheduler,
        "engine": brought.engine,
        "scheduler_command": brought.scheduler_command,
        "mutant": mutant,
        "chunks": chunks,
    }
    entry = "parity.campaign.rerun:rerun_here" if mutant or chunks else "parity.run.runner:run_case_here"
    if brought.engine:
        entry = "parity.run.runner:run_own_engine_here"
    try:
        answer = (worker or shared_worker(profile.environment)).call(entry, arguments, timeout_s=timeout_s)
    except WorkerDied as death:
        return crashed_outcome(case, death.reason, stderr=death.stderr)
    except CallFailed as error:
        return broken_outcome(case, str(error), stderr=error.stderr)
    return outcome_from_data(case, answer)
