"""From two runs of a case and the oracle's answers to its outcome: compare, explain, count."""

from __future__ import annotations

import functools
from collections import Counter
from dataclasses import dataclass

import numpy as np

from parity.checkers.ends import check_ends
from parity.checkers.identity import Answer, Comparison, compare_run, explain_divergence
from parity.checkers.marks import count_marks
from parity.checkers.noise import Change, explain_change, is_noise, logit_distance
from parity.engines.sampling import logits_digest
from parity.history import Run, session_index
from parity.records import Case, Divergence, Outcome, Verdict
from parity.run.oracle import Oracle, Question, Solo
from scheduler.limits import Layout
from scheduler.records import FinishReason

NOISE_SAMPLES = 2000


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


@dataclass(frozen=True)
class Attempt:
    """One run of a case on a real engine, with what its sessions gave."""

    run: Run
    recorder: LogitsRecorder
    leftovers: list[int]
    lost: str = ""  # which stage of a chain ended, and how

    @functools.cached_property
    def answers(self) -> dict[int, Answer]:
        return {
            index: Answer(completion.tokens, tuple(map(logits_digest, self.recorder.rows(index))))
            for index, completion in self.run.completions.items()
        }

    @property
    def signature(self) -> list:
        """What must be the same when the case runs again."""
        return [
            (index, answer.tokens, tuple(answer.digests)) for index, answer in sorted(self.answers.items())
        ]


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


def judge(case: Case, first: Attempt, second: Attempt, oracle: Oracle) -> Outcome:
    """Compare, explain, count: the outcome of a case that ran."""
    run = first.run
    solos: dict[int, Solo] = {index: oracle.solo(question(case, index)) for index in sorted(run.completions)}
    expected = {index: Answer(solo.tokens, solo.digests) for index, solo in solos.items()}
    comparisons = compare_run(run, expected, first.answers)
    problems = [*run.problems, *check_ends(run)]
    if first.signature != second.signature:
        problems.append("not reproducible: the case differs from itself when it runs again")
    if first.leftovers:
        problems.append(f"memory: sequences {first.leftovers} still hold cells after the case")

    for index, end in run.completions.items() if first.lost else ():
        if end.reason is FinishReason.FAILED and first.lost not in end.error:
            problems.append(
                f"session {index} ended with {end.error!r}, which does not name the stage: {first.lost}"
            )

    def distance(session: int, step: int) -> float:
        rows, reference = first.recorder.rows(session), oracle.logits(question(case, session))
        return (
            logit_distance(rows[step], reference[step])
            if step < min(len(rows), len(reference))
            else float("inf")
        )

    noise, changes = (), {}
    differing = [c for c in comparisons if c.bits_step is not None or c.bytes_step is not None]
    if case.layout is Layout.STOCK:
        noise, changes = _weigh_noise(case, comparisons, first, oracle, distance)
        differing = [c for c in comparisons if changes.get(c.session) is Change.UNEXPLAINED]
    divergences = tuple(_explain(run, c, expected[c.session], solos[c.session], distance) for c in differing)
    verdict = Verdict.FAIL if divergences or problems else Verdict.PASS
    return Outcome(
        case=case,
        verdict=verdict,
        sessions=len(comparisons),
        bit_identical=sum(c.bits_step is None for c in comparisons),
        byte_identical=sum(c.bytes_step is None for c in comparisons),
        divergences=divergences,
        problems=tuple(problems),
        marks=count_marks(run),
        noise=noise,
        changes=count_changes(changes),
    )


def count_changes(changes: dict[int, Change]) -> dict[str, int]:
    """Sessions with a changed token by why it changed; a plain dict, which goes through JSON."""
    return dict(Counter(change.value for change in changes.values()))


def _explain(run: Run, comparison: Comparison, expected: Answer, solo: Solo, distance) -> Divergence:
    step = min(s for s in (comparison.bits_step, comparison.bytes_step) if s is not None)
    margin = solo.margins[step] if step < len(solo.margins) else 0.0
    return explain_divergence(run, comparison, expected, margin=margin, distance=distance)


def _weigh_noise(
    case: Case, comparisons: list[Comparison], attempt: Attempt, oracle: Oracle, distance
) -> tuple[tuple[float, ...], dict[int, Change]]:
    """Noise of every comparable step, and why the token of each session that changed one did."""
    noise: dict[int, list[float]] = {}
    for comparison in comparisons:
        rows = attempt.recorder.rows(comparison.session)
        comparable = len(rows) if comparison.bytes_step is None else comparison.bytes_step
        noise[comparison.session] = [
            distance(comparison.session, step) for step in range(min(comparable, len(rows)))
        ]
    changes = {}
    for session, bits_step, bytes_step in ((c.session, c.bits_step, c.bytes_step) for c in comparisons):
        if bytes_step is None:
            continue
        first = bytes_step if bits_step is None else min(bits_step, bytes_step)
        reference = oracle.logits(question(case, session))
        margins = oracle.solo(question(case, session)).margins
        moved = distance(session, first)
        others = [sample for other, samples in noise.items() if other != session for sample in samples]
        changes[session] = explain_change(
            moved,
            margins[bytes_step] if bytes_step < len(margins) else 0.0,
            is_rounding=first < len(reference) and is_noise(moved, reference[first], others),
        )
    return tuple(sample for samples in noise.values() for sample in samples)[:NOISE_SAMPLES], changes
