"""Bits and bytes: every session's logits and tokens equal those of the same session alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from parity.checkers.checker import Expectation
from parity.history import Answer, Run, session_index
from parity.records import BITS, BYTES, Divergence, Finding
from scheduler.engine import PAD_ROW
from scheduler.records import FinishReason

MOST_DISTANCES = 8


@dataclass(frozen=True, slots=True)
class Comparison:
    """Identity of one session: ``step`` is its first token whose logits (bits)
    or id (bytes) differ, or None.
    """

    session: int
    bits_step: int | None
    bytes_step: int | None
    length_differs: bool


def first_difference(expected: Sequence, actual: Sequence) -> int:
    """Index of the first unequal item, or the shorter length."""
    pairs = zip(expected, actual, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(expected), len(actual)))


def compare_session(session: int, expected: Answer, actual: Answer, *, complete: bool) -> Comparison:
    """First differences; a session that did not run to its end is compared as far as it went."""

    def first(left: Sequence, right: Sequence) -> int | None:
        return next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), None)

    bits, tokens = first(expected.digests, actual.digests), first(expected.tokens, actual.tokens)
    too_long = len(actual.tokens) > len(expected.tokens)
    length_differs = too_long or (complete and len(actual.tokens) != len(expected.tokens))
    if length_differs:
        shorter = min(len(actual.tokens), len(expected.tokens))
        bits, tokens = (shorter if bits is None else bits), (shorter if tokens is None else tokens)
    return Comparison(session, bits, tokens, length_differs)


def compare_run(run: Run, expected: Mapping[int, Answer], actual: Mapping[int, Answer]) -> list[Comparison]:
    """Every session that produced something or completed, in order."""
    comparisons = []
    for index, completion in sorted(run.completions.items()):
        complete = completion.reason in (FinishReason.LENGTH, FinishReason.STOP)
        answer = actual.get(index, Answer((), ()))
        answer = Answer(completion.tokens, answer.digests[: len(completion.tokens)])
        if complete or answer.tokens:
            comparisons.append(compare_session(index, expected[index], answer, complete=complete))
    return comparisons


class IdentityChecker:
    """Logits (``bits``) and tokens (``bytes``) of every session equal those of the session alone."""

    name = BITS

    def check(self, run: Run, expectation: Expectation) -> Iterable[Finding]:
        for comparison in compare_run(run, expectation.answers, run.answers):
            for checker, step in ((BITS, comparison.bits_step), (BYTES, comparison.bytes_step)):
                if step is not None:
                    yield differing(run, checker, comparison.session, step)


def differing(run: Run, checker: str, session: int, token: int) -> Finding:
    """A session is another than alone from its generated token number ``token`` on."""
    at = step_of_token(run, session, token)
    text = f"session {session} from its token {token} on (step {at})"
    return Finding(checker, text, {"step": at, "session": session, "token": token})


def step_of_token(run: Run, session: int, token: int) -> int:
    """Scheduler step of a generated token, of the session's last one if it has not so many; -1 for none."""
    emitted = run.emitted_at.get(session, [])
    return emitted[token] if token < len(emitted) else (emitted[-1] if emitted else -1)


def explain_divergence(
    run: Run,
    comparison: Comparison,
    expected: Answer,
    *,
    margin: float,
    distance: Callable[[int, int], float],
) -> Divergence:
    """Evidence for the first differing step: neighbours in that batch, chunk
    boundaries so far, cells of the session.
    """
    session = comparison.session
    steps = [step for step in (comparison.bits_step, comparison.bytes_step) if step is not None]
    step = min(steps)
    at = step_of_token(run, session, step)
    tokens = run.completions[session].tokens
    comparable = len(tokens) if comparison.bytes_step is None else comparison.bytes_step + 1
    neighbours: tuple[int, ...] = ()
    chunks: list[tuple[int, int]] = []
    cells: dict[int, int] = {}
    for traced in run.trace:
        if traced.step > at >= 0:
            break
        plan, batch = traced.flight.plan, traced.flight.batch
        for index, chunk in enumerate(plan.chunks):
            if session_index(chunk.request_id) != session:
                continue
            chunks.append((chunk.start, chunk.stop))
            neighbours = tuple(session_index(c.request_id) for c in plan.chunks if c is not chunk)
            rows = range(batch.offsets[index], batch.offsets[index + 1])
            for _, call in batch.first_calls():
                for row, cell in zip(call.rows, call.cells, strict=True):
                    if row != PAD_ROW and row in rows:
                        cells[batch.positions[row]] = cell
    return Divergence(
        session=session,
        step=step,
        scheduler_step=at,
        expected_token=expected.tokens[step] if step < len(expected.tokens) else None,
        actual_token=tokens[step] if step < len(tokens) else None,
        margin=margin,
        distance=distance(session, step),
        neighbours=neighbours,
        chunks=tuple(chunks),
        cells=tuple(cell for _, cell in sorted(cells.items())),
        distances=tuple(distance(session, s) for s in range(step, min(comparable, step + MOST_DISTANCES))),
    )
