"""The main job: generated cases of one family and layout, until enough sessions were
compared; shrunk when one fails.
"""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import monotonic
from typing import Any

from hypothesis import HealthCheck, Phase, example, given, seed, settings
from hypothesis.errors import Flaky

from parity.cases.files import save_failing_case
from parity.cases.policy_options import PolicyOptions
from parity.cases.shrink import shrink_case
from parity.cases.strategies import cases, edges, landmark, steady_backend, tokens_of
from parity.cases.text import REAL_WORK_TOKENS, has_real_vocabulary, text_prompts
from parity.checkers.marks import POLICY_MATTERED, possible_marks
from parity.errors import UsageError
from parity.models.families import load_family
from parity.models.splits import Split, load_splits
from parity.records import Case, Fault, FaultKind, Finding, Outcome, Session, Tier, Verdict, verdict_of
from parity.run.contained import run_case
from parity.run.explain import explain_outcome
from parity.run.profiles import profile_of
from parity.run.runner import BASELINE, policy_mattered
from parity.run.under_test import OURS, Brought, Capabilities
from parity.store import cache_dir
from scheduler.limits import Layout
from scheduler.records import SamplingParams

FAILURES = Path("reports") / "failures"
SHRINK_RUNS = 300
DECLARED = "declared"
AFTER_FAILURES = ("preempted", "resumed", "rebuilt")  # a failed step takes everybody's rows, too


@dataclass(slots=True)
class SuiteResult:
    """What one suite came to. ``marks`` are sums over its cases, ``required`` those that may not stay zero,
    ``missing`` those that did; ``findings`` is what was found wrong in any case.
    """

    family: str
    layout: Layout
    model: str
    verdict: Verdict = Verdict.UNKNOWN
    cases: int = 0
    sessions: int = 0
    bit_identical: int = 0
    byte_identical: int = 0
    crashes: int = 0
    marks: Counter[str] = field(default_factory=Counter)
    required: tuple[str, ...] = ()
    findings: list[Finding] = field(default_factory=list)
    reason: str = ""
    explanation: str = ""
    case_file: str = ""
    failure: Outcome | None = None
    noise: list[float] = field(default_factory=list)
    changes: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    brought: Brought = OURS

    def add(self, outcome: Outcome) -> None:
        self.cases += 1
        self.sessions += outcome.sessions
        self.bit_identical += outcome.bit_identical
        self.byte_identical += outcome.byte_identical
        self.crashes += outcome.crashed
        self.marks.update(outcome.marks)
        self.noise += outcome.noise
        self.changes.update(outcome.changes)
        self.findings += outcome.findings

    @property
    def missing(self) -> tuple[str, ...]:
        return tuple(mark for mark in self.required if not self.marks[mark])

    def judge(self, tier: Tier, *, inexact: str = "") -> tuple[Verdict, str]:
        """The suite's verdict at a tier, and its reason."""
        return verdict_of(
            self.findings,
            sessions=self.sessions,
            tier=tier,
            layout=self.layout,
            marks=self.marks,
            required=self.required,
            inexact=inexact,
        )

    def note_time_is_up(self, missing: tuple[str, ...], min_sessions: int) -> None:
        """Say what was not reached. Without a mark, or without any session, nothing is known."""
        if missing or not self.sessions:
            self.verdict = Verdict.merge((self.verdict, Verdict.UNKNOWN))
        if missing or self.sessions < min_sessions:
            marks = f", never {', '.join(missing)}" if missing else ""
            told = f"time was up after {self.sessions} of {min_sessions} sessions{marks}"
            self.reason = "; ".join(filter(None, (self.reason, told)))

    def to_data(self) -> dict:
        """JSON-able form."""
        return {
            "verdict": self.verdict.value,
            "cases": self.cases,
            "sessions": self.sessions,
            "bit_identical": self.bit_identical,
            "byte_identical": self.byte_identical,
            "crashes": self.crashes,
            "marks": dict(self.marks),
            "missing_marks": list(self.missing),
            "reason": self.reason,
            "explanation": self.explanation,
            "case_file": self.case_file,
            "noise": self.noise[:5000],
            "changed_tokens": dict(self.changes),
            "seconds": round(self.seconds, 2),
            "model": self.model,
        }


class Failed(AssertionError):
    """A case failed; the suite ends."""


class Enough(BaseException):
    """Enough was compared, or time is up: nothing more is drawn. No ``Exception``, which Hypothesis would
    take for a failure of the case.
    """


def run_suite(
    family: str,
    layout: Layout,
    *,
    model: str | None = None,
    policy: str = "fcfs",
    policy_options: PolicyOptions = (),
    steps_in_flight: int = 1,
    shards: int = 1,
    min_sessions: int = 200,
    seed_value: int | None = None,
    tier: Tier = Tier.BITS,
    marks: Iterable[str] | None = None,
    fixed: Sequence[Case] = (),
    brought: Brought = OURS,
    run: Callable[[Case], Outcome] | None = None,
    failures: Path = FAILURES,
    until: float | None = None,
    on_case: Callable[[SuiteResult], None] = lambda result: None,
) -> SuiteResult:
    """Run generated cases until ``min_sessions`` were compared and every required mark was hit.

    ``fixed`` cases run before generated ones, as far as they are needed. ``seed_value`` None is
    derandomised: the same cases every time. A failing case is shrunk, written below
    ``failures`` and explained. Under tier ``bits`` a model without an exact profile, or a user's engine
    without logits, gives *unknown*, with the reason.

    After ``until`` (seconds of the system's monotonic clock) no further case begins; marks that were not hit
    by then make the suite *unknown*. ``on_case`` is told of the result so far, first before the self-test.
    """
    started = monotonic()
    model = model or family
    result = SuiteResult(family, layout, model, brought=brought)
    on_case(result)
    if marks is None:
        ways = {"overlaps": steps_in_flight > 1, "in_shards": shards > 1}
        marks = required_marks(family, layout, model, brought, **ways)
    # A brought scheduler is judged by its own schedule, of which there is no fcfs to compare with.
    by_policy = policy != BASELINE and not (brought.scheduler or brought.scheduler_command)
    required = (*marks, *((POLICY_MATTERED,) if by_policy else ()))
    result.required = required
    why_no_bits = brought.why_no_bits() if brought.engine else profile_of(model).reason
    failing: list[Outcome] = []

    def is_late() -> bool:
        return until is not None and monotonic() >= until

    def enough() -> bool:
        return is_late() or result.sessions >= min_sessions and all(result.marks[mark] for mark in required)

    def judged(case: Case) -> Outcome:
        outcome = run_case(case, brought=brought) if run is None else run(case)
        failed = outcome.verdict_for(tier, inexact=why_no_bits) is Verdict.FAIL
        return replace(outcome, verdict=Verdict.FAIL if failed else Verdict.PASS)

    def note_policy(case: Case) -> None:
        """Whether the policy mattered, asked until it once did."""
        if POLICY_MATTERED in required and not result.marks[POLICY_MATTERED]:
            result.marks[POLICY_MATTERED] += policy_mattered(case)

    def one(case: Case) -> None:
        case = replace(case, steps_in_flight=steps_in_flight, shards=shards)
        if not failing and enough():
            raise Enough
        if failing and case != failing[0].case:
            return
        outcome = judged(case)
        if not failing:
            result.add(outcome)
            note_policy(case)
            on_case(result)
        if outcome.verdict is Verdict.FAIL:
            failing.append(outcome)
            raise Failed(outcome.case.family)

    under = {"policy": policy, "policy_options": policy_options}
    memory = None if seed_value is None else failures_folder(family, layout, model, brought)
    remembered = [] if memory is None else [read_known(path) for path in sorted(memory.glob("*.json"))]
    wrapped = _generated(
        one, family, layout, model, under, fixed, min_sessions=min_sessions, seed_value=seed_value
    )
    for case in filter(None, remembered):
        wrapped = example(case)(wrapped)  # the last one decorated runs first
    try:
        wrapped()
    except Enough:
        pass
    except (Failed, Flaky):
        if not failing:
            raise  # a bug of ours, not a case that failed
        _keep_failure(result, failing[0], judged, failures)
        if memory is not None:
            save_failing_case(result.failure.case, memory)
    all_passed = memory is not None and not failing and not is_late()
    for path in memory.glob("*.json") if all_passed else ():
        path.unlink()  # what failed once passes now
    if result.changes:
        counts = ", ".join(f"{count} {change}" for change, count in sorted(result.changes.items()))
        result.explanation = f"sessions with a changed token: {counts}\n{result.explanation}".rstrip()
    result.findings += contradicted(result.marks, brought.capabilities)
    late = result.missing if is_late() and not failing else ()
    if late:
        result.required = tuple(mark for mark in required if mark not in late)
    result.verdict, result.reason = result.judge(tier, inexact=why_no_bits)
    if is_late() and not failing:
        result.note_time_is_up(late, min_sessions)
    result.seconds = monotonic() - started
    return result


def contradicted(marks: Mapping[str, int], capabilities: Capabilities) -> list[Finding]:
    """What a scheduler was seen to do although it declares that it cannot."""
    return [
        Finding(
            DECLARED, f"{mark} was seen {marks[mark]} times, though the scheduler declares that it cannot"
        )
        for mark in capabilities.absent_marks
        if mark not in AFTER_FAILURES and marks[mark]
    ]


def required_marks(
    family: str,
    layout: Layout,
    model: str,
    brought: Brought,
    *,
    overlaps: bool = False,
    in_shards: bool = False,
) -> tuple[str, ...]:
    """Marks that may not stay zero: the manifest's, and all that the layout can have (``overlaps``: with
    several steps in flight; ``in_shards``: in several). A stop token is sure to come only where all tokens
    can be named.
    """
    pads = brought.engine is not None or profile_of(model).profile.for_layout(layout).pad_lone_rows
    possible = possible_marks(layout, pads=pads, overlaps=overlaps, in_shards=in_shards)
    may_not_stop = brought.engine is not None or has_real_vocabulary(model)
    wanted = [mark for mark in possible if mark != "stopped" or not may_not_stop]
    absent = brought.capabilities.absent_marks
    all_marks = [*(mark.value for mark in load_family(family).marks), *wanted]
    return tuple(dict.fromkeys(mark for mark in all_marks if mark not in absent))


def _generated(
    one: Callable[[Case], None],
    family: str,
    layout: Layout,
    model: str,
    under: Mapping[str, Any],
    fixed: Sequence[Case],
    *,
    min_sessions: int,
    seed_value: int | None,
) -> Callable[[], None]:
    """``one`` as a Hypothesis test over cases; a model with a real vocabulary is given text."""
    text: dict = {"tokens": text_prompts(model)} if has_real_vocabulary(model) else {}
    work = {"work_tokens": REAL_WORK_TOKENS} if text else {}
    wrapped = given(cases(family, layout, model=model, **under, **text, **work))(one)
    examples = [make(family, layout, model=model, **under, **text) for make in (landmark, edges)]
    for case in reversed([*examples, *fixed]):  # the last one decorated runs first
        wrapped = example(case)(wrapped)
    wrapped = settings(
        max_examples=max(20, min_sessions),
        backend=steady_backend(),
        deadline=None,
        derandomize=seed_value is None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.explicit, Phase.reuse, Phase.generate],  # a failing explicit example is never shrunk
        print_blob=False,
    )(wrapped)
    return wrapped if seed_value is None else seed(seed_value)(wrapped)


def _keep_failure(
    result: SuiteResult, outcome: Outcome, run: Callable[[Case], Outcome], failures: Path
) -> None:
    """Shrink the failing case, write it and explain it; one that passes when run again is kept as it was."""
    ran: dict[Case, Outcome] = {}

    def kept_run(case: Case) -> Outcome:
        ran[case] = run(case)
        return ran[case]

    smallest = ran[shrink_case(outcome.case, kept_run, max_runs=SHRINK_RUNS)]
    kept = smallest if smallest.verdict is Verdict.FAIL else outcome
    path = save_failing_case(kept.case, failures, stderr=kept.stderr, brought=result.brought.parts)
    result.case_file, result.failure = str(path), kept
    result.explanation = explain_outcome(kept, case_file=path, options=result.brought.options)
    if kept is not smallest:  # reported before parity
        result.explanation = f"not reproducible: it passed when it ran again\n{result.explanation}"


def failures_folder(family: str, layout: Layout, model: str, brought: Brought) -> Path:
    """Where a suite with a seed remembers what failed, to try it first the next time: one folder for each
    family, layout, model and brought part.
    """
    who = hashlib.blake2b(f"{model}{brought.options}".encode(), digest_size=6).hexdigest()
    return cache_dir("failures", f"{family}-{layout.value}-{who}")


def read_known(path: Path) -> Case | None:
    """A case that failed before; None, and forgotten, if an earlier version wrote it otherwise."""
    try:
        return Case.from_json(path.read_text(encoding="utf-8"), where=str(path))
    except (UsageError, ValueError):
        path.unlink()
        return None


# -- Suites across stages: generated concurrent cases on every pinned split, each session
# against the whole model alone.

MIN_SESSIONS = 50
ROOMIER_CELLS = 24


def pinned_splits(family: str, row: str = "tiny") -> list[Split]:
    """Splits of one model row, in the file's order. Raises ``UsageError`` if there is none."""
    splits = [split for split in load_splits(family) if split.row == row]
    if not splits:
        raise UsageError(f"model {family}:{row} has no pinned split", where=f"splits/{family}.yaml")
    return splits


def across_stages(case: Case, split: Split) -> Case:
    """The case on a chain whose pools differ in size; which stage has the smallest pool depends on the case,
    and whether as many steps are in flight as there are stages.

    Different pools mean different cells, so different row orders and calls, in every stage.
    """
    count = len(split.stages)
    depth = 1 if len(case.sessions) % 3 == 1 else count
    case = replace(case, steps_in_flight=depth)
    if case.layout is not Layout.UNIFIED:
        return replace(case, split=split.name)
    tightest = (len(case.sessions) + case.num_sequences) % count
    cells = tuple(case.pool_cells + ROOMIER_CELLS * ((index - tightest) % count) for index in range(count))
    return replace(case, split=split.name, stage_cells=cells)


def crowd_case(family: str, split: Split, number: int, *, sessions: int = 18) -> Case:
    """A dense case: many sessions at once on a chain with one tight pool, so that
    few steps exercise everything.

    ``number`` chooses lengths, arrivals and faults; families of prompts share their first tokens.
    """
    rng = random.Random(f"crowd {family} {split.name} {number}")
    trees = [tokens_of(rng.randrange(1 << 30), 48) for _ in range(2)]
    cancelled = rng.sample(range(sessions), 2)  # while they wait or run
    made = []
    for index in range(sessions):
        own = tokens_of(rng.randrange(1 << 30), rng.choice((1, 2, 5, 15, 16, 17, 31, 33, 48, 70)))
        prompt = own if index % 3 == 0 else trees[index % 2][: rng.choice((16, 17, 32, 40))] + own[:9]
        sampling = SamplingParams(temperature=1.0, seed=index) if index % 7 == 3 else SamplingParams()
        made.append(
            Session(
                prompt=prompt,
                max_tokens=9 if index in cancelled else rng.randint(2, 9),
                arrival_step=0 if index in cancelled else rng.choice((0, 0, index, 18)),
                sampling=sampling,
            )
        )
    faults = [
        Fault(kind=FaultKind.PREEMPT, step=step, session=rng.randrange(sessions), in_flight=step % 4 == 3)
        for step in range(3, 21, 2)
    ]
    # Of so many, some are in a step at that time: a suite relies on it.
    faults += [
        Fault(kind=FaultKind.PREEMPT, step=9, session=index, in_flight=True) for index in range(sessions)
    ]
    faults += [
        Fault(kind=FaultKind.CANCEL, step=step, session=session, in_flight=step == 4)
        for step, session in zip((2, 4), cancelled, strict=True)
    ]
    case = Case(
        family=family,
        model=f"{family}:{split.row}",
        sessions=tuple(made),
        pool_cells=230,
        num_sequences=20,
        max_num_batched_tokens=63,
        max_num_seqs=14,
        max_chunk_tokens=32,
        prefix_block_tokens=8,
        faults=tuple(faults),
        kv_type="f32" if number % 3 == 2 else "f16",
    )
    return replace(across_stages(case, split), steps_in_flight=len(split.stages) if number else 1)


def brim_case(family: str, split: Split) -> Case:
    """A small case that fills the tightest pool: beside a prefix that is kept but idle, then to its last cell
    by a session that only an empty pool has room for.
    """
    kept = tokens_of(1, 32)
    sessions = (
        Session(prompt=kept, max_tokens=2),
        Session(prompt=tokens_of(2, 12), max_tokens=42, arrival_step=6),
        Session(prompt=kept + tokens_of(3, 5), max_tokens=3, arrival_step=52),
        Session(prompt=tokens_of(4, 40), max_tokens=64 + 1 - 40, arrival_step=62),  # fits exactly
    )
    case = Case(
        family=family,
        model=f"{family}:{split.row}",
        sessions=sessions,
        pool_cells=64,
        num_sequences=8,
        max_num_batched_tokens=32,
        prefix_block_tokens=16,
    )
    return across_stages(case, split)


def dense_cases(family: str, split: Split) -> list[Case]:
    """Fixed cases that compare more than ``MIN_SESSIONS`` sessions and hit every
    mark of every family's manifest.
    """
    return [brim_case(family, split), *(crowd_case(family, split, number) for number in range(3))]


def run_split_suite(
    family: str,
    split: Split,
    *,
    min_sessions: int = MIN_SESSIONS,
    layout: Layout = Layout.UNIFIED,
    stage_processes: bool = False,
    seed_value: int | None = None,
    tier: Tier = Tier.BITS,
    failures: Path = FAILURES,
    run: Callable[..., Outcome] = run_case,
) -> SuiteResult:
    """``run_suite`` with every case on a chain of the split's stages."""

    def run_across(case: Case) -> Outcome:
        return run(across_stages(case, split), stage_processes=stage_processes)

    return run_suite(
        family,
        layout,
        model=f"{family}:{split.row}",
        min_sessions=min_sessions,
        seed_value=seed_value,
        tier=tier,
        marks=required_marks(family, layout, f"{family}:{split.row}", OURS, overlaps=True),
        # Generated cases preempt while a step is in flight too rarely to be relied upon.
        fixed=(replace(crowd_case(family, split, 1), layout=layout),),
        run=run_across,
        failures=failures,
    )


__all__ = [
    "MIN_SESSIONS",
    "across_stages",
    "brim_case",
    "crowd_case",
    "dense_cases",
    "pinned_splits",
    "run_split_suite",
]
