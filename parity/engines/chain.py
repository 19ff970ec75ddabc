"""A chain of stages in this process, as one engine: every stage has its own context,
pool, placement and call order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from parity.engines.pool import SamplingEngine
from parity.engines.stage import HiddenRows, Stage, StageSettings
from scheduler.engine import Batch, EngineFailure, MemoryOp
from scheduler.limits import PoolLimits


class StageChain(SamplingEngine):
    """Implements ``scheduler.engine.Engine`` with one entry of ``limits``, of
    operations and of calls per stage.
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
        self.limits = limits

    def apply(self, stages: Sequence[Sequence[MemoryOp]]) -> None:
        for stage, ops in zip(self.stages, stages, strict=True):
            try:
                stage.pool.apply(ops)
            except EngineFailure as failure:
                raise EngineFailure(f"{stage.settings.label}: {failure}") from failure

    def _run(
        self, batch: Batch, wanted: Sequence[int], give: Callable[[Sequence[int], np.ndarray], None]
    ) -> None:
        handed: HiddenRows | None = None
        for stage, calls in zip(self.stages, batch.stages, strict=True):
            take = None if handed is None else handed.take
            out = HiddenRows(len(batch.tokens), self.n_embd)
            stage.run(
                calls,
                batch,
                wanted,
                take=take,
                give=give if stage.settings.is_last else out.give,
                before_call=self._begin_call,
            )
            handed = out

    def leftover_sequences(self) -> list[int]:
        """Logical ids that still hold something in any stage: none but padding when the pools are idle."""
        held = {seq_id for stage in self.stages for seq_id in stage.pool.leftover_sequences()}
        return sorted(held)

    def close(self) -> None:
        for stage in self.stages:
            stage.close()
