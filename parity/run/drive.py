"""Drives a scheduler through a case: arrivals, faults, steps; returns everything
that happened. Engine-agnostic.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from parity.checkers.conservation import check_conservation
from parity.checkers.ends import ENGINE_FAULTS
from parity.history import Run, TraceStep, session_index
from parity.records import Case, Fault, FaultKind
from scheduler.engine import Engine, EngineFailure
from scheduler.loop import Flight, NoProgress, Scheduler
from scheduler.records import IllegalTransition, IterationResult

MAX_STEPS_PER_TOKEN = 200  # a case that needs more steps than this per token of work is stuck


class Driver:
    """Runs one case once on a new scheduler and the engine that it was made for.

    A scheduler that is not ours may have no ``memory`` to check. ``inject`` hands faults that
    only an engine can show (no slot, decode error, ...) to whoever can; it returns False when
    this run cannot show that fault.
    """

    def __init__(
        self,
        case: Case,
        scheduler: Scheduler,
        engine: Engine,
        inject: Callable[[Fault], bool] = lambda fault: False,
    ) -> None:
        self.case = case
        self.run = Run(case)
        self.scheduler, self.engine = scheduler, engine
        self.memory = getattr(scheduler, "memory", None)
        self._inject = inject
        self._step = 0
        self._clock_offset_ms = 0.0
        self._faults: dict[int, list[Fault]] = {}
        for fault in case.faults:
            self._faults.setdefault(fault.step, []).append(fault)
        self._arrivals: dict[int, list[int]] = {}
        for index, session in enumerate(case.sessions):
            self._arrivals.setdefault(session.arrival_step, []).append(index)

    @property
    def now_ms(self) -> float:
        return self._step * self.case.ms_per_step + self._clock_offset_ms

    def drive(self) -> Run:
        """All steps until nothing is left to do. A stuck or illegal run ends
        with a problem, not an exception.
        """
        work = sum(len(s.prompt) + s.max_tokens for s in self.case.sessions) + len(self.case.faults)
        last_arrival = max(self._arrivals, default=0)
        bound = last_arrival + MAX_STEPS_PER_TOKEN * work
        try:
            while self._step <= last_arrival or not self.scheduler.is_idle:
                self._arrive()
                self._one_step()
                self._collect()
                self._step += 1
                if self._step > bound:
                    self.run.problems.append(f"liveness: not idle after {bound} steps")
                    break
            else:
                self._check_empty()
        except (NoProgress, IllegalTransition, AssertionError) as error:
            kind = {NoProgress: "liveness", AssertionError: "conservation"}.get(type(error), "legality")
            self.run.problems.append(f"{kind}: {error}")
        self._collect()
        self._check_partition()
        return self.run

    def _check_empty(self) -> None:
        if self.memory is not None:
            self.scheduler.drain_prefixes()
            if self.memory.counts().cells_used:
                self.run.problems.append("memory: cells are in use although nothing is live")

    def _arrive(self) -> None:
        for index in self._arrivals.get(self._step, ()):
            refusal = self.scheduler.submit(
                self.case.sessions[index].to_request(index, arrival_ms=self.now_ms), self.now_ms
            )
            if refusal is not None:
                self.run.refusals[index] = refusal

    def _one_step(self) -> None:
        faults = self._faults.get(self._step, ())
        for fault in faults:
            if not fault.in_flight and fault.kind not in ENGINE_FAULTS:
                self._fire(fault)
        self._execute(faults)
        if self.memory is not None:
            check_conservation(self.memory)

    def _execute(self, faults: Sequence[Fault]) -> None:
        now_ms = self.now_ms
        flight = self.scheduler.begin(now_ms)
        for fault in faults:
            # In a step without rows the engine is not asked; armed, it would fail some later step or run.
            if not fault.in_flight and fault.kind in ENGINE_FAULTS and flight.plan.chunks:
                self._fire(fault)
        try:
            result = self.engine.execute(flight.plan, flight.batch, now_ms) if flight.plan.chunks else None
        except EngineFailure as failure:
            self.run.failures.append(str(failure))
            self.run.trace.append(TraceStep(self._step, flight, None))
            self.run.records.append(self.scheduler.fail(failure, now_ms))
            return
        for fault in faults:
            if fault.in_flight:
                self._fire(fault)
        self.run.records.append(
            self.scheduler.finish(result, now_ms if result is None else result.finished_ms)
        )
        self._observe(flight, result)

    def _fire(self, fault: Fault) -> None:
        request_id = f"s{fault.session}"
        if fault.kind is FaultKind.CANCEL:
            fired = self.scheduler.cancel(request_id, self.now_ms)
        elif fault.kind is FaultKind.PREEMPT:
            fired = self.scheduler.preempt(request_id, self.now_ms)
        elif fault.kind in (FaultKind.SLOW_STEP, FaultKind.CLOCK_JUMP):
            self._clock_offset_ms += fault.amount
            fired = True
        else:
            fired = self._inject(fault)
        if fired:
            self.run.fired.append(fault)

    def _observe(self, flight: Flight, result: IterationResult | None) -> None:
        self.run.trace.append(TraceStep(self._step, flight, result))
        for item in result.chunks if result is not None else ():
            if item.token is not None:
                self.run.emitted_at.setdefault(session_index(item.request_id), []).append(self._step)

    def _collect(self) -> None:
        for completion in self.scheduler.take_completions():
            index = session_index(completion.request_id)
            if index in self.run.completions:
                self.run.problems.append(f"ends: session {index} ended twice")
            self.run.completions[index] = completion

    def _check_partition(self) -> None:
        """Every offered session has exactly one end: a completion or a refusal."""
        for index in range(len(self.case.sessions)):
            ends = (index in self.run.completions) + (index in self.run.refusals)
            if ends != 1 and not self.run.problems:
                self.run.problems.append(f"ends: session {index} has {ends} ends, must have one")
