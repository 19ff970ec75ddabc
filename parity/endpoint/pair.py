"""Two builds of one server in one run, in turns: main's answers say what rounding is for the candidate.

On one machine and at the same time, so that nothing but the build differs. Main is asked at more seeds than
the candidate, because its answers are the sample that the limits come from.
"""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from parity.endpoint.case import save_system_case
from parity.endpoint.check import (
    EndpointCheck,
    EndpointOptions,
    Report,
    describe_case,
    report_data,
)
from parity.endpoint.connect import connect, names_factory
from parity.endpoint.judge import Judgement
from parity.endpoint.noise import Baseline
from parity.errors import UsageError
from parity.records import Verdict
from parity.systems.server_process import ServerDied, ServerProcess

# A known-good server is asked at the candidate's own seed and at these, counted from it.
BASELINE_SEEDS = (0, 1000, 1001)


@dataclass(frozen=True, slots=True, kw_only=True)
class PairOutcome:
    """The candidate's verdict, in one line why it is no pass, and both reports (empty: it could not be
    asked).
    """

    verdict: Verdict
    reason: str = ""
    candidate: dict[str, Any] = field(default_factory=dict)
    main: dict[str, Any] = field(default_factory=dict)


class _Count:
    """Answers of several checks as one progress."""

    def __init__(self, report: Report, checks: int) -> None:
        self._report, self._checks = report, checks
        self._done: dict[int, tuple[int, int]] = {}

    def of(self, index: int) -> Report:
        def note(done: int, total: int) -> None:
            self._done[index] = (done, total)
            largest = max(total for _, total in self._done.values())
            self._report(sum(done for done, _ in self._done.values()), largest * self._checks)

        return note


def check_pair(
    candidate: str,
    main: str,
    model: str,
    options: EndpointOptions,
    report: Report = lambda done, total: None,
) -> PairOutcome:
    """Judge ``candidate`` by the noise of ``main``. Each is a URL, ``package.module:factory``, or a command
    line that starts a server which writes ``listening on http://127.0.0.1:PORT``.

    A candidate that cannot be started or asked fails; where main cannot, or is at fault itself, nothing is
    known. Raises ``UsageError`` for a target that is none of the three.
    """
    with ExitStack() as stack:
        try:
            main_url = stack.enter_context(_running(main, "--baseline"))
        except ServerDied as error:
            return PairOutcome(verdict=Verdict.UNKNOWN, reason=f"the baseline's server: {error}")
        try:
            candidate_url = stack.enter_context(_running(candidate, "--system"))
        except ServerDied as error:
            return PairOutcome(verdict=Verdict.FAIL, reason=f"the candidate's server: {error}")
        return asyncio.run(_run_pair(candidate_url, main_url, model, options, report))


@contextmanager
def _running(target: str, option: str) -> Iterator[str]:
    """What ``connect`` takes: the target itself, or the address of the server that its command starts."""
    if target.startswith(("http://", "https://")) or names_factory(target):
        yield target
        return
    try:
        command = shlex.split(target)
    except ValueError as error:
        raise UsageError("no command line", where=option, why=str(error)) from error
    if not command:
        raise UsageError("no server", where=option, todo="name a URL or a command line that starts one")
    with ServerProcess(command) as server:
        yield server.url


async def _run_pair(
    candidate_url: str, main_url: str, model: str, options: EndpointOptions, report: Report
) -> PairOutcome:
    count = _Count(report, len(BASELINE_SEEDS) + 1)
    access = options.access(candidate_url, model)
    async with _Systems() as systems:
        try:
            known: list[EndpointCheck] = []
            for index, more in enumerate(BASELINE_SEEDS):
                again = replace(options, seed=options.seed + more, results=None, tier=None, shrink_runs=0)
                system = await systems.connect(main_url, replace(access, url=main_url), options.kind)
                known.append(EndpointCheck(system, again, count.of(index)))
                await known[-1].open(main_url, model)
        except UsageError as error:
            return PairOutcome(verdict=Verdict.UNKNOWN, reason=f"the baseline's server: {error}")
        try:
            system = await systems.connect(candidate_url, access, options.kind)
            judged = EndpointCheck(system, options, count.of(len(known)))
            await judged.open(candidate_url, model)
        except UsageError as error:
            return PairOutcome(verdict=Verdict.FAIL, reason=f"the candidate's server: {error}")
        first, *others = known
        for check in (first, judged, *others):
            await check.ask_alone()
        for number in range(options.rounds):
            # Who goes first changes with every round.
            for check in (first, judged, *others) if number % 2 == 0 else (*others, judged, first):
                await check.load_round(number)
        noise: Baseline | None = None
        for check in known:
            found = check.judge()
            if found.verdict is Verdict.FAIL:
                why = found.faults[0].text
                return PairOutcome(
                    verdict=Verdict.UNKNOWN,
                    reason=f"the baseline's server is at fault itself: {why}",
                    main=report_data(check, found, url=main_url),
                )
            noise = check.baseline(found) if noise is None else noise.merged(check.baseline(found))
        if why := noise.differs_from(judged.key()):
            return PairOutcome(verdict=Verdict.UNKNOWN, reason=f"the servers cannot be compared: {why}")
        judged.options = replace(options, baseline=noise)
        return await _judged(judged, candidate_url, main=report_data(first, first.judge(), url=main_url))


async def _judged(check: EndpointCheck, url: str, *, main: dict[str, Any]) -> PairOutcome:
    found = check.judge()
    data = report_data(check, found, url=url)
    if (shrunk := await check.shrink(found)) is not None:
        data["case"] = describe_case(*shrunk)
        if check.options.cases is not None:
            data["case"]["file"] = str(save_system_case(shrunk[0], Path(check.options.cases)))
    return PairOutcome(verdict=found.verdict, reason=reason_of(found), candidate=data, main=main)


def reason_of(found: Judgement) -> str:
    """The first fault with its prompt, else what was not proved; empty for a pass."""
    if found.verdict is Verdict.FAIL:
        fault = found.faults[0]
        return (
            fault.text if fault.question is None else f"prompt {fault.question}, {fault.scope}: {fault.text}"
        )
    return found.unproved[0] if found.verdict is Verdict.UNKNOWN and found.unproved else ""


class _Systems:
    """Systems that were connected, closed together at the end."""

    def __init__(self) -> None:
        self._open: list[Any] = []

    async def connect(self, url: str, access: Any, kind: str) -> Any:
        system = await connect(url, access, kind=kind)
        self._open.append(system)
        return system

    async def __aenter__(self) -> _Systems:
        return self

    async def __aexit__(self, *error: object) -> None:
        for system in self._open:
            await system.close()
