"""Every scenario template on the exact engine: shapes of input behind faults that serving engines had."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from hypothesis import HealthCheck, Phase, given, settings

from parity.cases.scenarios import SCENARIOS, Scenario
from parity.records import Case, Outcome, Verdict
from parity.run.runner import run_exact_case

EXACT_FAMILIES = ("llama", "gemma2", "qwen3next")  # one of each kind that the exact engine has
PER_LAYOUT = 10


class TemplateFailed(AssertionError):
    """A case of a template is not green; ``outcome`` is what it came to."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(f"{outcome.reason} {outcome.findings} {outcome.divergences}")
        self.outcome = outcome


def run_template(
    scenario: Scenario, family: str, run: Callable[[Case], Outcome] = run_exact_case, *, per_layout: int
) -> Counter[str]:
    """Marks over ``per_layout`` of the template's cases in each of its layouts, the same every time. Raises
    ``TemplateFailed``.
    """
    marks: Counter[str] = Counter()

    def one(case: Case) -> None:
        outcome = run(case)
        marks.update(outcome.marks)
        if outcome.verdict is not Verdict.PASS:
            raise TemplateFailed(outcome)

    for layout in scenario.layouts:
        settings(
            max_examples=per_layout,
            deadline=None,
            derandomize=True,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )(given(scenario.at(family, layout))(one))()
    return marks


def exact_templates() -> list[Scenario]:
    """Templates that the exact engine can play."""
    return [scenario for scenario in SCENARIOS if scenario.on_exact]
