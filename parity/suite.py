"""The main job: generated cases of one family and layout, until enough sessions were compared; shrunk when
one fails."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic

from hypothesis import HealthCheck, Phase, example, given, seed, settings
from hypothesis.database import DirectoryBasedExampleDatabase
from hypothesis.errors import Flaky

from parity.contained import run_case
from parity.corpus import REAL_WORK_TOKENS, has_real_vocabulary, text_prompts
from parity.explain import explain_outcome, save_failing_case
from parity.families import load_family
from parity.profiles import profile_of
from parity.records import Case, Outcome, Tier, Verdict
from parity.store import REPOSITORY
from parity.strategies import cases, landmark
from scheduler.limits import Layout

FAILURES = Path("reports") / "failures"


@dataclass(slots=True)
class SuiteResult:
    """What one suite came to. ``marks`` are sums over its cases; ``missing`` are required marks that stayed
    zero."""

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
    missing: tuple[str, ...] = ()
    reason: str = ""
    explanation: str = ""
    case_file: str = ""
    failure: Outcome | None = None
    noise: list[float] = field(default_factory=list)
    seconds: float = 0.0

    def add(self, outcome: Outcome) -> None:
        self.cases += 1
        self.sessions += outcome.sessions
        self.bit_identical += outcome.bit_identical
        self.byte_identical += outcome.byte_identical
        self.crashes += outcome.crashed
        self.marks.update(outcome.marks)
        self.noise += outcome.noise

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
            "seconds": round(self.seconds, 2),
            "model": self.model,
        }


class Failed(AssertionError):
    """A case that failed; Hypothesis shrinks it."""


def run_suite(
    family: str,
    layout: Layout,
    *,
    model: str | None = None,
    policy: str = "fcfs",
    min_sessions: int = 200,
    seed_value: int | None = None,
    tier: Tier = Tier.BITS,
    marks: Iterable[str] | None = None,
    run: Callable[[Case], Outcome] = run_case,
    failures: Path = FAILURES,
    on_case: Callable[[SuiteResult], None] = lambda result: None,
) -> SuiteResult:
    """Run generated cases until ``min_sessions`` were compared and every required mark was hit.

    ``seed_value`` None is derandomised: the same cases every time. A failing case is shrunk, written below
    ``failures`` and explained. Under tier ``bits`` a model without an exact profile gives *unknown*, with the
    reason.
    """
    started = monotonic()
    model = model or family
    required = tuple(marks if marks is not None else (mark.value for mark in load_family(family).marks))
    result = SuiteResult(family, layout, model)
    choice = profile_of(model)
    failing: list[Outcome] = []
    compare_bits = tier is Tier.BITS and choice.exact and layout is not Layout.STOCK

    def enough() -> bool:
        return result.sessions >= min_sessions and all(result.marks[mark] for mark in required)

    def one(case: Case) -> None:
        if not failing and enough():
            return
        outcome = run(case)
        if not failing:
            result.add(outcome)
            on_case(result)
        if _fails(outcome, compare_bits=compare_bits, layout=layout):
            failing.append(outcome)
            raise Failed(outcome.case.family)

    wrapped = _generated(one, family, layout, model, policy, min_sessions=min_sessions, seed_value=seed_value)
    try:
        wrapped()
    except Failed:
        _keep_failure(result, failing[-1], failures)  # Hypothesis runs its smallest example last
    except Flaky as flaky:  # the case passed when Hypothesis ran it again: reported before parity
        if not failing:
            raise  # a bug of ours, not a case that failed
        _keep_failure(result, failing[-1], failures)
        result.explanation = f"not reproducible: {flaky}\n{result.explanation}"
    result.missing = tuple(mark for mark in required if not result.marks[mark])
    result.verdict, result.reason = _judge(result, failed=bool(failing), reason=choice.reason, tier=tier)
    result.seconds = monotonic() - started
    return result


def _generated(
    one: Callable[[Case], None],
    family: str,
    layout: Layout,
    model: str,
    policy: str,
    *,
    min_sessions: int,
    seed_value: int | None,
) -> Callable[[], None]:
    """``one`` as a Hypothesis test over cases; a model with a real vocabulary is given text."""
    text: dict = {"tokens": text_prompts(model)} if has_real_vocabulary(model) else {}
    work = {"work_tokens": REAL_WORK_TOKENS} if text else {}
    wrapped = given(cases(family, layout, model=model, policy=policy, **text, **work))(one)
    wrapped = example(landmark(family, layout, model=model, policy=policy, **text))(wrapped)
    wrapped = settings(
        max_examples=max(20, min_sessions),
        deadline=None,
        derandomize=seed_value is None,
        database=_database(seed_value),
        suppress_health_check=list(HealthCheck),
        phases=[Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink],
        print_blob=False,
    )(wrapped)
    return wrapped if seed_value is None else seed(seed_value)(wrapped)


def _keep_failure(result: SuiteResult, outcome: Outcome, failures: Path) -> None:
    """Write the failing case and explain it."""
    path = save_failing_case(outcome.case, failures)
    result.case_file, result.failure = str(path), outcome
    result.explanation = explain_outcome(outcome, case_file=path)


def _fails(outcome: Outcome, *, compare_bits: bool, layout: Layout) -> bool:
    if outcome.crashed or outcome.problems:
        return True
    if layout is Layout.STOCK:
        return outcome.verdict is Verdict.FAIL
    identical = outcome.bit_identical if compare_bits else outcome.byte_identical
    return identical < outcome.sessions


def _judge(result: SuiteResult, *, failed: bool, reason: str, tier: Tier) -> tuple[Verdict, str]:
    if failed:
        return Verdict.FAIL, "a case failed"
    if result.missing:
        return Verdict.FAIL, f"nothing exercised: {', '.join(result.missing)}"
    if tier is Tier.BITS and reason and result.layout is not Layout.STOCK:
        return Verdict.UNKNOWN, f"bits not comparable: {reason}"
    return Verdict.PASS, ""


def _database(seed_value: int | None) -> DirectoryBasedExampleDatabase | None:
    """A campaign remembers what failed; the derandomised run explores nothing and keeps nothing."""
    return (
        None if seed_value is None else DirectoryBasedExampleDatabase(REPOSITORY / ".hypothesis" / "examples")
    )
