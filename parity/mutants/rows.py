"""Mutants of rows: positions, tokens, which logits are read, how rows are cut
into calls, how tokens are chosen.
"""

from __future__ import annotations

from dataclasses import replace

from parity.mutants import cases
from parity.mutants.records import Killer, Mutant
from parity.mutants.seam import Change, batch_plant, result_plant, rows_of, shifted
from parity.mutants.trials import exact_trial, real_trial
from scheduler.engine import PAD_ROW, Batch
from scheduler.records import IterationPlan, IterationResult

VICTIM = "s1"
LATE_POSITION = 12 + 20  # of ``lockstep``'s sessions
DIFFERS = (Killer.BITS, Killer.BYTES)


def position_shift() -> Change:
    """Positions of one session, from its first row to its last, are one too high."""

    def change(plan: IterationPlan, batch: Batch) -> Batch:
        return replace(batch, positions=shifted(batch.positions, rows_of(batch, plan, VICTIM), 1))

    return change


def late_foreign_token() -> Change:
    """One session goes on from the tokens of another, from its twentieth generated token on."""

    def change(plan: IterationPlan, batch: Batch) -> Batch:
        rows = [row for row in rows_of(batch, plan, VICTIM) if batch.positions[row] >= LATE_POSITION]
        tokens = tuple(batch.tokens[0] if row in rows else token for row, token in enumerate(batch.tokens))
        return replace(batch, tokens=tokens)

    return change


def swapped_logits() -> Change:
    """Two sessions of one step read each other's logits."""

    def change(plan: IterationPlan, batch: Batch) -> Batch:
        if len(batch.samples) < 2:
            return batch
        first, second, *rest = batch.samples
        return replace(batch, samples=(first._replace(row=second.row), second._replace(row=first.row), *rest))

    return change


def dense_logits() -> Change:
    """The i-th sample reads row i of the batch, although only some rows have logits wanted."""

    def change(plan: IterationPlan, batch: Batch) -> Batch:
        return replace(
            batch, samples=tuple(sample._replace(row=index) for index, sample in enumerate(batch.samples))
        )

    return change


def first_row_sampled() -> Change:
    """The last chunk of a prompt is sampled at its first row instead of its last."""

    def change(plan: IterationPlan, batch: Batch) -> Batch:
        samples = tuple(
            sample._replace(row=rows_of(batch, plan, sample.request_id).start) for sample in batch.samples
        )
        return replace(batch, samples=samples)

    return change


def swapped_tokens() -> Change:
    """The last tokens of two sessions of a step change places."""

    def change(plan: IterationPlan, batch: Batch) -> Batch:
        if len(plan.chunks) < 2:
            return batch
        tokens, first, second = list(batch.tokens), batch.offsets[1] - 1, batch.offsets[2] - 1
        tokens[first], tokens[second] = tokens[second], tokens[first]
        return replace(batch, tokens=tuple(tokens))

    return change


def replay_of_prompt_alone() -> Change:
    """A rebuild replays the prompt's last token where the session had generated its own."""
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


def crossed_calls() -> Change:
    """The last row of a call and the first of the next one change places."""

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


def repacked_batch() -> Change:
    """When a session has left the batch, the sequence ids of two that go on
    are taken from the old packing.
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


def row_keyed_sampling() -> Change:
    """The random number of a sampled token is keyed by its row in the batch."""

    def change(plan: IterationPlan, batch: Batch) -> Batch:
        return replace(batch, samples=tuple(sample._replace(position=sample.row) for sample in batch.samples))

    return change


def nameless_sampling() -> Change:
    """The random number of a sampled token does not depend on the session's seed."""

    def change(plan: IterationPlan, batch: Batch) -> Batch:
        samples = tuple(
            s._replace(sampling=replace(s.sampling, seed=0)) if s.sampling.temperature else s
            for s in batch.samples
        )
        return replace(batch, samples=samples)

    return change


def stale_output():
    """A step of the same shape as the one before returns the token of that one
    (a re-used graph's old output).
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


def everywhere(make, families=cases.FAMILIES, **settings):
    """The case on the exact engine and on llama.cpp, for each family."""
    made = [make(family, **settings) for family in families]
    return (*map(exact_trial, made), *map(real_trial, made))


MUTANTS = (
    Mutant(
        name="foreign_token_after_twenty_of_its_own",
        part="rows",
        killers=DIFFERS,
        plant=batch_plant(late_foreign_token),
        fault="A session goes on from another's tokens, but only from its twentieth on.",
        trials=(exact_trial(cases.lockstep("llama", max_tokens=30)),),
    ),
    Mutant(
        name="position_off_by_one",
        part="rows",
        killers=DIFFERS,
        plant=batch_plant(position_shift),
        fault="Positions of one session are shifted by one.",
        trials=everywhere(cases.mixed),
    ),
    Mutant(
        name="logits_rows_swapped",
        part="rows",
        killers=DIFFERS,
        plant=batch_plant(swapped_logits),
        fault="Two sessions of a step get each other's logits.",
        trials=everywhere(cases.mixed),
    ),
    Mutant(
        name="logits_rows_dense",
        part="rows",
        killers=DIFFERS,
        plant=batch_plant(dense_logits),
        fault="Logits rows are counted densely although only some rows of the batch have any.",
        trials=everywhere(cases.mixed),
    ),
    Mutant(
        name="first_row_of_last_chunk_sampled",
        part="rows",
        killers=DIFFERS,
        plant=batch_plant(first_row_sampled),
        fault="The end of a prompt is sampled at the first row of its last chunk.",
        trials=everywhere(cases.mixed, ("llama", "qwen3next")),
    ),
    Mutant(
        name="tokens_of_two_sessions_swapped",
        part="rows",
        killers=DIFFERS,
        plant=batch_plant(swapped_tokens),
        fault="One token of two neighbours changes places.",
        trials=everywhere(cases.mixed, ("llama", "falcon_h1")),
    ),
    Mutant(
        name="replay_without_generated_tokens",
        part="rows",
        killers=DIFFERS,
        plant=batch_plant(replay_of_prompt_alone),
        fault="A session rebuilt after preemption replays something else than the tokens that it generated.",
        trials=everywhere(cases.preempted),
    ),
    Mutant(
        name="rows_crossed_between_calls",
        part="rows",
        killers=(Killer.ENGINE, *DIFFERS, Killer.CRASH),
        plant=batch_plant(crossed_calls),
        fault="A step cut into calls puts two rows on the wrong side of the cut.",
        trials=everywhere(cases.wide, ("llama", "gemma2")),
    ),
    Mutant(
        name="rows_repacked_with_old_order",
        part="rows",
        killers=DIFFERS,
        plant=batch_plant(repacked_batch),
        fault="After a session has finished, two others are read in the order of the old batch.",
        trials=everywhere(cases.early_finishers),
    ),
    Mutant(
        name="sampling_keyed_by_batch_row",
        part="sampling",
        killers=(Killer.BYTES,),
        plant=batch_plant(row_keyed_sampling),
        fault="Seeded sampling is keyed by the batch row.",
        trials=everywhere(cases.seeded, ("llama", "qwen3next")),
    ),
    Mutant(
        name="sampling_ignores_the_seed",
        part="sampling",
        killers=(Killer.BYTES,),
        plant=batch_plant(nameless_sampling),
        fault="Sessions with different seeds draw the same random numbers.",
        trials=everywhere(cases.seeded, ("llama",)),
    ),
    Mutant(
        name="output_of_an_equal_step_reused",
        part="rows",
        killers=(Killer.BYTES,),
        plant=result_plant(stale_output),
        fault="A single-session step returns what the step of equal shape before it returned.",
        trials=everywhere(cases.alternating),
    ),
)
