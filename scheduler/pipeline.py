"""Steps from begin to finish: launched and completed in order, up to ``depth`` of them at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from scheduler.engine import Engine, EngineFailure, OverlappingEngine
from scheduler.flight import Flight
from scheduler.legality import require
from scheduler.records import IterationResult
from scheduler.telemetry import StepRecord

if TYPE_CHECKING:
    from scheduler.loop import Scheduler


@dataclass(frozen=True, slots=True)
class CompletedStep:
    """What became of a step in flight: its record, and the result or why the engine had none."""

    flight: Flight
    record: StepRecord
    result: IterationResult | None
    failure: EngineFailure | None = None


class Pipeline:
    """Drives a scheduler on an engine: the one place where a step is begun and ended from outside.

    An engine with ``launch`` and ``collect`` (``scheduler.engine.OverlappingEngine``) works on all ``depth``
    steps in flight at a time; any other one runs a step when it is completed. ``clock_ms`` tells when a
    result landed, and how long the engine and the step took; without it, the result does (virtual time).
    ``broken`` is what an exception of the engine becomes that no engine may raise.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        engine: Engine,
        *,
        depth: int = 1,
        clock_ms: Callable[[], float] | None = None,
        broken: Callable[[Exception], Exception] | None = None,
    ) -> None:
        self.scheduler, self.engine, self.depth, self.clock_ms = scheduler, engine, depth, clock_ms
        self.broken = broken
        overlaps = depth > 1 and hasattr(engine, "launch")
        self._overlapping = cast(OverlappingEngine, engine) if overlaps else None
        self._flights: deque[tuple[Flight, float]] = deque()  # and when each was begun
        self._launched_ms: deque[float] = deque()
        self._failure: EngineFailure | None = None  # of a launch, told when its step's turn has come

    def begin(self, now_ms: float) -> Flight:
        """Begin the next step. Raises ``SchedulerFailure``."""
        flight = self.scheduler.begin(now_ms)
        self._flights.append((flight, now_ms))
        return flight

    def launch(self) -> None:
        """Give the step that was begun to the engine."""
        flight, now_ms = self._flights[-1]
        self._launched_ms.append(now_ms if self.clock_ms is None else self.clock_ms())
        if self._overlapping is not None and flight.plan.chunks and self._failure is None:
            try:
                self._overlapping.launch(flight.plan, flight.batch, now_ms)
            except EngineFailure as failure:
                self._failure = failure
            except Exception as error:
                raise self._broken(error) from error

    @property
    def must_complete(self) -> bool:
        """Whether the oldest step has to be completed before another is begun: all places are taken, or the
        newest one runs nothing, because everybody is in flight or has to wait.
        """
        return len(self._flights) >= self.depth or not self._flights[-1][0].plan.chunks

    def complete(self, *, before_result: Callable[[], None] = lambda: None) -> list[CompletedStep]:
        """End the oldest step, and those behind it that run nothing, or all of them when the engine fails.

        ``before_result`` is called when the engine has returned and nothing is applied yet. Raises
        ``SchedulerFailure``.
        """
        done = self._complete_oldest(before_result)
        while self._flights and not self._flights[0][0].plan.chunks:
            done += self._complete_oldest(before_result)
        return done

    def _complete_oldest(self, before_result: Callable[[], None]) -> list[CompletedStep]:
        flight, begun_ms = self._flights[0]
        try:
            result = self._result_of(flight, begun_ms) if flight.plan.chunks else None
        except EngineFailure as failure:
            return self._fail(failure)
        except Exception as error:
            raise self._broken(error) from error
        if result is not None:
            expected = flight.plan.decision_id
            require(result.decision_id == expected, f"result of another decision than {expected}", result)
        before_result()
        self._flights.popleft()
        launched_ms = self._launched_ms.popleft()
        if self.clock_ms is None:
            now_ms = begun_ms if result is None else result.finished_ms
            return [CompletedStep(flight, self.scheduler.finish(result, now_ms), result)]
        landed_ms = self.clock_ms()
        record = self.scheduler.finish(result, landed_ms)
        record.engine_ms, record.step_ms = landed_ms - launched_ms, self.clock_ms() - begun_ms
        return [CompletedStep(flight, record, result)]

    def _broken(self, error: Exception) -> Exception:
        return error if self.broken is None else self.broken(error)

    def _result_of(self, flight: Flight, begun_ms: float) -> IterationResult:
        if self._overlapping is None:
            return self.engine.execute(flight.plan, flight.batch, begun_ms)
        if self._failure is not None:
            raise self._failure
        return self._overlapping.collect()

    def _fail(self, failure: EngineFailure) -> list[CompletedStep]:
        flights, self._failure = list(self._flights), None
        self._flights.clear()
        self._launched_ms.clear()
        now_ms = flights[-1][1] if self.clock_ms is None else self.clock_ms()
        oldest = self.scheduler.fail(failure, now_ms)
        behind = [CompletedStep(flight, flight.record, None, failure) for flight, _ in flights[1:]]
        return [CompletedStep(flights[0][0], oldest, None, failure), *behind]
