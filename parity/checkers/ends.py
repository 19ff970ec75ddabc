"""Ends: every accepted session ends once, with what it had when it ended, and no step fails for no reason."""

from __future__ import annotations

from collections.abc import Iterable

from parity.checkers.checker import Expectation
from parity.checkers.identity import first_difference
from parity.history import Run, session_index
from parity.records import FaultKind, Finding
from scheduler.loop import MAX_ENGINE_FAILURES
from scheduler.records import FinishReason

ENGINE_FAULTS = frozenset(
    {
        FaultKind.NO_SLOT,
        FaultKind.DECODE_ERROR,
        FaultKind.WORKER_KILLED,
        FaultKind.OUT_OF_MEMORY,
        FaultKind.STAGE_LOST,
    }
)


ENDS, ENGINE, MEMORY, REPRODUCIBILITY = "ends", "engine", "memory", "reproducibility"
STREAM = "stream"


class EndsChecker:
    """Tokens after a cancel, errors without text, sessions without an end or tried for ever."""

    name = ENDS

    def check(self, run: Run, expectation: Expectation) -> Iterable[Finding]:
        for rule in RULES:
            yield from rule(run)


class StreamChecker:
    """What a session ended with is what its caller was given token by token, none doubled and none lost.

    A step in flight when its session is cancelled returns to nobody.
    """

    name = STREAM

    def check(self, run: Run, expectation: Expectation) -> Iterable[Finding]:
        cancelled = {f.session: f.step for f in reversed(run.fired) if f.kind is FaultKind.CANCEL}
        for index, end in sorted(run.completions.items()):
            given = list(zip(run.given_at.get(index, ()), run.streams.get(index, ()), strict=True))
            if end.reason is FinishReason.CANCELLED and index in cancelled:
                given = [(step, token) for step, token in given if step < cancelled[index]]
            tokens = [token for _, token in given]
            if tokens == list(end.tokens):
                continue
            first = first_difference(tokens, end.tokens)
            at = given[first][0] if first < len(given) else given[-1][0] if given else None
            text = (
                f"session {index} was given {len(tokens)} tokens and ended with {len(end.tokens)}; "
                f"they part at its token {first}"
            )
            known = {} if at is None else {"step": at}
            yield Finding(STREAM, text, {**known, "session": index, "token": first})


class EngineChecker:
    """No step fails for no reason."""

    name = ENGINE

    def check(self, run: Run, expectation: Expectation) -> Iterable[Finding]:
        return _unexplained_failures(run)


class MemoryChecker:
    """Nothing is held when nothing is live."""

    name = MEMORY

    def check(self, run: Run, expectation: Expectation) -> Iterable[Finding]:
        if run.leftovers:
            yield Finding(MEMORY, f"after the case {run.leftovers}")


class ReproducibilityChecker:
    """The case gives the same when it runs again; told before parity, which it would explain away."""

    name = REPRODUCIBILITY

    def check(self, run: Run, expectation: Expectation) -> Iterable[Finding]:
        if run.signature == expectation.again.signature:
            return
        first, second = ({row[0]: row for row in side.signature} for side in (run, expectation.again))
        session = min(s for s in sorted({*first, *second}) if first.get(s) != second.get(s))
        text = f"session {session} differs from itself when the case runs again"
        yield Finding(REPRODUCIBILITY, text, {"session": session})


def _ends(text: str, session: int, step: int | None = None) -> Finding:
    known = {} if step is None else {"step": step}
    return Finding(ENDS, text, {**known, "session": session})


def _partition(run: Run) -> Iterable[Finding]:
    """Every offered session has exactly one end, a completion or a refusal; a run that broke off has
    not given all of them the time.
    """
    for index in range(len(run.case.sessions)) if not run.findings else ():
        ends = (index in run.completions) + (index in run.refusals)
        if ends != 1:
            yield _ends(f"session {index} has {ends} ends, must have one", index)


def _tokens_after_cancel(run: Run) -> Iterable[Finding]:
    """A cancelled session keeps the tokens of the steps that returned before its cancel was acknowledged."""
    for fault in run.fired:
        completion = run.completions.get(fault.session)
        if fault.kind is not FaultKind.CANCEL or completion is None:
            continue
        before = sum(step < fault.step for step in run.given_at.get(fault.session, ()))
        was = f"session {fault.session} was cancelled at step {fault.step}"
        if completion.reason is not FinishReason.CANCELLED:
            yield _ends(f"{was} but ended by {completion.reason.value}", fault.session, fault.step)
        elif len(completion.tokens) != before:
            text = f"{was} with {before} tokens but ended with {len(completion.tokens)}"
            yield _ends(text, fault.session, fault.step)


def _unexplained_failures(run: Run) -> Iterable[Finding]:
    """The engine breaks off only where a fault was injected: overload never reaches
    the caller as a failed decode.
    """
    failed = [
        step for step in run.trace if step.result is None and step.flight.plan.chunks and not step.is_given_up
    ]
    injected = [fault for fault in run.fired if fault.kind in ENGINE_FAULTS]
    if any(fault.kind is FaultKind.STAGE_LOST for fault in injected):  # it stays lost for more than one step
        return
    armed = sorted(fault.step for fault in injected)
    for traced, said in zip(failed, run.failures, strict=False):
        # A fault hits the next native call: of a step in flight, or else of the next one that has rows.
        if armed and armed[0] < traced.step + run.case.steps_in_flight:
            armed.pop(0)
            continue
        chunks = ", ".join(
            f"session {session_index(chunk.request_id)} [{chunk.start},{chunk.stop})"
            for chunk in traced.flight.plan.chunks
        )
        data = {"step": traced.step, "session": session_index(traced.flight.plan.chunks[0].request_id)}
        yield Finding(ENGINE, f"step {traced.step} failed unasked with {chunks}: {said}", data)


def _given_up(run: Run) -> Iterable[Finding]:
    """A generation that was given up ends as cancelled, with what it had been given."""
    for earlier in run.earlier:
        end, fault = earlier.completion, earlier.fault
        had = tuple(
            token for step, token in zip(earlier.given_at, earlier.stream, strict=True) if step < fault.step
        )
        was = f"session {earlier.session} was given up at step {fault.step}"
        if end.reason is not FinishReason.CANCELLED:
            yield _ends(f"{was} but ended by {end.reason.value}", earlier.session, fault.step)
        elif tuple(end.tokens) != had:
            text = f"{was} with {len(had)} tokens but ended with {len(end.tokens)} or others"
            yield _ends(text, earlier.session, fault.step)


def _untyped_errors(run: Run) -> Iterable[Finding]:
    for index, completion in sorted(run.completions.items()):
        if completion.reason is FinishReason.FAILED and not completion.error:
            yield _ends(f"session {index} failed without an error", index)


def _unnamed_stages(run: Run) -> Iterable[Finding]:
    """Where a stage was lost, whoever failed is told which."""
    for index, end in sorted(run.completions.items()) if run.lost else ():
        if end.reason is FinishReason.FAILED and run.lost not in end.error:
            text = f"session {index} ended with {end.error!r}, which does not name the stage: {run.lost}"
            yield _ends(text, index)


def _tried_again(run: Run) -> Iterable[Finding]:
    """A session in whose steps the engine fails time after time, with no new row between, must end."""
    failures: dict[str, int] = {}
    for step in run.trace:
        if step.is_given_up:
            continue
        if step.result is None:
            for chunk in step.flight.plan.chunks:
                failures[chunk.request_id] = failures.get(chunk.request_id, 0) + 1
                if failures[chunk.request_id] > MAX_ENGINE_FAILURES:
                    index = session_index(chunk.request_id)
                    yield _ends(
                        f"session {index} was tried again at step {step.step} after "
                        f"{MAX_ENGINE_FAILURES} failed steps without a new row",
                        index,
                        step.step,
                    )
                    return
            continue
        for item in step.result.chunks:
            if item.after > step.flight.views[item.request_id].committed:
                failures.pop(item.request_id, None)


RULES = (_partition, _tokens_after_cancel, _given_up, _untyped_errors, _unnamed_stages, _tried_again)
