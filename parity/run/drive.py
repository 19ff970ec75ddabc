"""Drives a scheduler through a case: arrivals, faults, steps; returns everything
that happened. Engine-agnostic.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Any

from parity.checkers.conservation import CONSERVATION, Owners, find_losses, owners_of
from parity.checkers.ends import ENDS, ENGINE_FAULTS, MEMORY
from parity.history import Earlier, Run, TraceStep, session_index
from parity.protocol.peer import PeerFailure
from parity.records import Case, Fault, FaultKind, Finding
from scheduler.engine import Engine
from scheduler.loop import Scheduler
from scheduler.pipeline import CompletedStep, Pipeline
from scheduler.records import Completion, IterationResult, NoProgress, PolicyFailure, SchedulerFailure

LIVENESS, LEGALITY, INTERNAL, PROTOCOL = "liveness", "legality", "internal", "protocol"
MAX_REPEATS = 64  # times that the same rows may be computed with no new one in between
MAX_IDLE = 1000  # steps in which nothing runs, while somebody is live and nobody comes any more
MOST_TOLD = 6  # steps of a cycle that a finding spells out
MAX_STEPS_PER_TOKEN = 200  # a case that needs more steps than this per token of work is stuck


class RunEnds(Exception):
    """A law is broken for good: the run goes no further. Carries the finding."""

    def __init__(self, checker: str, text: str, **data: Any) -> None:
        super().__init__(text)
        self.checker, self.text, self.data = checker, text, data


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
        depth = case.steps_in_flight if getattr(scheduler, "overlaps_steps", False) else 1
        self._pipeline = Pipeline(scheduler, engine, depth=depth)
        self._steps_in_flight: deque[int] = deque()
        self._armed: list[Fault] = []  # fired before the next result is applied
        self._inject = inject
        self._step = 0
        self._clock_offset_ms = 0.0
        self._owners: list[Owners] = []  # of every shard of the memory
        self._given_up: dict[int, Fault] = {}
        self._generation: dict[int, int] = {}
        self._offered: dict[int, None] = {}
        self._furthest: dict[str, int] = {}  # rows that a session ever had
        self._quiet: list[tuple[int, tuple]] = []  # steps since the last new row, arrival or fault
        self._faults: dict[int, list[Fault]] = {}
        for fault in case.faults:
            self._faults.setdefault(fault.step, []).append(fault)
        self._arrivals: dict[int, list[int]] = {}
        for index, session in enumerate(case.sessions):
            self._arrivals.setdefault(session.arrival_step, []).append(index)
        self._last_event = max([*self._faults, *self._arrivals], default=0)

    @property
    def now_ms(self) -> float:
        return self._step * self.case.ms_per_step + self._clock_offset_ms

    def drive(self) -> Run:
        """All steps until nothing is left to do. A stuck or illegal run ends
        with a finding, not an exception.
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
                    raise RunEnds(LIVENESS, f"not idle after {bound} steps: {self._live()} have no end")
            self._check_empty()
        except RunEnds as end:
            self._found(end.checker, end.text, **end.data)
        except NoProgress as error:
            self._found(LIVENESS, f"{error}; {self._live()} have no end")
        except PolicyFailure as error:
            self._found(INTERNAL, f"step {self._step}: {error}")
        except PeerFailure as error:
            self._found(PROTOCOL, f"step {self._step}: {error}")
        except SchedulerFailure as error:
            self._found(LEGALITY, f"step {self._step}: {error}")
        except AssertionError as error:
            self._found(CONSERVATION, f"step {self._step}: {error}")
        self._collect()
        return self.run

    def _found(self, checker: str, text: str, **data: Any) -> None:
        self.run.findings.append(Finding(checker, text, {"step": self._step, **data}))

    def _live(self) -> str:
        """Sessions that were offered and have no end, in words."""
        ended = {*self.run.completions, *self.run.refusals}
        live = [index for index in sorted(self._offered) if index not in ended]
        return f"sessions {', '.join(map(str, live))}" if live else "no sessions"

    def _check_empty(self) -> None:
        if self.memory is not None:
            self.scheduler.drain_prefixes()
            self._check_memory("the last eviction")
            if used := self.memory.counts().cells_used:
                self._found(MEMORY, f"{used} cells are in use although nothing is live")

    def _check_memory(self, operation: str) -> None:
        """Hold the scheduler's books to the laws; a run whose books are wrong ends."""
        if self.memory is None:
            return
        shards = self.memory.shards
        for index, (shard, before) in enumerate(zip_longest(shards, self._owners)):
            number = index if len(shards) > 1 else None
            found = find_losses(shard, before, operation=operation, step=self._step, shard=number)
            if found:
                self.run.findings += found[1:]
                raise RunEnds(found[0].checker, found[0].text, **found[0].data)
        self._owners = list(map(owners_of, shards))

    def _arrive(self) -> None:
        for index in self._arrivals.get(self._step, ()):
            self._offer(index)

    def _offer(self, index: int) -> None:
        self._offered[index] = None
        request = self.case.sessions[index].to_request(
            index, arrival_ms=self.now_ms, generation=self._generation.get(index, 0)
        )
        refusal = self.scheduler.submit(request, self.now_ms)
        if refusal is not None:
            self.run.refusals[index] = refusal

    def _ask_again(self, index: int, completion: Completion) -> None:
        """A session that was given up has ended: its caller submits it anew, under the same id."""
        run = self.run
        run.emitted_at.pop(index, None)
        given = tuple(run.given_at.pop(index, ())), tuple(run.streams.pop(index, ()))
        run.earlier.append(Earlier(index, self._given_up.pop(index), completion, self._step, *given))
        self._generation[index] = completion.generation + 1
        self._furthest.pop(completion.request_id, None)
        self._offer(index)

    def _one_step(self) -> None:
        faults = self._faults.get(self._step, ())
        for fault in faults:
            if not fault.in_flight and fault.kind not in ENGINE_FAULTS:
                self._fire(fault)
        self._execute(faults)

    def _execute(self, faults: Sequence[Fault]) -> None:
        flight = self._pipeline.begin(self.now_ms)
        self._steps_in_flight.append(self._step)
        self._check_memory("admitting and placing")
        for fault in faults:
            # In a step without rows the engine is not asked; armed, it would fail some later step or run.
            if not fault.in_flight and fault.kind in ENGINE_FAULTS and flight.plan.chunks:
                self._fire(fault)
        self._armed += [fault for fault in faults if fault.in_flight]
        self._pipeline.launch()
        if not self._pipeline.must_complete:
            return
        failed = False
        for done in self._pipeline.complete(before_result=self._fire_armed):
            step = self._steps_in_flight.popleft()
            self.run.records.append(done.record)
            self._observe(step, done, is_given_up=failed)
            if done.failure is None:
                self._check_memory("applying the results")
                self._check_progress(done.result)
            elif not failed:
                failed = True
                self.run.failures.append(str(done.failure))
                self._check_memory("clearing up after the engine failed")

    def _fire_armed(self) -> None:
        armed, self._armed = self._armed, []
        for fault in armed:
            self._fire(fault)

    def _check_progress(self, result: IterationResult | None) -> None:
        """End a run in which work is done and undone: the same rows again and again, and never a new one."""
        done = () if result is None else result.chunks
        news = [item for item in done if item.after > self._furthest.get(item.request_id, 0)]
        for item in news:
            self._furthest[item.request_id] = item.after
        calm = not news and self._step > self._last_event
        if not calm:
            self._quiet.clear()
            return
        rows = tuple((item.request_id, item.before, item.after) for item in done)
        self._quiet.append((self._step, rows))
        again = [step for step, other in self._quiet if other == rows]
        if not rows:
            if len(self._quiet) >= MAX_IDLE and not any(other for _, other in self._quiet):
                raise RunEnds(LIVENESS, f"nothing ran for {MAX_IDLE} steps; {self._live()} have no end")
        elif len(again) > MAX_REPEATS:
            raise RunEnds(LIVENESS, self._describe_cycle(again[-2], self._step, len(again)))

    def _describe_cycle(self, start: int, stop: int, times: int) -> str:
        """Steps ``(start, stop]`` in words: who computed which rows, and who waits meanwhile."""
        steps = [(step, rows) for step, rows in self._quiet if start < step <= stop]
        told = "; ".join(
            f"step {step}: "
            + (", ".join(f"session {session_index(n)} [{a},{b})" for n, a, b in rows) or "nobody")
            for step, rows in steps[:MOST_TOLD]
        )
        more = f"; and {len(steps) - MOST_TOLD} more steps" if len(steps) > MOST_TOLD else ""
        return (
            f"the same rows were computed {times} times and no new one: a cycle of {len(steps)} steps, "
            f"{told}{more}; {self._live()} have no end"
        )

    def _fire(self, fault: Fault) -> None:
        request_id = f"s{fault.session}"
        if fault.kind in (FaultKind.CANCEL, FaultKind.RESUBMIT):
            fired = self.scheduler.cancel(request_id, self.now_ms)
            if fired and fault.kind is FaultKind.RESUBMIT:
                self._given_up[fault.session] = fault
        elif fault.kind is FaultKind.PREEMPT:
            fired = self.scheduler.preempt(request_id, self.now_ms)
        elif fault.kind in (FaultKind.SLOW_STEP, FaultKind.CLOCK_JUMP):
            self._clock_offset_ms += fault.amount
            fired = True
        else:
            fired = self._inject(fault)
        if fired:
            self.run.fired.append(fault)
        if fault.kind in (FaultKind.CANCEL, FaultKind.PREEMPT, FaultKind.RESUBMIT):
            self._check_memory(f"{fault.kind.value} of session {fault.session}")

    def _observe(self, step: int, done: CompletedStep, *, is_given_up: bool) -> None:
        self.run.trace.append(TraceStep(step, done.flight, done.result, is_given_up))
        for item in done.result.chunks if done.result is not None else ():
            if item.token is not None:
                index = session_index(item.request_id)
                self.run.emitted_at.setdefault(index, []).append(step)
                self.run.given_at.setdefault(index, []).append(self._step)
                self.run.streams.setdefault(index, []).append(item.token)

    def _collect(self) -> None:
        for completion in self.scheduler.take_completions():
            index = session_index(completion.request_id)
            if completion.generation != self._generation.get(index, 0):
                text = f"session {index} ended in generation {completion.generation}, which is not its last"
                self._found(ENDS, text, session=index)
            elif index in self._given_up:
                self._ask_again(index, completion)
                continue
            if index in self.run.completions:
                self._found(ENDS, f"session {index} ended twice", session=index)
            self.run.completions[index] = completion
            self.run.ended_at[index] = self._step
