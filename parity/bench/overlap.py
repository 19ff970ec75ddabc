"""What several steps in flight are worth on a chain of stages: the same work with one step in flight and with
as many as there are stages, in turns.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from statistics import median
from time import perf_counter

from parity.engines.chain_processes import ProcessChain
from parity.engines.numerics import NumericsProfile
from parity.models import ModelFile, resolve_model
from parity.models.families import load_family
from parity.records import Case, Session
from parity.run.chains import StageChains
from parity.run.runner import pool_limits
from parity.telemetry import Totals
from scheduler.loop import Scheduler
from scheduler.pipeline import Pipeline
from scheduler.policies import make_policy


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainRun:
    """One run of a workload on a chain of processes.

    ``output_throughput`` is in generated tokens per second of wall time. ``idle_share`` is the part of the
    stages' time in which they did nothing but wait, ``bubble_share`` the part of the places for steps in
    flight that held none when a step was launched (``StepRecord.pipeline_bubbles``).
    """

    steps_in_flight: int
    output_throughput: float
    idle_share: float
    bubble_share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlapRow:
    """Rounds of one workload: in each, a run with one step in flight and one with several, side by side."""

    model: str
    split: str
    stages: int
    sessions: int
    single: tuple[ChainRun, ...]
    several: tuple[ChainRun, ...]

    @property
    def ratios(self) -> list[float]:
        """Tokens/s with several steps in flight over those with one, round by round."""
        return [
            two.output_throughput / one.output_throughput
            for one, two in zip(self.single, self.several, strict=True)
        ]

    def as_dict(self) -> dict[str, object]:
        """Medians and spreads, for JSON and for the table."""
        figures: dict[str, object] = {
            "model": self.model,
            "split": self.split,
            "stages": self.stages,
            "sessions": self.sessions,
            "rounds": len(self.single),
            "ratio": _spread(self.ratios),
        }
        for runs in (self.single, self.several):
            depth = runs[0].steps_in_flight
            figures[f"output_throughput_{depth}"] = _spread([run.output_throughput for run in runs])
            figures[f"idle_share_{depth}"] = median(run.idle_share for run in runs)
            figures[f"bubble_share_{depth}"] = median(run.bubble_share for run in runs)
        return figures


def _spread(values: list[float]) -> dict[str, float]:
    return {"median": median(values), "min": min(values), "max": max(values)}


def idle_share(busy_s: list[float], wall_s: float) -> float:
    """The part of ``len(busy_s)`` stages' time, each ``wall_s``, in which they were not busy."""
    return 1 - sum(busy_s) / (len(busy_s) * wall_s)


def chain_case(
    model: str, split: str, *, sessions: int, input_tokens: int, output_tokens: int, steps_in_flight: int
) -> Case:
    """Sessions that arrive together on a chain."""
    source = random.Random(f"overlap {sessions}")
    asked = tuple(
        Session(prompt=tuple(source.randrange(3, 250) for _ in range(input_tokens)), max_tokens=output_tokens)
        for _ in range(sessions)
    )
    return Case(
        family=resolve_model(model).family,
        model=model,
        sessions=asked,
        num_sequences=62,
        pool_cells=max(4000, sessions * (input_tokens + output_tokens)),
        max_num_seqs=sessions,
        max_num_batched_tokens=512,
        prefix_cache=False,
        split=split,
        steps_in_flight=steps_in_flight,
    )


@contextmanager
def open_chain(
    case: Case, file: ModelFile, profile: NumericsProfile, *, n_threads: int
) -> Iterator[ProcessChain]:
    """The chain of a case, a process a stage, closed at the end."""
    family = load_family(case.family)
    chains, whole = StageChains(n_threads=n_threads, in_processes=True), pool_limits(case, family, profile)
    try:
        chain = chains.chain(case, file, family, profile, whole)
        chain.configure(*chains.limits(case, file, whole))
        yield chain
    finally:
        chains.close()


def measure_overlap(
    case: Case, file: ModelFile, profile: NumericsProfile, *, rounds: int, n_threads: int
) -> OverlapRow:
    """Rounds of both ways, after one that warms up; which way comes first changes from round to round.

    Raises ``RuntimeError`` when a session did not end, or did not give the same tokens both ways.
    """
    single: list[ChainRun] = []
    several: list[ChainRun] = []
    ways = [(replace(case, steps_in_flight=1), single), (case, several)]
    with open_chain(case, file, profile, n_threads=n_threads) as chain:
        outputs = None
        for turn in range(rounds + 1):
            for way, runs in ways if turn % 2 else reversed(ways):
                run, given = run_chain(way, chain)
                if given != (outputs := outputs or given):
                    raise RuntimeError(f"{case.model}, split {case.split}: other tokens with other steps")
                if turn:
                    runs.append(run)
        stages = len(chain.settings)
    return OverlapRow(
        model=case.model,
        split=case.split,
        stages=stages,
        sessions=len(case.sessions),
        single=tuple(single),
        several=tuple(several),
    )


def run_chain(case: Case, chain: ProcessChain) -> tuple[ChainRun, dict[str, tuple[int, ...]]]:
    """One run on an idle chain, and what every session gave."""
    chain.configure(*chain.limits)
    scheduler = Scheduler(chain, make_policy(case.policy), case.step_limits())
    pipeline = Pipeline(scheduler, chain, depth=case.steps_in_flight, clock_ms=lambda: perf_counter() * 1e3)
    for index, session in enumerate(case.sessions):
        scheduler.submit(session.to_request(index, arrival_ms=0.0), 0.0)
    totals, busy_s, begin_s = Totals(), list(chain.busy_s), perf_counter()
    while not scheduler.is_idle:
        pipeline.begin(perf_counter() * 1e3)
        pipeline.launch()
        for done in pipeline.complete() if pipeline.must_complete else ():
            totals.add(done.record.as_dict())
            if done.failure is not None:
                raise RuntimeError(f"{case.model}, split {case.split}: {done.failure}")
    wall_s = perf_counter() - begin_s
    outputs = {end.request_id: end.tokens for end in scheduler.take_completions()}
    if len(outputs) != len(case.sessions):
        raise RuntimeError(f"{case.model}, split {case.split}: {len(outputs)} of {len(case.sessions)} ended")
    run = ChainRun(
        steps_in_flight=case.steps_in_flight,
        output_throughput=sum(map(len, outputs.values())) / wall_s,
        idle_share=idle_share(
            [after - before for before, after in zip(busy_s, chain.busy_s, strict=True)], wall_s
        ),
        bubble_share=totals.bubble_share,
    )
    return run, outputs
