"""Conformance suite for any engine and any scheduler: a Hypothesis state machine with
the laws of concurrent serving.

``make_machine`` gives a ``RuleBasedStateMachine``; its ``TestCase`` runs under pytest. Rules: submit, step,
launch and commit apart, cancel, preempt, exhaust, evict, resubmit. Laws: memory is conserved after every
rule, every accepted session ends exactly once, and its tokens are those it gives alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from parity.checkers.conservation import check_conservation
from parity.run.under_test import EngineFactory, Exhaustible, SchedulerFactory, SoloAnswer, solo_by
from scheduler.limits import Layout, PoolLimits, Sharing, StepLimits
from scheduler.loop import Scheduler
from scheduler.pipeline import Pipeline
from scheduler.policies import make_policy
from scheduler.records import FinishReason, Request, SamplingParams

MAX_STEPS_TO_IDLE = 20_000


@dataclass(frozen=True, slots=True)
class Setting:
    """What one run of the machine is made of."""

    limits: tuple[PoolLimits, ...]
    steps: StepLimits


@st.composite
def machine_settings(draw: st.DrawFn, layouts: Sequence[Layout] = tuple(Layout)) -> Setting:
    """Small pools of every layout and memory class, tight enough that sessions compete for cells and ids."""
    layout = draw(st.sampled_from(layouts))
    recurrent = draw(st.booleans())
    whole = recurrent or layout is Layout.STREAMS
    num_sequences = draw(st.sampled_from([3, 6, 16]))
    cells = draw(st.integers(8, 48))
    stages = draw(st.integers(1, 2))
    limits = tuple(
        PoolLimits(
            layout=layout,
            num_sequences=num_sequences,
            recurrent=recurrent,
            num_cells=(cells + stage) * (num_sequences if layout is Layout.STREAMS else 1),
            sharing=Sharing.WHOLE_STATE if whole else Sharing.POSITIONAL,
            max_call_rows=draw(st.sampled_from([2, 5, 63])),
        )
        for stage in range(stages)
    )
    steps = StepLimits(
        max_num_batched_tokens=draw(st.sampled_from([1, 4, 64])),
        max_num_seqs=draw(st.sampled_from([1, 2, 8])),
        prefix_cache=draw(st.booleans()),
        prefix_block_tokens=draw(st.sampled_from([1, 4])),
        max_waiting=6,
    )
    return Setting(limits, steps)


def make_machine(
    engine_factory: EngineFactory,
    *,
    scheduler_factory: SchedulerFactory = Scheduler,
    solo: SoloAnswer | None = None,
    runs: st.SearchStrategy[Setting] | None = None,
    max_token: int = 40,
) -> type[RuleBasedStateMachine]:
    """The suite as a class.

    ``solo`` is the oracle (default: the same engine, alone); ``max_token`` bounds prompts.
    """
    expected = solo_by(engine_factory) if solo is None else solo
    chosen = machine_settings() if runs is None else runs

    class ServingMachine(_ServingMachine):
        @initialize(setting=chosen)
        def start(self, setting: Setting) -> None:
            self.setting, self.expected, self.max_token = setting, expected, max_token
            self.engine = Exhaustible(engine_factory(setting.limits))
            self.scheduler = scheduler_factory(self.engine, make_policy("fcfs"), setting.steps)
            self.pipeline = Pipeline(self.scheduler, self.engine)

    ServingMachine.TestCase.settings = settings(deadline=None)
    return ServingMachine


class _ServingMachine(RuleBasedStateMachine):
    """The rules; ``start`` of the subclass gives it an engine and a scheduler."""

    scheduler: Scheduler
    engine: Exhaustible
    setting: Setting
    expected: SoloAnswer
    max_token: int

    def __init__(self) -> None:
        super().__init__()
        self.now_ms = 0.0
        self.live: dict[str, Request] = {}
        self.cancelled: dict[str, int] = {}
        self.flight = None
        self.failures_expected = self.failures = 0

    # -- rules

    @rule(data=st.data())
    def submit(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from([f"s{i}" for i in range(8)]), label="session")
        if name in self.live:
            return
        shared = data.draw(st.sampled_from([0, 0, 3, 7]), label="shared")
        tail = data.draw(st.lists(st.integers(0, self.max_token - 1), min_size=1, max_size=8), label="tail")
        request = Request(
            request_id=name,
            prompt=tuple(range(shared)) + tuple(tail),
            generation=self.cancelled.get(name, 0),
            max_tokens=data.draw(st.integers(1, 8), label="max_tokens"),
            arrival_ms=self.now_ms,
            stop_token_ids=(1,),
            sampling=SamplingParams(temperature=data.draw(st.sampled_from([0.0, 1.0]))),
        )
        most = min(limits.max_session_rows for limits in self.setting.limits)
        refusal = self.scheduler.submit(request, self.now_ms)
        if refusal is None:
            assert request.num_rows <= most, "accepted what can never fit"
            self.live[name] = request
        else:
            assert refusal.retryable == (request.num_rows <= most), f"wrong kind of refusal: {refusal}"

    @precondition(lambda self: self.flight is None)
    @rule(count=st.integers(1, 4))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.launch()
            self.commit()

    @precondition(lambda self: self.flight is None)
    @rule()
    def launch(self) -> None:
        self.flight = self.pipeline.begin(self.now_ms)
        self.pipeline.launch()

    @precondition(lambda self: self.flight is not None)
    @rule()
    def commit(self) -> None:
        self.flight = None
        done = self.pipeline.complete()
        self.failures += any(step.failure is not None for step in done)
        self.now_ms += 1.0
        self._collect()

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.live)), label="session")
        if self.scheduler.cancel(name, self.now_ms):
            self.cancelled[name] = self.live[name].generation + 1
            assert not self.scheduler.cancel(name, self.now_ms), "cancelled twice"
        self._collect()

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        self.scheduler.preempt(data.draw(st.sampled_from(sorted(self.live)), label="session"), self.now_ms)

    @precondition(lambda self: not self.engine.breaks and self.failures_expected < 2)
    @rule()
    def exhaust(self) -> None:
        self.engine.breaks = True
        self.failures_expected += 1

    @precondition(lambda self: self.flight is None and hasattr(self.scheduler, "memory"))
    @rule()
    def evict(self) -> None:
        self.scheduler.memory.evict_one()

    # -- laws

    @invariant()
    def memory_is_conserved(self) -> None:
        memory = getattr(getattr(self, "scheduler", None), "memory", None)
        if memory is not None and self.flight is None:
            check_conservation(memory)

    @invariant()
    def nothing_fails_unasked(self) -> None:
        assert self.failures <= self.failures_expected, "a step failed that nobody broke"

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        if self.flight is not None:
            self.commit()
        for _ in range(MAX_STEPS_TO_IDLE):
            if self.scheduler.is_idle:
                break
            self.step(1)
        assert self.scheduler.is_idle, f"not idle after {MAX_STEPS_TO_IDLE} steps: {sorted(self.live)}"
        assert not self.live, f"accepted but never ended: {sorted(self.live)}"
        if hasattr(self.scheduler, "drain_prefixes"):
            self.scheduler.drain_prefixes()
            assert self.scheduler.memory.counts().cells_used == 0, "cells in use although nothing is live"

    def _collect(self) -> None:
        for completion in self.scheduler.take_completions():
            request = self.live.pop(completion.request_id, None)
            assert request is not None and request.generation == completion.generation, (
                f"an end too many: {completion}"
            )
            solo = self.expected(self.setting.limits, request)
            if completion.reason is FinishReason.CANCELLED:
                assert completion.tokens == solo[: len(completion.tokens)], "a cancelled session strayed"
            else:
                assert completion.tokens == solo, f"not as alone: {completion}, {solo}"
