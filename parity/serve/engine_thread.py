"""The one thread that owns scheduler and engine. Callers hand it commands over a queue and get events back.

There is no lock around the engine: nobody else ever touches it.
"""

from __future__ import annotations

import queue
import threading
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import monotonic

import numpy as np

from parity.serve.served_model import ServedModel
from parity.telemetry import Totals
from scheduler.loop import Flight
from scheduler.pipeline import Pipeline
from scheduler.records import FinishReason, IterationResult, Refusal, Request
from scheduler.telemetry import StepRecord


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural-log probabilities at one generated position: the token's own, and
    the ``top`` as (token, logprob).
    """

    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class Event:
    """What happened to one session: a token, an end, or a refusal."""

    request_id: str
    token: int | None = None
    logprobs: TokenLogprobs | None = None
    reason: FinishReason | None = None
    error: str = ""
    refusal: Refusal | None = None

    @property
    def is_last(self) -> bool:
        return self.reason is not None or self.refusal is not None


@dataclass(frozen=True, slots=True)
class Submit:
    """Serve a request; ``logprobs`` None wants none, else the number of alternatives per token."""

    request: Request
    logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class Cancel:
    """End a session whose caller has gone or has enough."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Stop:
    """Finish what is live, then end the thread."""


Command = Submit | Cancel | Stop
Sink = Callable[[Sequence[Event]], None]
Watch = Callable[[StepRecord, Totals], None]


class EngineBroken(Exception):
    """The engine raised what no engine may raise: its memory is in doubt and nothing here can mend it."""


class EngineThread:
    """Starts at ``start``; ends after ``Stop``. An exception of policy or plan costs what is live: it fails
    with the reason, and a new scheduler serves what comes. When the engine is beyond help ``failure`` says
    why, and the thread stays to say so to every request that is on its way.

    ``sink`` and ``watch`` are called on this thread, at most once a step.
    """

    def __init__(self, served: ServedModel, sink: Sink) -> None:
        self.served, self._sink = served, sink
        self.watch: Watch = lambda record, totals: None
        self.failure: str | None = None
        self.totals = Totals()
        self._inbox: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._live: dict[str, int | None] = {}
        self._rows: dict[str, np.ndarray] = {}  # logits of sessions that want logprobs, of the step in flight
        self._events: list[Event] = []
        self._stopping = False

    def start(self) -> None:
        self._thread.start()

    def send(self, command: Command) -> None:
        """Hand over a command; never blocks. Legal from any thread."""
        self._inbox.put(command)

    def join(self, timeout_s: float | None = None) -> bool:
        """Wait for the end of the thread; False if it is still running."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    # -- on the thread

    def _run(self) -> None:
        try:
            self._begin_anew()
            while not self._serve_until_stopped():
                self._begin_anew()
        except Exception as error:  # the thread's boundary: whatever it was, every caller must hear of it
            is_engine = isinstance(error, EngineBroken)
            self.failure = str(error) if is_engine else f"{type(error).__name__}: {error}"
            self._fail_all()
        finally:
            self._publish()

    def _begin_anew(self) -> None:
        self._scheduler = self.served.make_scheduler(observer=self._observe)
        self._pipeline = Pipeline(
            self._scheduler,
            self.served.engine,
            depth=self._scheduler.steps.steps_in_flight,
            clock_ms=lambda: monotonic() * 1e3,
            broken=lambda error: EngineBroken(f"{type(error).__name__}: {error}"),
        )

    def _serve_until_stopped(self) -> bool:
        """Serve until it is time to end; False after an exception, whose sessions have been told."""
        try:
            while self._take_commands():
                self._step()
            return True
        except EngineBroken:
            raise
        except Exception as error:  # a bug in a policy must not end the server for everybody to come
            traceback.print_exc()
            reason = f"internal error: {type(error).__name__}: {error}"
            self._events += [
                Event(request_id, reason=FinishReason.FAILED, error=reason) for request_id in self._live
            ]
            self._live.clear()
            self._publish()
            return False

    def _fail_all(self) -> None:
        """End what is live, and until ``Stop`` whatever comes: a caller that looked at ``failure`` just
        before it was set has a request in the inbox.
        """
        for request_id in self._live:
            self._fail(request_id)
        while not self._stopping:
            self._publish()
            command = self._inbox.get()
            if isinstance(command, Submit):
                self._fail(command.request.request_id)
            self._stopping = isinstance(command, Stop)

    def _fail(self, request_id: str) -> None:
        self._events.append(Event(request_id, reason=FinishReason.FAILED, error=self.failure))

    def _take_commands(self) -> bool:
        """Carry out what is in the inbox, waiting for something when idle; False when it is time to end."""
        while True:
            idle = self._scheduler.is_idle
            if idle and self._stopping:
                return False
            if idle:
                self._publish()
            try:
                command = self._inbox.get(block=idle)
            except queue.Empty:
                return True
            self._obey(command)

    def _obey(self, command: Command) -> None:
        now_ms = monotonic() * 1e3
        if isinstance(command, Submit):
            request_id = command.request.request_id
            self._live[request_id] = command.logprobs
            refusal = self._scheduler.submit(command.request, now_ms)
            if refusal is not None:
                del self._live[request_id]
                self._events.append(Event(request_id, refusal=refusal))
        elif isinstance(command, Cancel):
            self._scheduler.cancel(command.request_id, now_ms)
            self._collect()
        else:
            self._stopping = True

    def _step(self) -> None:
        pipeline, engine = self._pipeline, self.served.engine
        wants = any(count is not None for count in self._live.values())
        engine.observe_logits = self._note_row if wants else None
        self._rows.clear()
        pipeline.begin(monotonic() * 1e3)
        pipeline.launch()
        for done in pipeline.complete() if pipeline.must_complete else ():
            self.totals.add(done.record.as_dict())
            self.served.note_step(done.record)
            self._collect()
            self._publish()
            self.watch(done.record, self.totals)

    def _observe(self, flight: Flight, result: IterationResult | None) -> None:
        """Tokens of a step, as the scheduler applied them: a session that
        was cancelled in flight has none.
        """
        for item in result.chunks if result is not None else ():
            if item.token is not None and flight.late.get(item.request_id) != "cancel":
                row = self._rows.get(item.request_id)
                count = self._live.get(item.request_id)
                logprobs = None if row is None or count is None else token_logprobs(row, item.token, count)
                self._events.append(Event(item.request_id, token=item.token, logprobs=logprobs))

    def _note_row(self, request_id: str, position: int, row: np.ndarray) -> None:
        if self._live.get(request_id) is not None:
            self._rows[request_id] = row

    def _collect(self) -> None:
        for done in self._scheduler.take_completions():
            self._live.pop(done.request_id, None)
            self._events.append(Event(done.request_id, reason=done.reason, error=done.error))

    def _publish(self) -> None:
        if self._events:
            events, self._events = self._events, []
            self._sink(events)


def token_logprobs(row: np.ndarray, token: int, count: int) -> TokenLogprobs:
    """Of one row of logits (float32 [n_vocab]) the token's log probability and the
    ``count`` likeliest, best first.

    Computed in float64 from the row alone, so that equal logits give equal numbers.
    Ties go to the lower token id.
    """
    wide = row.astype(np.float64)
    wide -= wide.max()
    wide -= np.log(np.exp(wide).sum())
    best = np.argsort(-wide, kind="stable")[:count] if count else ()
    return TokenLogprobs(float(wide[token]), tuple((int(i), float(wide[i])) for i in best))
