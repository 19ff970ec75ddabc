"""Makes a failing case of a server small: the fewest sessions with which the fault still shows.

A server's batches depend on time, so a smaller case is run several times before it counts as one that passes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from parity.endpoint.answers import Answer
from parity.endpoint.case import Question, SystemCase, SystemSession
from parity.endpoint.compare import compare
from parity.endpoint.drive import ask, run_system_case
from parity.endpoint.judge import REFUSED_UNDER_LOAD, judge_alone
from parity.endpoint.noise import Limit
from parity.endpoint.system import SystemUnderTest

TRIES = 3


class SoloAnswers:
    """Each question's answers alone, cold and warm, asked once."""

    def __init__(self, system: SystemUnderTest) -> None:
        self._system = system
        self._known: dict[Question, tuple[Answer, ...]] = {}

    async def of(self, question: Question) -> tuple[Answer, ...]:
        if question not in self._known:
            self._known[question] = tuple(
                [
                    await ask(self._system, question, stream=False, retries=1, cold=cold)
                    for cold in (True, False)
                ]
            )
        return self._known[question]


@dataclass(frozen=True, slots=True)
class Rerun:
    """One run of a case: which sessions' answers are wrong and why, and which requests failed without a
    fault.
    """

    wrong: tuple[tuple[int, str], ...]
    failed: tuple[str, ...]


async def run_once(system: SystemUnderTest, case: SystemCase, solo: SoloAnswers, limit: Limit) -> Rerun:
    """Run a case; an answer is wrong that is further from every answer alone than ``limit``."""
    alone = [await solo.of(session.question) for session in case.sessions]
    run = await run_system_case(system, case, retries=0)
    wrong, failed = [], []
    for index, answer in enumerate(run.answers):
        session = case.sessions[index]
        if session.leave_after is not None:
            continue
        if any(status >= 500 and status not in REFUSED_UNDER_LOAD for status in answer.statuses):
            wrong.append((index, answer.error))
        elif not answer.is_whole or not any(reference.is_whole for reference in alone[index]):
            failed.append(f"session {index}: {answer.error or 'no answer alone'}")
        elif why := is_wrong(session, answer, alone[index], limit):
            wrong.append((index, why))
    return Rerun(tuple(wrong), tuple(failed))


def is_wrong(session: SystemSession, answer: Answer, alone: tuple[Answer, ...], limit: Limit) -> str:
    """Why an answer is none of those given alone; empty if it is near enough to one."""
    if itself := judge_alone(session.question, answer, limit):
        return itself[0].text
    greedy = session.question.chooses == "greedy"
    reasons = []
    for reference in alone:
        if not reference.is_whole:
            continue
        worst = ""
        for expected, actual in zip(reference.choices, answer.choices, strict=False):
            comparison = compare(expected, actual)
            if comparison.broken:
                worst = comparison.broken
            elif comparison.distance > limit.distance:
                worst = f"log probabilities moved by {comparison.distance:.2g}, limit {limit.distance:.2g}"
            elif greedy and (comparison.margin or 0.0) > limit.margin:
                worst = f"another token by a margin of {comparison.margin:.2g}, limit {limit.margin:.2g}"
            elif not comparison.same_output and not expected.has_logprobs:
                worst = f"another output at {comparison.position}"
        if not worst:
            return ""
        reasons.append(worst)
    return reasons[0] if reasons else ""


async def shrink_system_case(
    system: SystemUnderTest, case: SystemCase, session: int, *, limit: Limit, max_runs: int
) -> tuple[SystemCase, int]:
    """The smallest case found that still shows a wrong answer, and how often a case was run."""
    solo = SoloAnswers(system)
    runs = 0

    async def fails(candidate: SystemCase) -> bool:
        nonlocal runs
        for _ in range(TRIES):
            if runs >= max_runs:
                return False
            runs += 1
            if (await run_once(system, candidate, solo, limit)).wrong:
                return True
        return False

    best = replace(case, limits=(limit.distance, limit.margin))
    kept = list(range(len(case.sessions)))
    for candidate in _nearby(case, session):
        if len(candidate) < len(kept) and await fails(_only(case, candidate, limit)):
            kept, best = candidate, _only(case, candidate, limit)
            break
    width = len(kept) // 2
    while width and len(kept) > 1:
        dropped = False
        for start in range(0, len(kept), width):
            fewer = kept[:start] + kept[start + width :]
            if fewer and await fails(_only(case, fewer, limit)):
                kept, best, dropped = fewer, _only(case, fewer, limit), True
                break
        if not dropped:
            width //= 2
        else:
            width = min(width, len(kept) // 2)
    return best, runs


def _nearby(case: SystemCase, session: int) -> Iterator[list[int]]:
    """Guesses: the session with few others around it, fewest first."""
    kin = _kin(case, session)
    yield sorted({session, *kin[:1]})
    yield sorted({session, *kin[:2]})
    for reach in (1, 2, 4, 8):
        around = range(max(0, session - reach), min(len(case.sessions), session + reach + 1))
        yield sorted({*around, *kin[:1]})


def _kin(case: SystemCase, session: int) -> list[int]:
    """Other sessions, those with the longest common prompt first."""

    def shared(index: int) -> int:
        one, other = case.sessions[index].question.prompt, case.sessions[session].question.prompt
        count = 0
        for a, b in zip(one, other, strict=False):
            if a != b:
                break
            count += 1
        return count

    return sorted((i for i in range(len(case.sessions)) if i != session), key=lambda i: (-shared(i), i))


def _only(case: SystemCase, kept: list[int], limit: Limit) -> SystemCase:
    """The case with these sessions alone. What waited for a dropped session waits for what that one waited
    for.
    """
    number = {old: new for new, old in enumerate(kept)}
    sessions = []
    for old in kept:
        session = case.sessions[old]
        after, tokens = session.after, session.after_tokens
        while after is not None and after not in number:
            after, tokens = case.sessions[after].after, case.sessions[after].after_tokens
        sessions.append(replace(session, after=None if after is None else number[after], after_tokens=tokens))
    return replace(case, sessions=tuple(sessions), limits=(limit.distance, limit.margin))
