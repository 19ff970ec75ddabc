"""Histories for pictures: who ran when, where the rows lay, and from which token on a
session differed from itself alone.

A case is run once more in a worker process; a failing check's own case if it has one, else a fixed case
that shares, preempts and cancels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType
from typing import Any

from parity.cases.files import load_case
from parity.cases.strategies import landmark
from parity.engines.numerics import ROW, NumericsProfile
from parity.errors import UsageError
from parity.gate.result import CheckKind, GateCheck, GateResult
from parity.history import Answer, Run, TraceStep, session_index
from parity.plain_data import read_record
from parity.processes import WorkerDied, shared_worker
from parity.records import Case
from parity.run.judge import question
from parity.run.profiles import profile_of
from parity.run.runner import (
    BroughtSystem,
    brought_of,
    check_case,
    known_family,
    known_model,
    process_runner,
    replay,
)
from parity.run.under_test import OURS, Brought
from scheduler.engine import PAD_ROW
from scheduler.limits import Layout
from scheduler.records import IntentKind

PAD_CELLS = 1  # cell 0 is for padding rows
PICTURED = (Layout.UNIFIED.value, Layout.STOCK.value)


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """One run of the gate's page: ``view`` is what there is to draw; without one, ``problem`` says why."""

    title: str
    check: str
    view: TraceView | None = None
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
        return History(title=title, check=check.name, problem=error.line)
    return run_history(case, title=title, check=check.name)


def run_history(case: Case, *, title: str, check: str) -> History:
    """Run a case contained, beside each session alone; what keeps it from running is its ``problem``."""
    try:
        return History(title=title, check=check, view=_look(case, alone=True))
    except (WorkerDied, UsageError, RuntimeError) as error:
        return History(title=title, check=check, problem=str(error))


class Parity(StrEnum):
    """A generated token beside the one of the session alone."""

    IDENTICAL = "identical"  # to the bits of its logits
    BITS = "bits"  # the same token, other logits
    TOKEN = "token"  # another token


# -- What a picture of a run shows, flat enough to come out of a worker process as JSON.


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """Rows ``[start, stop)`` of one session in one step; ``phase`` is prefill, decode or rebuild.

    ``cells``: where the rows lay in the first stage, as far as we placed them; those of several shards are
    numbered on, shard by shard. ``parity``: what the token of this
    step is beside the session alone, if anybody looked: a value of ``Parity``.
    """

    step: int
    session: int
    start: int
    stop: int
    phase: str
    emitted: bool
    completed: bool
    cells: tuple[int, ...] = ()
    parity: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """One session: when it came, when it first ran and ended (step or None), how, and what it was.

    ``suspensions`` are half-open step ranges in which it had lost its rows.
    """

    session: int
    client_id: str
    priority: int
    prompt_tokens: int
    max_tokens: int
    arrival: int
    first: int | None
    end: int | None
    reason: str
    outputs: int
    suspensions: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """Something that happened to a session before a step: share, admit, resume, preempt, defer, reject."""

    step: int
    session: int
    kind: str
    amount: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Gauge:
    """Counts of one step."""

    step: int
    running: int
    waiting: int
    suspended: int
    prefill: int
    decode: int
    rebuild: int
    cells_used: int
    cells_available: int
    cells_shared: int
    preempted: int
    failed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceView:
    """The whole picture's data. ``notes`` are the run's problems and failures, one line each."""

    title: str
    engine: str
    policy: str
    budget: int
    lanes: tuple[Lane, ...]
    bars: tuple[Bar, ...]
    marks: tuple[Mark, ...]
    gauges: tuple[Gauge, ...]
    notes: tuple[str, ...]

    @property
    def steps(self) -> int:
        """Number of steps, at least 1."""
        return max([1, *(gauge.step + 1 for gauge in self.gauges), *(bar.step + 1 for bar in self.bars)])

    def to_data(self) -> dict[str, Any]:
        """JSON-able form."""
        return asdict(self)

    @staticmethod
    def from_data(data: dict[str, Any]) -> TraceView:
        """What ``to_data`` made, after JSON."""
        return read_record(TraceView, data)


# -- Reads a picture's data off a run, on the exact engine here or on llama.cpp in a worker process.


def view_of_exact_run(case: Case) -> TraceView:
    """Run on the exact engine."""
    return trace_of(replay(case).run, engine="exact engine, no model")


def view_of_real_run(case: Case, brought: Brought = OURS) -> TraceView:
    """Run on llama.cpp, or with what a user brings, contained. Raises ``UsageError`` when the process dies or
    there is no model.
    """
    try:
        return _look(case, brought)
    except WorkerDied as death:
        raise UsageError(
            "the case ended its process",
            where=case.model,
            why=death.reason,
            todo="look at it with --engine exact",
        ) from death


def _look(case: Case, brought: Brought = OURS, *, alone: bool = False) -> TraceView:
    """Run on llama.cpp in a worker, with ``alone`` also each session alone. Raises ``WorkerDied``,
    ``UsageError`` or ``CallFailed``.
    """
    check_case(case)
    profile = ROW if brought.engine else profile_of(case.model).profile
    arguments = {"case": case.to_json(), "profile": profile.to_json(), "alone": alone, **brought.parts}
    data = shared_worker(profile.environment).call("parity.report.history:collect_here", arguments)
    return TraceView.from_data(data)


def collect_here(arguments: dict[str, Any]) -> dict[str, Any]:
    """In the worker: run the case once and flatten its trace."""
    case, profile = Case.from_json(arguments["case"]), NumericsProfile.from_json(arguments["profile"])
    brought = brought_of(arguments)
    if brought.engine is not None:
        return trace_of(BroughtSystem(brought).attempt(case), engine=brought.engine).to_data()
    runner, family, file = process_runner(1), known_family(case.family), known_model(case.model)
    layout_profile = profile.for_layout(case.layout)
    engine = runner.engine(case, file, family, layout_profile)
    run = runner.attempt(case, engine, family, layout_profile, file, brought.scheduler_factory)
    found: dict[tuple[int, int], Parity] = {}
    if arguments["alone"]:
        measured = case.layout is Layout.STOCK
        oracle = runner.oracle(case, file, family, profile if measured else layout_profile)
        found = parity_of(run, lambda session: oracle.solo(question(case, session)))
    return trace_of(run, engine=f"llama.cpp, {file.path.name}", parity=found).to_data()


def parity_of(run: Run, alone: Callable[[int], Answer]) -> dict[tuple[int, int], Parity]:
    """By (step, session): each generated token that both the run and the session alone gave."""
    found = {}
    for session, steps in sorted(run.emitted_at.items()):
        answer = run.answers.get(session)
        if answer is None:
            continue
        solo = alone(session)
        both = zip(steps, answer.tokens, answer.digests, solo.tokens, solo.digests, strict=False)
        for step, token, digest, solo_token, solo_digest in both:
            same = Parity.IDENTICAL if digest == solo_digest else Parity.BITS
            found[step, session] = same if token == solo_token else Parity.TOKEN
    return found


def trace_of(
    run: Run, *, engine: str, parity: Mapping[tuple[int, int], Parity] = MappingProxyType({})
) -> TraceView:
    """Flatten a run; ``parity`` is what ``parity_of`` found."""
    case = run.case
    shard_cells = case.pool_cells + PAD_CELLS
    bars = tuple(bar for traced in run.trace for bar in _bars(traced, parity, shard_cells))
    marks = [mark for traced in run.trace for mark in _marks(traced)]
    lanes = tuple(_lane(run, index, bars, marks) for index in range(len(case.sessions)))
    marks += [
        Mark(step=start, session=lane.session, kind="preempt")
        for lane in lanes
        for start, _ in lane.suspensions
    ]
    gauges = tuple(
        Gauge(
            step=traced.step,
            running=record.running,
            waiting=record.waiting,
            suspended=record.suspended,
            prefill=record.prefill_tokens,
            decode=record.decode_tokens,
            rebuild=record.recompute_tokens,
            cells_used=record.cells_used,
            cells_available=record.cells_available,
            cells_shared=record.cells_shared,
            preempted=record.preempted,
            failed=bool(record.engine_failures),
        )
        for traced, record in zip(run.trace, run.records, strict=False)
    )
    options = ", ".join(f"{name}={value}" for name, value in case.policy_options)
    return TraceView(
        title=f"{case.family}, {case.layout.value} layout, {len(case.sessions)} sessions"
        + (f", {case.shards} shards" if case.shards > 1 else ""),
        engine=engine,
        policy=f"{case.policy}({options})" if options else case.policy,
        budget=case.max_num_batched_tokens,
        lanes=lanes,
        bars=bars,
        marks=tuple(marks),
        gauges=gauges,
        notes=(*run.problems, *run.failures),
    )


def _bars(traced: TraceStep, parity: Mapping[tuple[int, int], Parity], shard_cells: int) -> list[Bar]:
    batch = traced.flight.batch
    stages = max(1, len(batch.stages) // batch.num_shards)
    cell_of = {
        row: context // stages * shard_cells + cell
        for context, call in batch.first_calls()
        for row, cell in zip(call.rows, call.cells, strict=True)
        if row != PAD_ROW and cell >= 0
    }
    done = {item.request_id: item for item in (traced.result.chunks if traced.result is not None else ())}
    bars = []
    for index, chunk in enumerate(traced.flight.plan.chunks):
        item, session = done.get(chunk.request_id), session_index(chunk.request_id)
        rows = range(batch.offsets[index], batch.offsets[index + 1])
        bars.append(
            Bar(
                step=traced.step,
                session=session,
                start=chunk.start,
                stop=chunk.stop,
                phase=traced.flight.views[chunk.request_id].phase_at(chunk.start).value,
                emitted=item is not None and item.token is not None,
                completed=item is not None,
                cells=tuple(cell_of[row] for row in rows if row in cell_of),
                parity=parity.get((traced.step, session), ""),
            )
        )
    return bars


def _marks(traced: TraceStep) -> list[Mark]:
    marks = []
    starts = {chunk.request_id: chunk.start for chunk in traced.flight.plan.chunks}
    for intent in traced.flight.plan.intents:
        if intent.kind is IntentKind.PREEMPT:
            continue  # told from what it did, like every other suspension
        session, cached = session_index(intent.request_id), starts.get(intent.request_id, 0)
        marks.append(Mark(step=traced.step, session=session, kind=intent.kind.value))
        if cached:
            marks.append(Mark(step=traced.step, session=session, kind="share", amount=cached))
    return marks


def _lane(run: Run, index: int, bars: tuple[Bar, ...], marks: list[Mark]) -> Lane:
    session, own = run.case.sessions[index], [bar.step for bar in bars if bar.session == index]
    completion = run.completions.get(index)
    last = own[-1] if own else session.arrival_step
    if completion is None:
        reason, end = ("refused", session.arrival_step) if index in run.refusals else ("open", None)
    else:
        reason, end = completion.reason.value, last
        rejected = [mark.step for mark in marks if mark.session == index and mark.kind == "reject"]
        if rejected:
            reason, end = "rejected", rejected[0]
    return Lane(
        session=index,
        client_id=session.client_id,
        priority=session.priority,
        prompt_tokens=len(session.prompt),
        max_tokens=session.max_tokens,
        arrival=session.arrival_step,
        first=own[0] if own else None,
        end=end,
        reason=reason,
        outputs=len(completion.tokens) if completion else 0,
        suspensions=_suspensions([bar for bar in bars if bar.session == index]),
    )


def _suspensions(own: list[Bar]) -> tuple[tuple[int, int], ...]:
    """From the step after a session's last rows to the step that began to compute some of them again."""
    return tuple(
        (before.step + 1, bar.step)
        for before, bar in zip(own, own[1:], strict=False)
        if bar.start < before.stop or not before.completed
    )


ENGINES: dict[str, Callable[[Case], TraceView]] = {"exact": view_of_exact_run, "real": view_of_real_run}
