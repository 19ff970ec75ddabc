"""Drives scheduler and engine in this thread: no server, no queue between caller and step."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from time import perf_counter

import psutil

from parity.bench.bench_run import BenchRun, RequestRecord
from parity.bench.fairness import claims_of, served_requests
from parity.bench.replay import CallRecorder
from parity.bench.workload import Job
from parity.checkers.claims import Observed
from parity.checkers.service import ServiceEvent, ServiceLedger, service_events
from parity.history import TraceStep
from parity.serve.served_model import ServedModel
from parity.telemetry import Totals
from scheduler.loop import Flight
from scheduler.pipeline import Pipeline
from scheduler.policies.vtc import Vtc
from scheduler.records import Completion, FinishReason, IterationResult, Request
from scheduler.telemetry import StepRecord

GAUGE_EVERY_STEPS = 8


@dataclass(slots=True)
class _Live:
    """A request under way."""

    job: Job
    number: int
    due_s: float
    sent_s: float
    times_s: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)


class InProcessDriver:
    """One run of a list of jobs on an idle engine; make another for another run. ``policy`` and
    ``prefix_cache`` replace those of the served model; ``recorder`` executes in place of its engine.
    """

    def __init__(
        self,
        served: ServedModel,
        *,
        policy: str | None = None,
        prefix_cache: bool | None = None,
        recorder: CallRecorder | None = None,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        self._clock = clock
        self.served = served
        self._scheduler = served.make_scheduler(
            observer=self._observe, policy=policy, prefix_cache=prefix_cache
        )
        if recorder is not None:
            self._scheduler.engine = recorder
        self._pipeline = Pipeline(self._scheduler, self._scheduler.engine, clock_ms=lambda: self._now() * 1e3)
        self._live: dict[str, _Live] = {}
        self._service: list[ServiceEvent] = []
        self._lengths: list[tuple[int, int]] = []
        # the steps of a run whose policy has a bound to be held to; of any other they would only fill memory
        self._trace: list[TraceStep] | None = [] if isinstance(self._scheduler.policy, Vtc) else None
        self._step_records: list[StepRecord] = []
        self._records: list[RequestRecord] = []
        self._totals = Totals()
        self._decode_steps: list[tuple[int, int, float]] = []  # of steps without prompts: rows, cells, ms
        self._sent = 0
        self._engine_s = 0.0
        self._process = psutil.Process()
        self._gauges = {"peak_rss_bytes": 0, "peak_running": 0}
        self._kv_bytes = self._kv_sessions = 0

    # -- loops

    def run_closed(self, jobs: list[Job], *, concurrency: int) -> BenchRun:
        """``concurrency`` requests at any time; a conversation keeps its place until its last turn."""
        waiting = deque(jobs)
        self._begin()
        while waiting or self._live:
            while waiting and len(self._live) < concurrency:  # a refused request leaves its place to the next
                self._send(waiting.popleft(), due_s=self._now())
            self._step_and_follow()
        return self._end()

    def run_open(
        self, jobs: list[Job], *, times_s: list[float], max_concurrency: int | None = None
    ) -> BenchRun:
        """Jobs at their times, however many are under way; with
        ``max_concurrency`` the rest waits at the client.
        """
        waiting: deque[tuple[float, Job]] = deque(zip(times_s, jobs, strict=True))
        self._begin()
        while waiting or self._live:
            while (
                waiting
                and waiting[0][0] <= self._now()
                and (max_concurrency is None or len(self._live) < max_concurrency)
            ):
                due_s, job = waiting.popleft()
                self._send(job, due_s=due_s)
            if self._live:
                self._step_and_follow()
            elif waiting:  # none is left when the last one was refused
                time.sleep(max(0.0, waiting[0][0] - self._now()))
        return self._end()

    # -- parts

    def _begin(self) -> None:
        for pool in self.served.pools:
            pool.clock, pool.native_s = self._clock, 0.0
        self._started_s = self._clock()

    def _now(self) -> float:
        return self._clock() - self._started_s

    def _send(self, job: Job, *, due_s: float) -> None:
        request_id = f"s{self._sent}"
        self._sent += 1
        now_s = self._now()
        self._lengths.append((len(job.prompt), job.max_tokens))
        request = Request(
            request_id=request_id,
            prompt=job.prompt,
            max_tokens=job.max_tokens,
            client_id=job.client_id,
            priority=job.priority,
            arrival_ms=due_s * 1e3,
            slo=job.slo,
        )
        refusal = self._scheduler.submit(request, now_s * 1e3)
        if refusal is None:
            self._live[request_id] = _Live(job, self._sent - 1, due_s, now_s)
        else:
            self._records.append(
                RequestRecord(
                    index=job.index,
                    number=self._sent - 1,
                    prompt_tokens=len(job.prompt),
                    turn=job.turn,
                    due_s=due_s,
                    sent_s=now_s,
                    end_s=now_s,
                    error=refusal.reason,
                    rejected=True,
                    client_id=job.client_id,
                    slo=job.slo,
                )
            )

    def _step_and_follow(self) -> None:
        """One step; conversations whose turn ended in it go on at once."""
        for follower in self._step() if self._live else ():
            if follower is not None:
                self._send(follower, due_s=self._now())

    def _step(self) -> list[Job | None]:
        """One step; for every request that ended, the next turn of its conversation or None."""
        pipeline = self._pipeline
        pipeline.begin(self._now() * 1e3)
        pipeline.launch()
        for done in pipeline.complete() if pipeline.must_complete else ():
            self._totals.add(done.record.as_dict())
            if self._trace is not None:
                self._trace.append(TraceStep(len(self._trace), done.flight, done.result))
                self._step_records.append(done.record)
            self.served.note_step(done.record)
            self._note_decode(done.record)
            if self._totals.steps % GAUGE_EVERY_STEPS == 1:
                self._gauge(done.record.running)
        return [self._finish(completion) for completion in self._scheduler.take_completions()]

    def _note_decode(self, record: StepRecord) -> None:
        """A step that computes one row for every session, and no prompt: what the cost of calls foretells."""
        if record.decode_tokens and not (record.prefill_tokens or record.recompute_tokens):
            self._decode_steps.append((record.decode_tokens, record.cells_used, record.engine_ms))

    def _observe(self, flight: Flight, result: IterationResult | None) -> None:
        now_s = self._now()
        if result is not None:
            self._service += service_events(flight, result, at_ms=now_s * 1e3)
        for item in result.chunks if result is not None else ():
            if item.token is not None:
                live = self._live[item.request_id]
                live.times_s.append(now_s)
                live.tokens.append(item.token)

    def _finish(self, completion: Completion) -> Job | None:
        live = self._live.pop(completion.request_id)
        error = (
            "" if completion.reason is FinishReason.LENGTH else completion.error or completion.reason.value
        )
        self._records.append(
            RequestRecord(
                index=live.job.index,
                number=live.number,
                prompt_tokens=len(live.job.prompt),
                turn=live.job.turn,
                due_s=live.due_s,
                sent_s=live.sent_s,
                token_times_s=tuple(live.times_s),
                end_s=self._now(),
                error=error,
                rejected=completion.error.startswith("rejected: "),
                client_id=live.job.client_id,
                slo=live.job.slo,
            )
        )
        return live.job.following(live.tokens)

    def _gauge(self, running: int) -> None:
        """Memory in use: resident set of the process, and what live sessions
        hold (idle prefixes not counted).
        """
        gauges, served, memory = self._gauges, self.served, self._scheduler.memory
        gauges["peak_rss_bytes"] = max(gauges["peak_rss_bytes"], self._process.memory_info().rss)
        gauges["peak_running"] = max(gauges["peak_running"], running)
        if running:
            rows = memory.total_rows() - memory.available_rows()
            self._kv_bytes += rows * served.row_bytes() + served.facts.slot_bytes() * running
            self._kv_sessions += running

    def _end(self) -> BenchRun:
        duration_s = self._now()
        self._gauge(0)
        self._scheduler.drain_prefixes()
        values, steps = self._totals.values, max(1, self._totals.steps)
        looked_up = values["prefix_hits"] + values["prefix_misses"]
        engine = {
            **self._gauges,
            "kv_bytes_per_session": self._kv_bytes / max(1, self._kv_sessions),
            "prefix_hit_rate": values["prefix_hits"] / looked_up if looked_up else 0.0,
            "prefix_tokens_saved": values["prefix_tokens_saved"],
            "steps": self._totals.steps,
            "calls_per_step": values["calls"] / steps,
            "engine_share": values["engine_ms"] / max(values["step_ms"], 1e-9),
            "native_share": max(pool.native_s for pool in self.served.pools)
            * 1e3
            / max(values["step_ms"], 1e-9),
            "preempted": values["preempted"],
            "recompute_tokens": values["recompute_tokens"],
            "engine_failures": values["engine_failures"],
            **decode_columns(self._decode_steps),
        }
        run = BenchRun(
            duration_s=duration_s,
            requests=tuple(self._records),
            engine=engine,
            service=tuple(self._service),
        )
        return run if self._trace is None else replace(run, claims=self._claims(run))

    def _claims(self, run: BenchRun) -> dict[str, str]:
        """What may be said of the fairness of a policy with a bound."""
        policy = self._scheduler.policy
        weights = {"input_weight": policy.input_weight, "output_weight": policy.output_weight}
        observed = Observed(
            policy=policy.identity.policy_id,
            options=weights,
            lengths=self._lengths,
            max_num_seqs=self._scheduler.steps.max_num_seqs,
            trace=self._trace,
            records=self._step_records,
            ledger=ServiceLedger(run.service, served_requests(run), *weights.values()),
        )
        return claims_of(observed, **weights)


def decode_columns(steps: Sequence[tuple[int, int, float]]) -> dict[str, float]:
    """Medians over the steps of (rows, cells in use, ms) in which the most rows were decoded at once."""
    most = max((rows for rows, _, _ in steps), default=0)
    full = [step for step in steps if step[0] == most]
    return {
        "decode_rows": most,
        "p50_decode_cells": median(cells for _, cells, _ in full) if full else 0.0,
        "p50_decode_step_ms": median(ms for _, _, ms in full) if full else 0.0,
    }
