"""One llama.cpp context driven by the scheduler's batches: logical ids to physical ones, operations, calls.

A logical sequence is one physical id; in families with a window cache it is two, so that no cell has a
single owner that the window cache could take away; in recurrent families one id holds nothing, and
copying it drops another id's state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter

import numpy as np

from parity.engines.geometry import ids_of, ids_per_sequence, round_cells
from parity.engines.llama import ContextSettings, DecodeFailure, LlamaContext, LlamaModel
from parity.engines.numerics import NumericsProfile
from parity.engines.sampling import sample_token
from scheduler.engine import PAD_ROW, Batch, Call, EngineFailure, MemoryOp, OpKind, completed_result
from scheduler.limits import Layout, PoolLimits
from scheduler.records import IterationPlan, IterationResult

PAD_TOKEN = 7  # any token: nobody reads a padding row

LogitsObserver = Callable[
    [str, int, np.ndarray], None
]  # request id, position of the token, logits float32 [n_vocab]


class PoolContext:
    """A context and the mapping from the scheduler's sequence ids to llama.cpp's."""

    def __init__(
        self,
        model: LlamaModel,
        *,
        layout: Layout,
        num_sequences: int,
        num_cells: int,
        shadow: bool,
        recurrent: bool,
        profile: NumericsProfile,
        kv_type: str = "f16",
        n_threads: int = 1,
        swa_full: bool = True,
        embedding_input: bool = False,
        eval_callback: object = None,
    ) -> None:
        self.layout, self.recurrent = layout, recurrent
        self.clock, self.native_s = perf_counter, 0.0  # seconds inside llama_decode since the start
        self.ids_per_row = ids_per_sequence(shadow)
        self.num_sequences = num_sequences
        physical = ids_of(num_sequences, shadow=shadow, recurrent=recurrent)
        self.empty_id = physical - 1
        stream_cells = round_cells(num_cells)
        self.settings = ContextSettings(
            n_ctx=stream_cells * physical if layout is Layout.STREAMS else stream_cells,
            n_seq_max=physical,
            n_batch=512,
            n_ubatch=min(512, profile.max_call_rows),
            kv_unified=layout is not Layout.STREAMS,
            flash_attention=profile.flash_attention,
            kv_type=kv_type,
            swa_full=swa_full,
            n_threads=n_threads,
        )
        self.context = LlamaContext(
            model,
            self.settings,
            ids_per_row=self.ids_per_row,
            embedding_input=embedding_input,
            eval_callback=eval_callback,
        )

    def physical_ids(self, seq_id: int) -> range:
        return range(seq_id * self.ids_per_row, (seq_id + 1) * self.ids_per_row)

    def apply(self, ops: Sequence[MemoryOp]) -> None:
        """Carry out memory operations. Raises ``EngineFailure`` when llama.cpp refuses one."""
        context = self.context
        for op in ops:
            if op.kind is OpKind.CLEAR:
                context.clear()
            elif op.kind is OpKind.DROP_STATE:
                if self.recurrent:
                    for target in self.physical_ids(op.seq_id):
                        context.copy(self.empty_id, target)
            elif op.kind is OpKind.COPY:
                for source, target in zip(
                    self.physical_ids(op.source), self.physical_ids(op.seq_id), strict=True
                ):
                    context.copy(source, target, op.start, op.stop)
            else:
                for target in self.physical_ids(op.seq_id):
                    if not context.remove(target, op.start, op.stop):
                        raise EngineFailure(
                            f"llama.cpp refused to remove [{op.start}, {op.stop}) of sequence {target}"
                        )

    def fill(self, call: Call, batch: Batch, wanted: Sequence[int]) -> int:
        """Put a call's rows into the input buffers (tokens too); ``wanted`` are 0/1
        per batch row. Returns the count.
        """
        context, rows = self.context, call.rows
        count = len(rows)
        tokens, positions = batch.tokens, batch.positions
        context.tokens[:count] = [PAD_TOKEN if row == PAD_ROW else tokens[row] for row in rows]
        context.positions[:count] = [0 if row == PAD_ROW else positions[row] for row in rows]
        context.wanted[:count] = [0 if row == PAD_ROW else wanted[row] for row in rows]
        if self.ids_per_row == 1:
            context.seq_ids[:count, 0] = call.seq_ids
        else:
            first = np.asarray(call.seq_ids, np.int32) * 2
            context.seq_ids[:count, 0] = first
            context.seq_ids[:count, 1] = first + 1
        return count

    def decode(self, count: int) -> None:
        """Run the filled rows. Raises ``EngineFailure``."""
        begin_s = self.clock()
        try:
            self.context.decode(count)
        except DecodeFailure as failure:
            raise EngineFailure(str(failure)) from failure
        self.native_s += self.clock() - begin_s

    def check_fits(self, limits: PoolLimits) -> None:
        """Raises ValueError if the context is too small for what the scheduler will believe."""
        if limits.num_sequences > self.num_sequences or limits.num_cells >= self.settings.n_ctx:
            raise ValueError(f"limits {limits} do not fit a context of {self.settings}")

    def leftover_sequences(self) -> list[int]:
        """Logical ids that still hold something: none but padding when the pool is idle."""
        return [
            seq_id
            for seq_id in range(self.num_sequences)
            if any(self.context.last_position(physical) >= 0 for physical in self.physical_ids(seq_id))
        ]

    def close(self) -> None:
        self.context.close()


class SamplingEngine:
    """What every engine on llama.cpp does alike: takes limits and faults, runs a
    batch's calls, chooses the tokens.

    ``observe_logits`` is called for every sampled row before its token is chosen. ``fail_before_call`` breaks
    off the next step before that native call (an injected fault, counted over all stages), once.
    """

    def __init__(self) -> None:
        super().__init__()
        self.limits: tuple[PoolLimits, ...] = ()
        self.observe_logits: LogitsObserver | None = None
        self.fail_before_call: int | None = None
        self._calls_begun = 0

    def execute(self, plan: IterationPlan, batch: Batch, now_ms: float) -> IterationResult:
        tokens: list[int | None] = [None] * len(batch.samples)
        self._calls_begun = 0
        self._run(batch, wanted_rows(batch), self._sampler(batch, tokens))
        return completed_result(plan, batch, tokens, started_ms=now_ms, finished_ms=now_ms)

    def _sampler(self, batch: Batch, tokens: list[int | None]) -> Callable[[Sequence[int], np.ndarray], None]:
        """What takes the logits of wanted rows and puts the chosen tokens into ``tokens``, by sample."""
        sample_of_row = {sample.row: index for index, sample in enumerate(batch.samples)}

        def give(rows: Sequence[int], logits: np.ndarray) -> None:
            self._sample(batch, [sample_of_row[row] for row in rows], logits, tokens)

        return give

    def _run(
        self, batch: Batch, wanted: Sequence[int], give: Callable[[Sequence[int], np.ndarray], None]
    ) -> None:
        """Run the calls of every stage; ``give`` gets the wanted batch rows and their
        logits float32 [rows, n_vocab].
        """
        raise NotImplementedError

    def _begin_call(self) -> None:
        """Count a native call. Raises ``EngineFailure`` where a failure was asked for."""
        index = self._calls_begun
        self._calls_begun += 1
        if index == self.fail_before_call:
            self.fail_before_call = None
            raise EngineFailure(f"injected failure before native call {index}")

    def _sample(self, batch: Batch, indices: list[int], logits: np.ndarray, tokens: list[int | None]) -> None:
        """Choose the tokens of ``batch.samples[indices[i]]`` from ``logits[i]``."""
        greedy = logits.argmax(axis=1).tolist()
        for index, row, best in zip(indices, logits, greedy, strict=True):
            sample = batch.samples[index]
            if self.observe_logits is not None:
                self.observe_logits(sample.request_id, sample.position, row)
            tokens[index] = (
                best
                if sample.sampling.temperature == 0
                else sample_token(
                    row, sample.sampling, request_id=sample.request_id, position=sample.position
                )
            )


def wanted_rows(batch: Batch) -> list[int]:
    """1 for every batch row whose logits are wanted, else 0."""
    wanted = [0] * len(batch.tokens)
    for sample in batch.samples:
        wanted[sample.row] = 1
    return wanted


class LlamaEngine(SamplingEngine):
    """Implements ``scheduler.engine.Engine`` on one context. ``configure`` gives
    it the limits of the next case.
    """

    def __init__(self, pool: PoolContext) -> None:
        super().__init__()
        self.pool = pool

    def configure(self, limits: PoolLimits) -> None:
        """Use ``limits`` from now on; the pool must be idle. Raises
        ValueError if the context is too small.
        """
        self.pool.check_fits(limits)
        self.limits = (limits,)
        self.pool.context.clear()

    def apply(self, stages: Sequence[Sequence[MemoryOp]]) -> None:
        self.pool.apply(stages[0])

    def _run(
        self, batch: Batch, wanted: Sequence[int], give: Callable[[Sequence[int], np.ndarray], None]
    ) -> None:
        for call in batch.stages[0]:
            self._begin_call()
            self.pool.apply(call.ops)
            self.pool.decode(self.pool.fill(call, batch, wanted))
            rows = [row for row in call.rows if row != PAD_ROW and wanted[row]]
            if rows:
                give(rows, self.pool.context.logits(len(rows)))

    def leftover_sequences(self) -> list[int]:
        """Logical ids that still hold something: none but padding when the pool is idle."""
        return self.pool.leftover_sequences()

    def close(self) -> None:
        self.pool.close()
