"""Reads a picture's data off a run, on the exact engine here or on llama.cpp in a worker process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from parity.drive import Run, TraceStep, session_index
from parity.errors import UsageError
from parity.numerics import NumericsProfile
from parity.profiles import profile_of
from parity.records import Case
from parity.replay import replay
from parity.runner import check_case, known_family, known_model, process_runner
from parity.trace_view.records import Bar, Gauge, Lane, Mark, TraceView
from parity.worker import WorkerDied, shared_worker
from scheduler.records import IntentKind


def view_of_exact_run(case: Case) -> TraceView:
    """Run on the exact engine."""
    return trace_of(replay(case).run, engine="exact engine, no model")


def view_of_real_run(case: Case) -> TraceView:
    """Run on llama.cpp, contained. Raises ``UsageError`` when the process dies or there is no model."""
    check_case(case)
    profile = profile_of(case.model).profile
    arguments = {"case": case.to_json(), "profile": profile.to_json()}
    try:
        data = shared_worker(profile.environment).call("parity.trace_view.collect:collect_here", arguments)
    except WorkerDied as death:
        raise UsageError(
            "the case ended its process",
            where=case.model,
            why=death.reason,
            todo="look at it with --engine exact",
        ) from death
    return TraceView.from_data(data)


def collect_here(arguments: dict[str, Any]) -> dict[str, Any]:
    """In the worker: run the case once and flatten its trace."""
    case, profile = Case.from_json(arguments["case"]), NumericsProfile.from_json(arguments["profile"])
    runner, family, file = process_runner(1), known_family(case.family), known_model(case.model)
    layout_profile = profile.for_layout(case.layout)
    engine = runner.engine(case, file, family, layout_profile)
    run = runner.attempt(case, engine, family, layout_profile, file).run
    return trace_of(run, engine=f"llama.cpp, {file.path.name}").to_data()


def trace_of(run: Run, *, engine: str) -> TraceView:
    """Flatten a run."""
    case = run.case
    bars = tuple(bar for traced in run.trace for bar in _bars(traced))
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
        title=f"{case.family}, {case.layout.value} layout, {len(case.sessions)} sessions",
        engine=engine,
        policy=f"{case.policy}({options})" if options else case.policy,
        budget=case.max_num_batched_tokens,
        lanes=lanes,
        bars=bars,
        marks=tuple(marks),
        gauges=gauges,
        notes=(*run.problems, *run.failures),
    )


def _bars(traced: TraceStep) -> list[Bar]:
    done = {item.request_id: item for item in (traced.result.chunks if traced.result is not None else ())}
    bars = []
    for chunk in traced.flight.plan.chunks:
        item = done.get(chunk.request_id)
        bars.append(
            Bar(
                step=traced.step,
                session=session_index(chunk.request_id),
                start=chunk.start,
                stop=chunk.stop,
                phase=traced.flight.views[chunk.request_id].phase_at(chunk.start).value,
                emitted=item is not None and item.token is not None,
                completed=item is not None,
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
