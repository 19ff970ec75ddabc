"""Campaigns: cases explored from a seed, in batches that any ``concurrent.futures.Executor`` can run.

Batch number b of a seed holds the same cases on every machine and for every number of jobs or shards; shard I
of N takes the batches with b % N == I - 1.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, wait
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import combinations
from pathlib import Path
from time import monotonic
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.database import DirectoryBasedExampleDatabase, ExampleDatabase

from parity.campaign.rerun import Rerun
from parity.cases.files import save_failing_case
from parity.cases.policy_options import PolicyOptions
from parity.cases.scenarios import SCENARIOS
from parity.cases.shrink import fault_signature, is_same_fault, shrink_case
from parity.cases.strategies import FEATURES, cases, edges, landmark, steady_backend, within_limits
from parity.checkers.marks import MARKS
from parity.errors import UsageError
from parity.processes import process_pool
from parity.records import Case, FaultKind, Outcome, Verdict
from parity.run.contained import run_case
from parity.run.under_test import OURS, Brought
from scheduler.limits import Layout
from scheduler.policies import policy_names

BATCH_CASES = 12
STEPS_IN_FLIGHT = (1, 2, 1, 3)  # of the cases of a batch, in turn
SHARDS = (1, 1, 2, 1, 4)  # likewise, under our own scheduler
DEFAULT_LAYOUTS = (Layout.UNIFIED, Layout.STREAMS)
FEATURE_PAIRS = tuple(combinations(FEATURES, 2))
_KIND_OF_FEATURE = {
    "cancel": {FaultKind.CANCEL},
    "preempt": {FaultKind.PREEMPT},
    "failures": {FaultKind.DECODE_ERROR, FaultKind.NO_SLOT, FaultKind.WORKER_KILLED, FaultKind.OUT_OF_MEMORY},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a campaign explores. Families take turns; layout, policy and template are drawn.

    No ``policies`` are all of them, and then a template that is about a policy keeps it.
    """

    families: tuple[str, ...]
    policies: tuple[str, ...] = ()
    policy_options: PolicyOptions = ()
    layouts: tuple[Layout, ...] = DEFAULT_LAYOUTS
    seed: int = 0
    exact: bool = False
    mutant: str | None = None
    brought: Brought = OURS

    def rerun(self) -> Rerun:
        """Runs single cases as the campaign's batches do."""
        return Rerun(exact=self.exact, mutant=self.mutant, brought=self.brought)

    def batch(self, number: int) -> dict[str, Any]:
        """The order for batch ``number``: JSON-able, so that it can be sent anywhere."""
        rng = random.Random(f"{self.seed}/{number}")
        layout = rng.choice(self.layouts)
        templates = [s for s in SCENARIOS if layout in s.layouts and (s.on_exact or not self.exact)]
        # Every other batch is general: templates are narrow on purpose.
        template = rng.choice(templates) if rng.random() < 0.5 else None
        drawn = rng.choice(self.policies or policy_names())
        own = template.policy if template is not None and not self.policies else None
        return {
            "number": number,
            "seed": self.seed,
            "family": self.families[number % len(self.families)],
            "layout": layout.value,
            "policy": own or drawn,
            "policy_options": self.policy_options,
            "template": template.name if template is not None else "",
            "exact": self.exact,
            "mutant": self.mutant,
            "brought": self.brought.parts,
        }


def draw_batch(order: dict[str, Any]) -> list[Case]:
    """The cases of a batch: the same for the same order, whatever ran before."""
    family, layout, policy = order["family"], Layout(order["layout"]), order["policy"]
    drawn: list[Case] = []
    if order["template"]:
        scenario = next(s for s in SCENARIOS if s.name == order["template"])
        strategy = scenario.at(family, layout, policy=policy)
    else:
        options = tuple((name, value) for name, value in order["policy_options"])
        under = {"policy": policy, "policy_options": options}
        strategy = cases(family, layout, **under)
        drawn += [fixed(family, layout, **under) for fixed in (landmark, edges)]

    @seed(order["seed"] * 1_000_003 + order["number"])
    @settings(
        max_examples=BATCH_CASES,
        deadline=None,
        database=None,
        backend=steady_backend(),
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def take(case: Case) -> None:
        case = within_limits(case)
        if case not in drawn:
            drawn.append(case)

    take()
    depths = itertools.cycle(STEPS_IN_FLIGHT)
    shards = itertools.cycle((1,) if brings_scheduler(order) else SHARDS)
    return [replace(case, steps_in_flight=next(depths), shards=next(shards)) for case in drawn]


def brings_scheduler(order: dict[str, Any]) -> bool:
    """Whether a batch runs under a scheduler that a user brings."""
    return any(order["brought"].get(part) for part in ("scheduler", "scheduler_command"))


def run_batch(order: dict[str, Any]) -> dict[str, Any]:
    """Draw and run a batch; what an executor is given. JSON-able in and out.

    ``failures`` holds, per failing case, its text, its signature, the first thing that was wrong, and
    the last that its worker said.
    """
    marks: dict[str, int] = {}
    pairs: dict[str, int] = {}
    failures: list[dict[str, Any]] = []
    drawn = draw_batch(order)
    sessions = 0
    for case in drawn:
        outcome = _run(case, order)
        sessions += outcome.sessions
        for name, count in outcome.marks.items():
            marks[name] = marks.get(name, 0) + count
        for pair in combinations(features_of(case), 2):
            name = "+".join(pair)
            pairs[name] = pairs.get(name, 0) + 1
        if outcome.verdict is Verdict.FAIL:
            failures.append(
                {
                    "case": case.to_json(),
                    "signature": list(fault_signature(outcome)),
                    "text": first_complaint(outcome),
                    "stderr": outcome.stderr,
                }
            )
    return {
        "number": order["number"],
        "cases": len(drawn),
        "sessions": sessions,
        "marks": marks,
        "pairs": pairs,
        "failures": failures,
    }


def _run(case: Case, order: dict[str, Any]) -> Outcome:
    if not order["exact"]:
        return run_case(case, mutant=order["mutant"], brought=Brought(**order["brought"]))
    return Rerun(exact=True, mutant=order["mutant"])(case)


def features_of(case: Case) -> list[str]:
    """Which features a case has, in the order of ``FEATURES``, read off the case."""
    sessions = case.sessions
    need = sum(len(session.prompt) + session.max_tokens - 1 for session in sessions)
    longest = max(len(session.prompt) + session.max_tokens - 1 for session in sessions)
    room = longest if case.layout is Layout.STREAMS else need
    kinds = {fault.kind for fault in case.faults}
    has = {
        "shared": case.prefix_cache and _share(sessions),
        "arrivals": any(session.arrival_step for session in sessions),
        "tight_pool": case.pool_cells <= room,
        "few_lanes": case.max_num_seqs <= 3,
        "seeded": any(session.sampling.temperature for session in sessions),
        "stops": any(session.stop_token_ids for session in sessions),
        **{feature: bool(kinds & some) for feature, some in _KIND_OF_FEATURE.items()},
    }
    return [feature for feature in FEATURES if has[feature]]


def _share(sessions: Sequence[Any]) -> bool:
    first = [session.prompt[0] for session in sessions]
    return len(set(first)) < len(first)


def first_complaint(outcome: Outcome) -> str:
    """One line: the first thing that was wrong."""
    if outcome.crashed:
        return f"crash: {outcome.reason}"
    return str(outcome.findings[0]) if outcome.findings else outcome.reason


# -- Runs a campaign's batches on an executor, keeps count, and keeps what failed.

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
    """What a campaign came to so far. ``batches`` lists the numbers of the batches in it, each once;
    ``cut_off`` says what ended it early.
    """

    cases: int = 0
    sessions: int = 0
    marks: Counter[str] = field(default_factory=Counter)
    pairs: Counter[str] = field(default_factory=Counter)
    batches: list[int] = field(default_factory=list)
    found: dict[tuple[str, ...], Found] = field(default_factory=dict)
    seconds: float = 0.0
    cut_off: str = ""

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
            "cut_off": self.cut_off,
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
        with process_pool(jobs) as pool:
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
    tally: Tally | None = None,
) -> Tally:
    """Run this shard's batches until the time is up, ``max_batches`` are done, or something failed.

    With ``collect`` failures do not end it. It counts in ``tally``, which a caller that is interrupted keeps.
    """
    index, count = shard
    tally = Tally() if tally is None else tally
    started, number = monotonic(), index - 1
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


def keep_failures(tally: Tally, plan: Plan, folder: Path, *, shrink: bool = True) -> None:
    """Shrink every kind of failure once and store its case, as ``tests/regressions`` holds them.

    Without ``shrink`` the cases are stored as they are: there is no time.

    Kinds that are one when they are small are merged: what told them apart had nothing to do with the fault.
    """
    if not shrink:
        for found in tally.found.values():
            found.path = str(
                save_failing_case(found.case, folder, stderr=found.stderr, brought=plan.brought.parts)
            )
        return
    run, kept = plan.rerun(), {}
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
            found.path = str(
                save_failing_case(
                    small, folder, stderr=outcome.stderr or found.stderr, brought=plan.brought.parts
                )
            )
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
