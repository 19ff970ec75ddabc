"""From two runs of a case and what its sessions give alone to its outcome: check, compare, explain, count."""

from __future__ import annotations

from collections import Counter

import numpy as np

from parity.checkers.checker import Alone, Checker, Expectation, broken_checker, check_all
from parity.checkers.ends import (
    EndsChecker,
    EngineChecker,
    MemoryChecker,
    ReproducibilityChecker,
    StreamChecker,
)
from parity.checkers.giving_way import GivingWayChecker
from parity.checkers.identity import Comparison, IdentityChecker, compare_run, explain_divergence
from parity.checkers.marks import count_marks
from parity.checkers.noise import Change, NoiseChecker, Weighed, first_step, row_distance, weigh_noise
from parity.history import Answer, Run, session_index
from parity.records import Case, Divergence, Outcome, Tier, earliest_first, verdict_of
from parity.run.oracle import Oracle, Question
from scheduler.limits import Layout

NOISE_SAMPLES = 2000
MARKS = "marks"
LAWS: tuple[Checker, ...] = (
    ReproducibilityChecker(),
    EndsChecker(),
    StreamChecker(),
    EngineChecker(),
    MemoryChecker(),
    GivingWayChecker(),
)


class LogitsRecorder:
    """Keeps a digest and the row of every sample, by position: a step that
    broke off samples its rows again.
    """

    def __init__(self) -> None:
        self._rows: dict[int, dict[int, np.ndarray]] = {}

    def __call__(self, request_id: str, position: int, row: np.ndarray) -> None:
        self._rows.setdefault(session_index(request_id), {})[position] = row.copy()

    def rows(self, session: int) -> list[np.ndarray]:
        """Logits of a session's generated tokens in order: float32 [n_vocab] each."""
        return [row for _, row in sorted(self._rows.get(session, {}).items())]


def question(case: Case, index: int) -> Question:
    """What the oracle is asked about session ``index``."""
    session = case.sessions[index]
    return Question(
        prompt=session.prompt,
        max_tokens=session.max_tokens,
        sampling=session.sampling,
        stop_token_ids=session.stop_token_ids,
        request_id=f"s{index}",
    )


class OracleAnswers:
    """``Alone`` on llama.cpp: the oracle's answers about one case."""

    def __init__(self, case: Case, oracle: Oracle) -> None:
        self.case, self.oracle = case, oracle

    def answer(self, session: int) -> Answer:
        solo = self.oracle.solo(question(self.case, session))
        return Answer(solo.tokens, solo.digests)

    def margin(self, session: int, step: int) -> float:
        margins = self.oracle.solo(question(self.case, session)).margins
        return margins[step] if step < len(margins) else 0.0

    def logits(self, session: int) -> np.ndarray:
        return self.oracle.logits(question(self.case, session))


def checkers_of(layout: Layout) -> tuple[Checker, ...]:
    """The laws, and what identity means in a layout: in ``stock`` differences are weighed as noise."""
    return (*LAWS, NoiseChecker() if layout is Layout.STOCK else IdentityChecker())


def judge(case: Case, first: Run, second: Run, alone: Alone) -> Outcome:
    """The outcome of a case that ran twice. The only place where one is judged."""
    answers = {index: alone.answer(index) for index in sorted(first.completions)}
    expectation = Expectation(answers, alone, second)
    findings = check_all(checkers_of(case.layout), first, expectation)
    comparisons, divergences, weighed = (), (), Weighed((), {})
    if not any("exception" in found.data for found in findings):
        comparisons = compare_run(first, answers, first.answers)
        differing = [c for c in comparisons if c.bits_step is not None or c.bytes_step is not None]
        if case.layout is Layout.STOCK:
            weighed = weigh_noise(first, expectation, comparisons)
            differing = [c for c in comparisons if weighed.changes.get(c.session) is Change.UNEXPLAINED]
        divergences = tuple(_explain(first, expectation, c) for c in differing)
    try:
        marks = count_marks(first)
    except Exception as error:  # what was exercised is not known: as red as a checker that broke
        marks, findings = {}, earliest_first((*findings, broken_checker(MARKS, error)))
    ended = len(first.completions) + len(first.refusals)  # who never had a token was judged by its end
    verdict, _ = verdict_of(findings, sessions=ended, tier=Tier.BITS, layout=case.layout)
    return Outcome(
        case=case,
        verdict=verdict,
        sessions=len(comparisons),
        bit_identical=sum(c.bits_step is None and bool(answers[c.session].digests) for c in comparisons),
        byte_identical=sum(c.bytes_step is None for c in comparisons),
        divergences=divergences,
        findings=findings,
        marks=marks,
        noise=weighed.noise[:NOISE_SAMPLES],
        changes=count_changes(weighed.changes),
    )


def count_changes(changes: dict[int, Change]) -> dict[str, int]:
    """Sessions with a changed token by why it changed; a plain dict, which goes through JSON."""
    return dict(Counter(change.value for change in changes.values()))


def _explain(run: Run, expectation: Expectation, comparison: Comparison) -> Divergence:
    session, step = comparison.session, first_step(comparison)
    return explain_divergence(
        run,
        comparison,
        expectation.answers[session],
        margin=expectation.alone.margin(session, step),
        distance=lambda session, step: row_distance(run, expectation, session, step),
    )
