"""Shapes of input behind faults that serving engines had: every template, green, and its marks hit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from parity.cases.scenarios import SCENARIOS, Scenario
from parity.cases.strategies import tokens_of
from parity.mutants import cases
from parity.mutants.mutant import Reach
from parity.mutants.seam import in_method
from parity.plugin import family_params
from parity.records import Case, Fault, FaultKind, Session, Verdict
from parity.run.contained import run_case
from parity.run.runner import run_exact_case
from parity.suites.templates import EXACT_FAMILIES, PER_LAYOUT, exact_templates, run_template
from scheduler.policy.base import Policy

FAMILIES = family_params()
EXACT = family_params(*EXACT_FAMILIES)
SMALL_PROMPT = 8


@pytest.mark.parametrize("family", EXACT)
@pytest.mark.parametrize("scenario", exact_templates(), ids=lambda scenario: scenario.name)
def test_template_is_green_on_the_exact_engine_and_hits_its_marks(scenario: Scenario, family: str) -> None:
    marks = run_template(scenario, family, run_exact_case, per_layout=PER_LAYOUT)
    assert [mark for mark in scenario.marks if not marks[mark]] == []


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_template_is_green_on_llama_cpp(scenario: Scenario, family: str) -> None:
    assert run_template(scenario, family, run_case, per_layout=1).total() > 0


@pytest.mark.nightly
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_template_hits_its_marks_on_llama_cpp(scenario: Scenario, family: str) -> None:
    marks = run_template(scenario, family, run_case, per_layout=30)
    assert [mark for mark in scenario.marks if not marks[mark]] == []


# -- everything there is, at the smallest sizes


def chunkings(length: int) -> Iterator[tuple[int, ...]]:
    """Every way to cut ``length`` tokens into chunks: 2 ** (length - 1)."""
    for cuts in product([False, True], repeat=length - 1):
        sizes, size = [], 1
        for cut in cuts:
            sizes, size = ([*sizes, size], 1) if cut else (sizes, size + 1)
        yield (*sizes, size)


def chunked_case(family: str, sizes: tuple[int, ...]) -> Case:
    """A session whose prompt is cut exactly like that, beside a decoder.

    The policy cuts by what it is told: ``scripted_chunks`` is planted into ``PlanBuilder`` by the test.
    """
    return cases.case_of(
        family,
        (
            Session(prompt=tokens_of(1, 2), max_tokens=5),
            Session(prompt=tokens_of(2, sum(sizes)), max_tokens=3, arrival_step=1),
        ),
        prefix_cache=False,
    )


def scripted(sizes: tuple[int, ...]) -> Any:
    """A plant that gives session 1 chunks of these sizes."""
    stops = [sum(sizes[: i + 1]) for i in range(len(sizes))]

    def make(original: Callable[..., Any], reach: Reach) -> Callable[..., Any]:
        def chunk_tokens(self: Policy, state: Any, view: Any, available: int) -> int:
            if view.request_id != "s1" or view.emitted:
                return original(self, state, view, available)
            reach()
            return next(stop for stop in stops if stop > view.computed) - view.computed

        return chunk_tokens

    return in_method(Policy, "chunk_tokens")(make)


@pytest.mark.parametrize("family", EXACT)
def test_every_chunking_of_a_small_prompt_gives_the_same_answer(family: str) -> None:
    count = 0
    for length in range(1, SMALL_PROMPT + 1):
        for sizes in chunkings(length):
            reach = Reach()
            with scripted(sizes)(reach):
                outcome = run_exact_case(chunked_case(family, sizes))
            assert outcome.verdict is Verdict.PASS, (sizes, outcome.problems, outcome.divergences)
            assert reach.count >= len(sizes)
            count += 1
    assert count == 2**SMALL_PROMPT - 1


@pytest.mark.parametrize("family", EXACT)
def test_every_point_of_preemption_and_of_cancel_gives_the_same_answers(family: str) -> None:
    base = cases.case_of(
        family,
        (cases.session(1, 5, 4), cases.session(2, 3, 5, arrival_step=1)),
        max_num_batched_tokens=4,
        prefix_block_tokens=1,
    )
    hits: Counter[FaultKind] = Counter()
    for kind, step, session, in_flight in product(
        [FaultKind.PREEMPT, FaultKind.CANCEL], range(12), (0, 1), (False, True)
    ):
        fault = Fault(kind=kind, step=step, session=session, in_flight=in_flight)
        outcome = run_exact_case(replace(base, faults=(fault,)))
        assert outcome.verdict is Verdict.PASS, (fault, outcome.problems, outcome.divergences)
        hits[kind] += outcome.marks["preempted"] + outcome.marks["cancelled"]
    assert hits[FaultKind.PREEMPT] >= 12 and hits[FaultKind.CANCEL] >= 12


@pytest.mark.parametrize("family", FAMILIES)
def test_sample_of_small_cases_gives_the_same_answers_on_llama_cpp(family: str) -> None:
    base = cases.case_of(
        family, (cases.session(1, 8, 4), cases.session(2, 3, 5, arrival_step=1)), prefix_cache=False
    )
    for chunk in range(1, SMALL_PROMPT + 1):
        for kind, step in ((FaultKind.PREEMPT, chunk % 6), (FaultKind.CANCEL, 7 - chunk)):
            fault = Fault(kind=kind, step=max(step, 0), session=chunk % 2, in_flight=chunk % 2 == 0)
            outcome = run_case(replace(base, max_chunk_tokens=chunk, faults=(fault,)))
            assert outcome.verdict is Verdict.PASS, (outcome.problems, outcome.divergences)
