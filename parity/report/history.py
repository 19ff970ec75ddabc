"""Histories for pictures: who ran when, where the rows lay, and from which token on a
session differed from itself alone.

A case is run once more in a worker process; a failing check's own case if it has one, else a fixed case
that shares, preempts and cancels.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from parity.case_files import load_case
from parity.drive import session_index
from parity.errors import UsageError
from parity.gate.records import CheckKind, GateCheck, GateResult
from parity.judge import question
from parity.numerics import NumericsProfile
from parity.profiles import profile_of
from parity.records import Case
from parity.runner import known_family, known_model, process_runner
from parity.strategies import landmark
from parity.worker import WorkerDied, shared_worker
from scheduler.engine import PAD_ROW
from scheduler.limits import Layout
from scheduler.records import Phase

PICTURED = (Layout.UNIFIED.value, Layout.STOCK.value)


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """One run, for drawing.

    ``chunks``: (step, session, start, stop, is_prefill), start and stop in the session's positions.
    ``tokens``: (step, session, status), status 0 bit-identical, 1 other bits, 2 another token. ``cells``:
    (step, session, cell) of every row of stage 0 that was placed by us. ``ends``: (session, step, reason).
    """

    title: str
    check: str
    steps: int
    sessions: int
    chunks: tuple[tuple[int, int, int, int, bool], ...] = ()
    tokens: tuple[tuple[int, int, int], ...] = ()
    cells: tuple[tuple[int, int, int], ...] = ()
    ends: tuple[tuple[int, int, str], ...] = ()
    problem: str = ""


def gather_histories(result: GateResult) -> list[History]:
    """One per family in ``unified`` and ``stock``, and one per check that failed with a case."""
    histories = []
    for family in result.options.families:
        for check in result.of_family(family):
            if check.kind not in (CheckKind.SUITE, CheckKind.SPLIT):
                continue
            if check.case_file:
                histories.append(_of_check(check))
            elif check.kind is CheckKind.SUITE and check.layout in PICTURED and check.counts is not None:
                model = family if result.options.row == "tiny" else f"{family}:{result.options.row}"
                case = landmark(family, Layout(check.layout), model=model)
                histories.append(
                    run_history(case, title=f"{family} {check.layout}, a fixed case", check=check.name)
                )
    return histories


def _of_check(check: GateCheck) -> History:
    """The case that a failing check kept, run once more."""
    title = f"{check.name}, its failing case"
    try:
        case = load_case(Path(check.case_file))
    except UsageError as error:
        return History(title=title, check=check.name, steps=0, sessions=0, problem=error.line)
    return run_history(case, title=title, check=check.name)


def run_history(case: Case, *, title: str, check: str) -> History:
    """Run a case contained and return its history; what keeps it from running is its ``problem``."""
    try:
        profile = profile_of(case.model).profile
        answer = shared_worker(profile.environment).call(
            "parity.report.history:record_history_here",
            {"case": case.to_json(), "profile": profile.to_json()},
        )
    except (WorkerDied, UsageError, RuntimeError) as error:
        return History(title=title, check=check, steps=0, sessions=len(case.sessions), problem=str(error))
    rows = {key: tuple(map(tuple, answer[key])) for key in ("chunks", "tokens", "cells", "ends")}
    return History(title=title, check=check, steps=answer["steps"], sessions=len(case.sessions), **rows)


def record_history_here(arguments: dict[str, Any]) -> dict[str, Any]:
    """In the worker: run the case once and flatten its trace."""
    case = Case.from_json(arguments["case"])
    profile = NumericsProfile.from_json(arguments["profile"])
    runner, family, file = process_runner(1), known_family(case.family), known_model(case.model)
    layout_profile = profile.for_layout(case.layout)
    engine = runner.engine(case, file, family, layout_profile)
    attempt = runner.attempt(case, engine, family, layout_profile, file)
    oracle = runner.oracle(case, file, family, profile if case.layout is Layout.STOCK else layout_profile)
    chunks, cells, last = [], [], {}
    for traced in attempt.run.trace:
        flight = traced.flight
        for index, chunk in enumerate(flight.plan.chunks):
            session = session_index(chunk.request_id)
            last[session] = traced.step
            is_prefill = flight.views[chunk.request_id].phase_at(chunk.start) is Phase.PREFILL
            chunks.append([traced.step, session, chunk.start, chunk.stop, is_prefill])
            rows = range(flight.batch.offsets[index], flight.batch.offsets[index + 1])
            cells += [
                [traced.step, session, cell]
                for call in (flight.batch.stages or ((),))[0]
                for row, cell in zip(call.rows, call.cells, strict=True)
                if row != PAD_ROW and row in rows and cell >= 0
            ]
    tokens = []
    for session, steps in sorted(attempt.run.emitted_at.items()):
        solo, answer = oracle.solo(question(case, session)), attempt.answers.get(session)
        for index, step in enumerate(steps):
            if answer is None or index >= len(answer.tokens) or index >= len(solo.tokens):
                continue
            status = (
                2
                if answer.tokens[index] != solo.tokens[index]
                else int(answer.digests[index] != solo.digests[index])
            )
            tokens.append([step, session, status])
    ends = [
        [session, last.get(session, 0), completion.reason.value]
        for session, completion in sorted(attempt.run.completions.items())
    ]
    steps = max((record.step for record in attempt.run.records), default=0) + 1
    return {
        "steps": max([steps, *(row[0] + 1 for row in chunks)]),
        "chunks": chunks,
        "tokens": tokens,
        "cells": cells,
        "ends": ends,
    }
