"""Mutants of the hand-off: rows, scales, layer kinds, and a stage that misses what the others do."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

import parity.models.slice as slicer
import parity.run.chains as stages_build
from parity.engines.stage import HiddenRows, HiddenTap, Stage
from parity.errors import UsageError
from parity.models.facts import ModelFacts
from parity.models.slice import LayerRange
from parity.mutants import cases, sharing_cases
from parity.mutants.mutant import Complaint, Killer, Place, Plant, Reach, Trial, mutant, replaced
from parity.mutants.trials import complaints_of, run_real_case
from parity.records import Case
from parity.run.runner import process_runner
from scheduler.cells import PAD_SEQUENCE
from scheduler.engine import PAD_ROW, Call, MemoryOp, OpKind

FAULTY_STAGE = 1
DIFFERS = (Killer.BITS,)
REFUSED = (Killer.ENGINE,)


def stage_trial(case: Case, split: str) -> Trial:
    """A case on a chain. A chain that cannot be made is the engine's complaint."""
    across = replace(case, split=split)

    def run() -> tuple[Complaint, ...]:
        try:
            return complaints_of(run_real_case(across))
        except UsageError as error:
            return (Complaint(Killer.ENGINE, error.line),)

    return Trial(name=f"{case.family} {split}", family=case.family, place=Place.REAL, case=across, run=run)


def on_chains(plant: Plant) -> Plant:
    """A plant whose chains are made with the fault in, and closed with it."""

    @contextmanager
    def planted(reach: Reach) -> Iterator[None]:
        chains = process_runner(1).chains
        chains.close()
        try:
            with plant(reach):
                yield
        finally:
            chains.close()

    return planted


# -- rows


def given_rows(change: Callable[[np.ndarray, Reach], np.ndarray]) -> Plant:
    """A plant that changes the states float32 [rows, n_embd] of every call on their way to the next stage."""

    @contextmanager
    def plant(reach: Reach) -> Iterator[None]:
        def make(original: Callable[..., Any]) -> Callable[..., Any]:
            def give(self: HiddenRows, rows: Sequence[int], states: np.ndarray) -> None:
                own = [place for place, row in enumerate(rows) if row != PAD_ROW]
                states = np.array(states)
                if own:
                    states[own] = change(states[own], reach)
                original(self, rows, states)

            return give

        with replaced(HiddenRows, "give", make):
            yield

    return on_chains(plant)


# -- a stage that misses something


def missed_ops(kind: OpKind) -> Plant:
    """A plant that takes every operation of one kind from one stage; padding's own are left."""

    @contextmanager
    def plant(reach: Reach) -> Iterator[None]:
        def without(ops: Sequence[MemoryOp]) -> tuple[MemoryOp, ...]:
            kept = tuple(op for op in ops if op.kind is not kind or op.seq_id == PAD_SEQUENCE)
            if len(kept) < len(ops):
                reach()
            return kept

        def make(original: Callable[..., Any]) -> Callable[..., Any]:
            def run(self: Stage, calls: Sequence[Call], *arguments: Any, **named: Any) -> None:
                if self.settings.index == FAULTY_STAGE:
                    calls = [replace(call, ops=without(call.ops)) for call in calls]
                original(self, calls, *arguments, **named)

            return run

        with replaced(Stage, "run", make):
            yield

    return on_chains(plant)


def _on_all(case: Callable[[str], Case]) -> tuple[Trial, ...]:
    splits = {"gemma2": "on_full", "deepseek2": "after_lead", "qwen3next": "on_full"}
    return tuple(stage_trial(case(family), splits.get(family, "halves")) for family in cases.FAMILIES)


@mutant(
    given_rows,
    part="hand-off",
    killers=DIFFERS,
    trials=_on_all(cases.mixed),
)
def stage_rows_swapped(states: np.ndarray, reach: Reach) -> np.ndarray:
    """Two rows of a call change places between stages."""

    if len(states) < 2:
        return states
    reach()
    return states[[len(states) - 1, *range(1, len(states) - 1), 0]]


@mutant(
    given_rows,
    part="hand-off",
    killers=DIFFERS,
    trials=_on_all(cases.mixed),
)
def stage_last_row_dropped(states: np.ndarray, reach: Reach) -> np.ndarray:
    """The last row of a call is not handed to the next stage, which reads zeros."""

    reach()
    return np.concatenate([states[:-1], np.zeros_like(states[-1:])])


@mutant(
    on_chains,
    part="hand-off",
    killers=REFUSED,
    trials=tuple(trial for trial in _on_all(cases.mixed) if trial.family != "qwen3next"),
)
@contextmanager
def stage_rows_not_marked(reach: Reach) -> Iterator[None]:
    """Only the last row of a call is marked as output, so that a stage drops the others."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def decode(self: Stage, count: int) -> None:
            if not self.settings.is_last and count > 1:
                self.pool.context.wanted[: count - 1] = 0
                reach()
            original(self, count)

        return decode

    with replaced(Stage, "_decode", make):
        yield


# -- scale and layer kinds


@mutant(
    on_chains,
    part="hand-off",
    killers=DIFFERS,
    trials=(stage_trial(cases.mixed("gemma2"), "halves"),),
)
@contextmanager
def stage_scale_twice(reach: Reach) -> Iterator[None]:
    """The scale on embeddings is applied to handed-over hidden states, too."""

    def make(_: Callable[..., Any]) -> Callable[..., Any]:
        def set_scale(self: HiddenTap, tensor: int) -> None:
            self.scales_undone += 1
            reach()

        return set_scale

    with replaced(HiddenTap, "_set_scale", make):
        yield


@mutant(
    on_chains,
    part="hand-off",
    killers=(Killer.BITS, Killer.ENGINE),
    trials=(
        stage_trial(cases.lockstep("gemma2"), "on_full"),
        stage_trial(cases.mixed("deepseek2"), "inside_lead"),
        stage_trial(cases.mixed("qwen3next"), "on_full"),
    ),
)
@contextmanager
def stage_layer_kinds_not_reindexed(reach: Reach) -> Iterator[None]:
    """A stage's layers take the kinds of the model's first layers: window, recurrent, dense lead."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def stage_fields(
            header: Any, data: BinaryIO, facts: ModelFacts, layers: LayerRange
        ) -> dict[str, bytes]:
            first = LayerRange(start=0, stop=layers.n_layer)
            fields, wrong = original(header, data, facts, layers), original(header, data, facts, first)
            if wrong != fields:
                reach()
            return wrong

        return stage_fields

    with tempfile.TemporaryDirectory() as folder, replaced(slicer, "_stage_fields", make):

        def uncached(_: Callable[..., Any]) -> Callable[..., Any]:
            def stage_file(file: Any, layers: LayerRange) -> Path:
                path = Path(folder) / f"{file.family}-{layers.start}-{layers.stop}.gguf"
                slicer.slice_model(file.path, layers, path)
                return path

            return stage_file

        with replaced(stages_build, "stage_file", uncached):
            yield


mutant(
    name="stage_missed_remove",
    fault="One stage does not free the retired cells that the others free.",
    part="hand-off",
    killers=(Killer.BITS, Killer.ENGINE),
    trials=_on_all(cases.refilled),
)(missed_ops(OpKind.REMOVE))


mutant(
    name="stage_missed_copy",
    fault="One stage does not share the prefix that the others share.",
    part="hand-off",
    killers=(Killer.BITS, Killer.ENGINE),
    trials=_on_all(sharing_cases.shared_prefix),
)(missed_ops(OpKind.COPY))


mutant(
    name="stage_missed_drop_of_state",
    fault="One stage keeps the recurrent state of a session that ended or was preempted.",
    part="hand-off",
    killers=(Killer.BITS, Killer.ENGINE),
    trials=tuple(trial for trial in _on_all(cases.refilled) if trial.family in cases.HYBRIDS),
)(missed_ops(OpKind.DROP_STATE))
