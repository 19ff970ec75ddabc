"""Runs a campaign's batches on an executor, keeps count, and keeps what failed."""

from __future__ import annotations

import multiprocessing
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic

from hypothesis.database import DirectoryBasedExampleDatabase, ExampleDatabase

from parity.campaign import FEATURE_PAIRS, Plan, first_complaint, run_batch
from parity.case_files import save_failing_case
from parity.checkers.marks import MARKS
from parity.errors import UsageError
from parity.records import Case
from parity.rerun import Rerun
from parity.shrink import shrink_case
from parity.signature import fault_signature, is_same_fault

DATABASE_KEY = b"samebytes campaign"
MAX_SHRINK_RUNS = 400


@dataclass(slots=True)
class Found:
    """One kind of failure: its smallest case, where that was stored, and how often it came up."""

    signature: tuple[str, ...]
    case: Case
    text: str
    count: int = 1
    path: str = ""
    stderr: str = ""


@dataclass(slots=True)
class Tally:
    """What a campaign came to so far. ``batches`` lists the numbers of the batches in it, each once."""

    cases: int = 0
    sessions: int = 0
    marks: Counter[str] = field(default_factory=Counter)
    pairs: Counter[str] = field(default_factory=Counter)
    batches: list[int] = field(default_factory=list)
    found: dict[tuple[str, ...], Found] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def failures(self) -> int:
        return sum(found.count for found in self.found.values())

    @property
    def missing_marks(self) -> list[str]:
        return [mark for mark in MARKS if not self.marks[mark]]

    @property
    def missing_pairs(self) -> list[str]:
        names = ["+".join(pair) for pair in FEATURE_PAIRS]
        return [name for name in names if not self.pairs[name]]

    def add(self, answer: dict) -> None:
        """Count one batch. Raises ValueError for a batch that is in already."""
        if answer["number"] in self.batches:
            raise ValueError(f"batch {answer['number']} came twice")
        self.batches.append(answer["number"])
        self.cases += answer["cases"]
        self.sessions += answer["sessions"]
        self.marks.update(answer["marks"])
        self.pairs.update(answer["pairs"])
        for failure in answer["failures"]:
            signature = tuple(failure["signature"])
            if signature in self.found:
                self.found[signature].count += 1
            else:
                case = Case.from_json(failure["case"], where="campaign")
                self.found[signature] = Found(signature, case, failure["text"], stderr=failure["stderr"])

    def to_data(self) -> dict:
        """JSON-able form."""
        return {
            "cases": self.cases,
            "sessions": self.sessions,
            "failures": self.failures,
            "seconds": round(self.seconds, 1),
            "marks": dict(self.marks),
            "missing_marks": self.missing_marks,
            "pairs": dict(self.pairs),
            "missing_pairs": self.missing_pairs,
            "batches": sorted(self.batches),
            "found": [
                {"signature": list(f.signature), "text": f.text, "count": f.count, "file": f.path}
                for f in self.found.values()
            ],
        }


@contextmanager
def open_executor(spec: str, jobs: int) -> Iterator[Executor]:
    """``local``: processes of this machine; ``dask://HOST:PORT``: the workers of a Dask scheduler."""
    if spec == "local":
        context = multiprocessing.get_context(
            "spawn"
        )  # a fork would share the database and the library's threads
        with ProcessPoolExecutor(jobs, mp_context=context) as pool:
            yield pool
        return
    kind, _, address = spec.partition("://")
    if kind != "dask" or not address:
        raise UsageError(f"executor {spec!r}", where="--executor", todo="use local or dask://HOST:PORT")
    try:
        from distributed import Client
    except ImportError as error:
        raise UsageError(
            "dask is not installed",
            where="--executor",
            why=str(error),
            todo="install the extra: pip install samebytes[dask]",
        ) from error
    try:
        client = Client(f"tcp://{address}", timeout=10)
    except OSError as error:
        raise UsageError("no Dask scheduler answers", where=address, why=str(error)) from error
    with client:
        # Tasks are pure: one whose worker dies runs again on another, and its answer counts once.
        yield client.get_executor(retries=3)


def run_campaign(
    plan: Plan,
    executor: Executor,
    *,
    minutes: float,
    jobs: int,
    shard: tuple[int, int] = (1, 1),
    max_batches: int | None = None,
    collect: bool = False,
    on_batch: Callable[[Tally], None] = lambda tally: None,
) -> Tally:
    """Run this shard's batches until the time is up, ``max_batches`` are done, or something failed.

    With ``collect`` failures do not end it.
    """
    index, count = shard
    started, tally, number = monotonic(), Tally(), index - 1
    submitted = 0
    pending: dict[Future, int] = {}

    def more() -> bool:
        if max_batches is not None and submitted >= max_batches:
            return False
        return (monotonic() - started < 60 * minutes) and (collect or not tally.found)

    while True:
        while len(pending) < 2 * jobs and more():
            pending[executor.submit(run_batch, plan.batch(number))] = number
            number += count
            submitted += 1
        if not pending:
            break
        done, _ = wait(pending, return_when=FIRST_COMPLETED)
        for future in sorted(done, key=pending.__getitem__):
            del pending[future]
            tally.add(future.result())
        tally.seconds = monotonic() - started
        on_batch(tally)
    return tally


def keep_failures(tally: Tally, plan: Plan, folder: Path) -> None:
    """Shrink every kind of failure once and store its case, as ``tests/regressions`` holds them.

    Kinds that are one when they are small are merged: what told them apart had nothing to do with the fault.
    """
    run, kept = Rerun(exact=plan.exact, mutant=plan.mutant), {}
    try:
        for found in tally.found.values():
            small = shrink_case(found.case, run, max_runs=MAX_SHRINK_RUNS)
            outcome = run(small)
            found.case = small
            found.text = first_complaint(outcome) or found.text
            if is_same_fault(found.signature, signature := fault_signature(outcome)):
                found.signature = signature
            else:
                found.text += " (not when run again)"
            if found.signature in kept:
                kept[found.signature].count += found.count
                continue
            kept[found.signature] = found
            found.path = str(save_failing_case(small, folder, stderr=outcome.stderr or found.stderr))
    finally:
        run.close()
    tally.found = kept


def open_database(folder: Path) -> ExampleDatabase:
    """The database of failing cases, which campaigns may share and keep; a
    Hypothesis database of case texts.
    """
    return DirectoryBasedExampleDatabase(folder)


def known_failures(database: ExampleDatabase) -> list[Case]:
    """Cases that failed in earlier campaigns; unreadable ones are dropped from the database."""
    known = []
    for value in sorted(database.fetch(DATABASE_KEY)):
        try:
            known.append(Case.from_json(value.decode(), where="database"))
        except (UsageError, UnicodeDecodeError):
            database.delete(DATABASE_KEY, value)
    return known
