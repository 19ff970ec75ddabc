"""Ends: every accepted session ends once, with what it had when it ended, and no step fails for no reason."""

from __future__ import annotations

from parity.history import Run
from parity.records import FaultKind
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


def check_ends(run: Run) -> list[str]:
    """One sentence per rule that the history breaks: tokens after a cancel, unexplained failures, errors
    without text, sessions tried for ever.
    """
    rules = (_tokens_after_cancel, _unexplained_failures, _untyped_errors, _tried_again)
    return [problem for rule in rules for problem in rule(run)]


def _tokens_after_cancel(run: Run) -> list[str]:
    """A cancelled session keeps the tokens of the steps that returned before its cancel was acknowledged."""
    problems = []
    for fault in run.fired:
        completion = run.completions.get(fault.session)
        if fault.kind is not FaultKind.CANCEL or completion is None:
            continue
        before = sum(step < fault.step for step in run.emitted_at.get(fault.session, ()))
        if completion.reason is not FinishReason.CANCELLED:
            problems.append(
                f"ends: session {fault.session} was cancelled at step {fault.step} "
                f"but ended by {completion.reason.value}"
            )
        elif len(completion.tokens) != before:
            problems.append(
                f"ends: session {fault.session} was cancelled at step {fault.step} with {before} tokens "
                f"but ended with {len(completion.tokens)}"
            )
    return problems


def _unexplained_failures(run: Run) -> list[str]:
    """The engine breaks off only where a fault was injected: overload never reaches
    the caller as a failed decode.
    """
    failed = sum(record.engine_failures for record in run.records)
    injected = sum(fault.kind in ENGINE_FAULTS for fault in run.fired)
    lost = any(
        fault.kind is FaultKind.STAGE_LOST for fault in run.fired
    )  # it stays lost for more than one step
    if failed <= injected or lost:
        return []
    said = f"; the last one: {run.failures[-1]}" if run.failures else ""
    return [f"engine: {failed} steps failed, {injected} failures were injected{said}"]


def _untyped_errors(run: Run) -> list[str]:
    return [
        f"ends: session {index} failed without an error"
        for index, completion in sorted(run.completions.items())
        if completion.reason is FinishReason.FAILED and not completion.error
    ]


def _tried_again(run: Run) -> list[str]:
    """A session in whose steps the engine fails time after time, with no new row between, must end."""
    failures: dict[str, int] = {}
    for step in run.trace:
        if step.result is None:
            for chunk in step.flight.plan.chunks:
                failures[chunk.request_id] = failures.get(chunk.request_id, 0) + 1
                if failures[chunk.request_id] > MAX_ENGINE_FAILURES:
                    return [
                        f"ends: {chunk.request_id} was tried again at step {step.step} after "
                        f"{MAX_ENGINE_FAILURES} failed steps without a new row"
                    ]
            continue
        for item in step.result.chunks:
            if item.after > step.flight.views[item.request_id].committed:
                failures.pop(item.request_id, None)
    return []
