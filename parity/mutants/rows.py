"""Mutants of rows: positions, tokens, which logits are read, how rows are cut
into calls, how tokens are chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from parity.mutants import cases
from parity.mutants.mutant import Killer, Trial, mutant
from parity.mutants.seam import (
    Change,
    ResultChange,
    in_batches,
    in_results,
    rows_of,
    shifted,
)
from parity.mutants.trials import exact_trial, real_trial
from parity.records import Case
from scheduler.engine import PAD_ROW, Batch
from scheduler.records import IterationPlan, IterationResult

VICTIM = "s1"
LATE_POSITION = 12 + 20  # of ``lockstep``'s sessions
DIFFERS = (Killer.BITS, Killer.BYTES)


def everywhere(
    make: Callable[..., Case], families: Sequence[str] = cases.FAMILIES, **settings: Any
) -> tuple[Trial, ...]:
    """The case on the exact engine and on llama.cpp, for each family."""
    made = [make(family, **settings) for family in families]
    return (*map(exact_trial, made), *map(real_trial, made))


@mutant(
    in_batches,
    part="rows",
    killers=DIFFERS,
    trials=(exact_trial(cases.lockstep("llama", max_tokens=30)),),
)
def foreign_token_after_twenty_of_its_own() -> Change:
    """A session goes on from another's tokens, but only from its twentieth on."""

    def change(plan: IterationPlan, batch: Batch) -> Batch:
        rows = [row for row in rows_of(batch, plan, VICTIM) if batch.positions[row] >= LATE_POSITION]
        tokens = tuple(batch.tokens[0] if row in rows else token for row, token in enumerate(batch.tokens))
        return replace(batch, tokens=tokens)

    return change


@mutant(
    in_batches,
    part="rows",
    killers=DIFFERS,
    trials=everywhere(cases.mixed),
)
def position_off_by_one() -> Change:
    """Positions of one session are shifted by one."""

    def change(plan: IterationPlan, batch: Batch) -> Batch:
        return replace(batch, positions=shifted(batch.positions, rows_of(batch, plan, VICTIM), 1))

    return change


@mutant(
    in_batches,
    part="rows",
    killers=DIFFERS,
    trials=everywhere(cases.mixed),
)
def logits_rows_swapped() -> Change:
    """Two sessions of a step get each other's logits."""

    def change(plan: IterationPlan, batch: Batch) -> Batch:
        if len(batch.samples) < 2:
            return batch
        first, second, *rest = batch.samples
        return replace(batch, samples=(first._replace(row=second.row), second._replace(row=first.row), *rest))

    return change


@mutant(
    in_batches,
    part="rows",
    killers=DIFFERS,
    trials=everywhere(cases.mixed),
)
def logits_rows_dense() -> Change:
    """Logits rows are counted densely although only some rows of the batch have any."""

    def change(plan: IterationPlan, batch: Batch) -> Batch:
        return replace(
            batch, samples=tuple(sample._replace(row=index) for index, sample in enumerate(batch.samples))
        )

    return change


@mutant(
    in_batches,
    part="rows",
    killers=DIFFERS,
    trials=everywhere(cases.mixed, ("llama", "qwen3next")),
)
def first_row_of_last_chunk_sampled() -> Change:
    """The end of a prompt is sampled at the first row of its last chunk."""

    def change(plan: IterationPlan, batch: Batch) -> Batch:
        samples = tuple(
            sample._replace(row=rows_of(batch, plan, sample.request_id).start) for sample in batch.samples
        )
        return replace(batch, samples=samples)

    return change


@mutant(
    in_batches,
    part="rows",
    killers=DIFFERS,
    trials=everywhere(cases.mixed, ("llama", "falcon_h1")),
)
def tokens_of_two_sessions_swapped() -> Change:
    """One token of two neighbours changes places."""

    def change(plan: IterationPlan, batch: Batch) -> Batch:
        if len(plan.chunks) < 2:
            return batch
        tokens, first, second = list(batch.tokens), batch.offsets[1] - 1, batch.offsets[2] - 1
        tokens[first], tokens[second] = tokens[second], tokens[first]
        return replace(batch, tokens=tuple(tokens))

    return change


@mutant(
    in_batches,
    part="rows",
    killers=DIFFERS,
    trials=everywhere(cases.preempted),
)
def replay_without_generated_tokens() -> Change:
    """A session rebuilt after preemption replays something else than the tokens that it generated."""

    lengths: dict[str, int] = {}

    def change(plan: IterationPlan, batch: Batch) -> Batch:
        tokens = list(batch.tokens)
        for index, chunk in enumerate(plan.chunks):
            length = lengths.get(chunk.request_id)
            if length is not None and chunk.start < batch.committed[index]:
                for row in range(batch.offsets[index], batch.offsets[index + 1]):
                    tokens[row] = 0 if batch.positions[row] >= length else tokens[row]
        for sample in batch.samples:
            lengths.setdefault(sample.request_id, sample.position)
        return replace(batch, tokens=tuple(tokens))

    return change


@mutant(
    in_batches,
    part="rows",
    killers=(Killer.ENGINE, *DIFFERS, Killer.CRASH),
    trials=everywhere(cases.wide, ("llama", "gemma2")),
)
def rows_crossed_between_calls() -> Change:
    """A step cut into calls puts two rows on the wrong side of the cut."""

    def change(plan: IterationPlan, batch: Batch) -> Batch:
        stages = []
        for calls in batch.stages:
            calls = list(calls)
            for i in range(len(calls) - 1):
                left, right = calls[i], calls[i + 1]
                if PAD_ROW in left.rows or PAD_ROW in right.rows:
                    continue
                calls[i] = replace(
                    left,
                    rows=(*left.rows[:-1], right.rows[0]),
                    seq_ids=(*left.seq_ids[:-1], right.seq_ids[0]),
                )
                calls[i + 1] = replace(
                    right,
                    rows=(left.rows[-1], *right.rows[1:]),
                    seq_ids=(left.seq_ids[-1], *right.seq_ids[1:]),
                )
                break
            stages.append(tuple(calls))
        return replace(batch, stages=tuple(stages))

    return change


@mutant(
    in_batches,
    part="rows",
    killers=DIFFERS,
    trials=everywhere(cases.early_finishers),
)
def rows_repacked_with_old_order() -> Change:
    """After a session has finished, two others are read in the order of the old batch.

    When a session has left the batch, the sequence ids of two that go on are taken from the old packing.
    """

    seen: list[int] = []

    def change(plan: IterationPlan, batch: Batch) -> Batch:
        decoders = len(batch.samples) if len(batch.samples) == len(plan.chunks) else 0
        shrunk = bool(seen) and 2 <= decoders < seen[-1]
        seen.append(decoders)
        if not shrunk:
            return batch
        call = batch.stages[0][-1]
        if len(call.rows) != decoders:
            return batch
        samples = list(batch.samples)
        samples[0], samples[1] = (
            samples[0]._replace(row=samples[1].row),
            samples[1]._replace(row=samples[0].row),
        )
        return replace(batch, samples=tuple(samples))

    return change


@mutant(
    in_batches,
    part="sampling",
    killers=(Killer.BYTES,),
    trials=everywhere(cases.seeded, ("llama", "qwen3next")),
)
def sampling_keyed_by_batch_row() -> Change:
    """Seeded sampling is keyed by the batch row."""

    def change(plan: IterationPlan, batch: Batch) -> Batch:
        return replace(batch, samples=tuple(sample._replace(position=sample.row) for sample in batch.samples))

    return change


@mutant(
    in_batches,
    part="sampling",
    killers=(Killer.BYTES,),
    trials=everywhere(cases.seeded, ("llama",)),
)
def sampling_ignores_the_seed() -> Change:
    """Sessions with different seeds draw the same random numbers."""

    def change(plan: IterationPlan, batch: Batch) -> Batch:
        samples = tuple(
            s._replace(sampling=replace(s.sampling, seed=0)) if s.sampling.temperature else s
            for s in batch.samples
        )
        return replace(batch, samples=samples)

    return change


@mutant(
    in_results,
    part="rows",
    killers=(Killer.BYTES,),
    trials=everywhere(cases.alternating),
)
def output_of_an_equal_step_reused() -> ResultChange:
    """A single-session step returns what the step of equal shape before it returned.

    A step of the same shape as the one before returns the token of that one (a re-used graph's old output).
    """

    last: list[tuple[tuple[int, ...], int]] = []

    def change(plan: IterationPlan, batch: Batch, result: IterationResult) -> IterationResult:
        if len(result.chunks) != 1 or result.chunks[0].token is None:
            return result
        token = result.chunks[0].token
        previous = last[-1] if last else None
        last.append((batch.positions, token))
        if previous is None or previous[0] != batch.positions:
            return result
        return replace(result, chunks=(result.chunks[0]._replace(token=previous[1]),))

    return change
