"""Runs a case of a server again and says which sessions are wrong."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from parity.endpoint.case import SystemCase
from parity.endpoint.check import EndpointOptions
from parity.endpoint.connect import connect
from parity.endpoint.noise import UNMEASURED, Limit
from parity.endpoint.shrink import SoloAnswers, run_once
from parity.records import Verdict


def replay_system_case(
    case: SystemCase, url: str, model: str, *, options: EndpointOptions, times: int
) -> tuple[Verdict, list[str]]:
    """Run it up to ``times`` times until an answer is wrong. Raises ``UsageError`` when nothing answers.

    Fail when one is; else pass, which says no more than that the fault did not show, and unknown when
    requests
    failed.
    """
    return asyncio.run(_replay(case, url, model, replace(options, chat=case.chat), times))


async def _replay(
    case: SystemCase, url: str, model: str, options: EndpointOptions, times: int
) -> tuple[Verdict, list[str]]:
    limit = UNMEASURED
    if case.limits is not None:
        limit = Limit(distance=case.limits[0], margin=case.limits[1], source="the case's own")
    system = await connect(url, options.access(url, model), kind=options.kind)
    try:
        await system.open()
        solo = SoloAnswers(system)
        for number in range(times):
            run = await run_once(system, case, solo, limit)
            if run.wrong:
                lines = [
                    f"run {number + 1}: session {i} ({case.sessions[i].question.kind}): {why}"
                    for i, why in run.wrong
                ]
                return Verdict.FAIL, [*lines, "verdict: fail"]
            if run.failed:
                return Verdict.UNKNOWN, [*run.failed, "verdict: unknown (requests failed)"]
    finally:
        await system.close()
    return Verdict.PASS, [
        f"{times} runs of {len(case.sessions)} sessions: no answer is wrong",
        "verdict: pass",
    ]
