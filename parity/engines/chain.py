"""A chain of stages in this process, as one engine: every stage has its own context,
pool, placement and call order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from parity.engines.in_flight import StagesInTurn, Walk
from parity.engines.pool import SamplingEngine, wanted_rows
from parity.engines.stage import HiddenRows, Stage, StageSettings
from scheduler.engine import Batch, EngineFailure, MemoryOp, completed_result
from scheduler.limits import PoolLimits
from scheduler.records import IterationPlan


class StageChain(StagesInTurn, SamplingEngine):
    """Implements ``scheduler.engine.OverlappingEngine`` with one entry of ``limits``, of operations and of
    calls per stage.
    """

    def __init__(self, settings: Sequence[StageSettings]) -> None:
        super().__init__()
        self.settings = tuple(settings)
        self.stages = tuple(Stage(stage) for stage in settings)
        self.n_embd = self.stages[0].model.n_embd

    @property
    def lost(self) -> str:
        """Why the chain cannot go on; empty while it can. Stages of this process live as long as it does."""
        return ""

    def configure(self, *limits: PoolLimits) -> None:
        """Use ``limits``, one per stage, from now on; the pools must be idle.

        Raises ValueError if a context is too small for its stage's limits.
        """
        for stage, own in zip(self.stages, limits, strict=True):
            stage.pool.check_fits(own)
            stage.pool.context.clear()
        self.give_up_launched()
        self.limits = limits

    def apply(self, stages: Sequence[Sequence[MemoryOp]]) -> None:
        self.give_up_launched()
        for stage, ops in zip(self.stages, stages, strict=True):
            try:
                stage.pool.apply(ops)
            except EngineFailure as failure:
                raise EngineFailure(f"{stage.settings.label}: {failure}") from failure

    def walk(self, plan: IterationPlan, batch: Batch, now_ms: float) -> Walk:
        """Run the batch through every stage and sample."""
        wanted, tokens = wanted_rows(batch), [None] * len(batch.samples)
        sample, before_call = self._sampler(batch, tokens), self._call_counter(batch)
        handed: HiddenRows | None = None
        for stage, calls in zip(self.stages, batch.stages, strict=True):
            if handed is not None:
                yield
            take = None if handed is None else handed.take
            out = HiddenRows(len(batch.tokens), self.n_embd)
            stage.run(
                calls,
                batch,
                wanted,
                take=take,
                give=sample if stage.settings.is_last else out.give,
                before_call=before_call,
            )
            handed = out
        return completed_result(plan, batch, tokens, started_ms=now_ms, finished_ms=now_ms)

    def _call_counter(self, batch: Batch) -> Callable[[], None]:
        """Counts one step's native calls over all stages. Raises ``EngineFailure`` where a failure was asked
        for; a step with fewer calls leaves it to the next one.
        """
        failing, begun = self.fail_before_call, 0
        if failing is not None and failing < sum(map(len, batch.stages)):
            self.fail_before_call = None
        else:
            failing = None

        def before_call() -> None:
            nonlocal begun
            if begun == failing:
                raise EngineFailure(f"injected failure before native call {begun}")
            begun += 1

        return before_call

    def leftover_sequences(self) -> list[int]:
        """Logical ids that still hold something in any stage: none but padding when the pools are idle."""
        held = {seq_id for stage in self.stages for seq_id in stage.pool.leftover_sequences()}
        return sorted(held)

    def close(self) -> None:
        for stage in self.stages:
            stage.close()
