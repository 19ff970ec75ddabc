"""Runs a case again otherwise: on another engine, with a planted fault, with given chunk boundaries."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from parity.mutants import find_mutant
from parity.mutants.mutant import Reach, replaced
from parity.processes import Worker
from parity.records import Case, Outcome
from parity.run.contained import Chunks, run_case
from parity.run.profiles import profile_of
from parity.run.runner import check_settings, run_case_here, run_exact_case
from parity.run.under_test import OURS, Brought
from scheduler.policy.base import Policy

TIMEOUT_S = 60.0


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
    brought: Brought = OURS
    count: int = 0
    _worker: Worker | None = None

    def __call__(self, case: Case, chunks: Chunks = ()) -> Outcome:
        """The outcome; ``chunks`` are the intervals of session 0."""
        self.count += 1
        return self._exact(case, chunks) if self.exact else self._contained(case, chunks)

    def _exact(self, case: Case, chunks: Chunks) -> Outcome:
        check_settings(case)
        with ExitStack() as stack:
            if self.mutant is not None:
                stack.enter_context(find_mutant(self.mutant).plant(Reach()))
            if chunks:
                stack.enter_context(given_chunks(chunks))
            return run_exact_case(case)

    def _contained(self, case: Case, chunks: Chunks) -> Outcome:
        if self._worker is None:
            exact = not self.brought.engine
            self._worker = Worker(profile_of(case.model).profile.environment if exact else ())
        return run_case(
            case,
            mutant=self.mutant,
            # A brought scheduler makes its own chunks.
            chunks=chunks if self.brought == OURS else (),
            worker=self._worker,
            timeout_s=self.timeout_s,
            brought=self.brought,
        )

    def close(self) -> None:
        """End the worker."""
        if self._worker is not None:
            self._worker.close()
            self._worker = None
