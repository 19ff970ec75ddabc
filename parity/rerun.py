"""Runs a case again otherwise: on another engine, with a planted fault, with given chunk boundaries."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

from parity.exact_runner import run_exact_case
from parity.mutants import find_mutant
from parity.mutants.records import Reach, replaced
from parity.profiles import profile_of
from parity.records import Case, Outcome, Verdict, outcome_from_data
from parity.runner import check_case, run_case_here
from parity.worker import Worker, WorkerDied
from scheduler.policies.base import Policy

TIMEOUT_S = 60.0
Chunks = tuple[tuple[int, int], ...]


@contextmanager
def given_chunks(chunks: Chunks, *, session: int = 0) -> Iterator[None]:
    """While it lasts, policies give this session the intervals that it had, as far as budgets allow."""
    stops = dict(chunks)

    def make(original: Callable[..., int]) -> Callable[..., int]:
        def chunk_tokens(self: Policy, state: Any, view: Any, available: int) -> int:
            allowed = original(self, state, view, available)
            stop = stops.get(view.computed) if view.request_id == f"s{session}" else None
            return allowed if stop is None else min(allowed, stop - view.computed)

        return chunk_tokens

    with replaced(Policy, "chunk_tokens", make):
        yield


def rerun_here(arguments: dict[str, Any]) -> dict[str, Any]:
    """Entry point of the worker: JSON in, JSON out."""
    chunks = tuple(map(tuple, arguments["chunks"]))
    with ExitStack() as stack:
        if arguments["mutant"] is not None:
            stack.enter_context(find_mutant(arguments["mutant"]).plant(Reach()))
        if chunks:
            stack.enter_context(given_chunks(chunks))
        return run_case_here(arguments)


@dataclass(slots=True)
class Rerun:
    """Runs cases one way: on the exact engine or on llama.cpp in its own worker, with or without a fault.

    ``count`` counts the runs.
    """

    exact: bool = False
    mutant: str | None = None
    timeout_s: float = TIMEOUT_S
    count: int = 0
    _worker: Worker | None = None

    def __call__(self, case: Case, chunks: Chunks = ()) -> Outcome:
        """The outcome; ``chunks`` are the intervals of session 0."""
        self.count += 1
        return self._exact(case, chunks) if self.exact else self._contained(case, chunks)

    def _exact(self, case: Case, chunks: Chunks) -> Outcome:
        with ExitStack() as stack:
            if self.mutant is not None:
                stack.enter_context(find_mutant(self.mutant).plant(Reach()))
            if chunks:
                stack.enter_context(given_chunks(chunks))
            return run_exact_case(case)

    def _contained(self, case: Case, chunks: Chunks) -> Outcome:
        check_case(case)
        profile = profile_of(case.model).profile
        if self._worker is None:
            self._worker = Worker(profile.environment)
        arguments = {
            "case": case.to_json(),
            "profile": profile.to_json(),
            "mutant": self.mutant,
            "chunks": chunks,
        }
        try:
            data = self._worker.call("parity.rerun:rerun_here", arguments, timeout_s=self.timeout_s)
        except WorkerDied as death:
            return Outcome(
                case=case, verdict=Verdict.FAIL, crashed=True, reason=death.reason, stderr=death.stderr
            )
        except RuntimeError as error:
            return Outcome(case=case, verdict=Verdict.FAIL, problems=(f"internal: {error}",))
        return outcome_from_data(case, data)

    def close(self) -> None:
        """End the worker."""
        if self._worker is not None:
            self._worker.close()
            self._worker = None


def without_sessions(case: Case, dropped: set[int]) -> Case:
    """The case less some sessions, their faults gone and the others renumbered."""
    kept = [index for index in range(len(case.sessions)) if index not in dropped]
    number = {old: new for new, old in enumerate(kept)}
    aimed = ("cancel", "preempt")
    faults = tuple(
        replace(fault, session=number.get(fault.session, 0))
        for fault in case.faults
        if fault.kind.value not in aimed or fault.session in number
    )
    return replace(case, sessions=tuple(case.sessions[index] for index in kept), faults=faults)
