"""Drives stages by hand, one sequence at a time and without a scheduler: every logits row,
and states saved and restored.

A chain of one stage is the unsplit model, so the same code gives the reference.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from parity.engines.stage import HiddenRows, Stage, StageSettings
from parity.engines.stage_state import StateRefused, identity_of, seal_state, unseal_state
from scheduler.cells import PAD_SEQUENCE, split_rows
from scheduler.engine import PAD_ROW, Batch, Call, MemoryOp, OpKind

CALL_ROWS = 63


class HandDriver:
    """Sequences on stages, rows placed by llama.cpp from the lowest empty cell on:
    freeing cells is the caller's art.

    ``call_rows`` may give each stage calls of another width, as pools of their
    own do. Sequence 0 is padding's.
    """

    def __init__(self, stages: Sequence[Stage], *, call_rows: Sequence[int] = ()) -> None:
        self.stages = tuple(stages)
        self.call_rows = tuple(call_rows) or (CALL_ROWS,) * len(self.stages)
        self.n_embd, self.n_vocab = self.stages[0].model.n_embd, self.stages[0].model.n_vocab
        self.clear()

    def clear(self) -> None:
        """Empty every stage; cell 0 goes to padding."""
        self.apply(MemoryOp(OpKind.CLEAR))
        prime = Call((), (PAD_ROW,), (PAD_SEQUENCE,), (0,))
        self._run((0,), (0,), [(prime,)] * len(self.stages), wanted=(0,), expected=0)

    def apply(self, *ops: MemoryOp) -> None:
        """Memory operations in every stage."""
        for stage in self.stages:
            stage.pool.apply(ops)

    def remove(self, seq_id: int, start: int = -1, stop: int = -1) -> None:
        """Free positions ``[start, stop)`` of a sequence; -1 is an open end."""
        self.apply(MemoryOp(OpKind.REMOVE, seq_id, start, stop))

    def feed(self, seq_id: int, tokens: Sequence[int], start: int) -> np.ndarray:
        """Compute a sequence's tokens at positions from ``start`` on: logits float32 [tokens, n_vocab]."""
        rows = range(len(tokens))
        calls = [self._calls(seq_id, rows, width) for width in self.call_rows]
        return self._run(
            tuple(tokens),
            tuple(start + row for row in rows),
            calls,
            wanted=(1,) * len(rows),
            expected=len(rows),
        )

    def generate(self, seq_id: int, logits: np.ndarray, start: int, count: int) -> np.ndarray:
        """``count`` greedy steps after a last row of logits float32 [n_vocab]: their
        logits float32 [count, n_vocab].
        """
        rows = [logits]
        for position in range(start, start + count):
            rows.append(self.feed(seq_id, [int(rows[-1].argmax())], position)[-1])
        return np.stack(rows[1:])

    def hidden(self, seq_id: int, tokens: Sequence[int], start: int) -> list[np.ndarray]:
        """``feed``, returning what every stage but the last hands on: float32 [tokens, n_embd] each."""
        seen: list[np.ndarray] = []
        calls = [self._calls(seq_id, range(len(tokens)), width) for width in self.call_rows]
        self._run(
            tuple(tokens),
            tuple(range(start, start + len(tokens))),
            calls,
            wanted=(1,) * len(tokens),
            expected=len(tokens),
            seen=seen,
        )
        return seen

    def _calls(self, seq_id: int, rows: range, width: int) -> tuple[Call, ...]:
        calls, begin = [], 0
        for size in split_rows(len(rows), width):
            part = tuple(rows[begin : begin + size])
            begin += size
            if size == 1:
                ops = (MemoryOp(OpKind.REMOVE, PAD_SEQUENCE),)
                calls.append(Call(ops, (PAD_ROW, *part), (PAD_SEQUENCE, seq_id), (0, -1)))
            else:
                calls.append(Call((), part, (seq_id,) * size, (-1,) * size))
        return tuple(calls)

    def _run(
        self,
        tokens: tuple[int, ...],
        positions: tuple[int, ...],
        calls: Sequence[Sequence[Call]],
        *,
        wanted: Sequence[int],
        expected: int,
        seen: list[np.ndarray] | None = None,
    ) -> np.ndarray:
        batch = Batch(tokens, positions, (), (), (), (), (), ())
        logits = np.empty((len(tokens), self.n_vocab), np.float32)
        given: list[int] = []

        def give(rows: Sequence[int], values: np.ndarray) -> None:
            logits[list(rows)] = values
            given.extend(rows)

        handed: HiddenRows | None = None
        for stage, own in zip(self.stages, calls, strict=True):
            out = HiddenRows(len(tokens), self.n_embd)
            stage.run(
                own,
                batch,
                wanted,
                take=handed.take if handed else None,
                give=give if stage.settings.is_last else out.give,
            )
            handed = out
            if seen is not None and not stage.settings.is_last:
                seen.append(out.take(range(len(tokens))))
        if len(given) != expected:
            raise AssertionError(f"logits of {len(given)} rows, not of {expected}")
        return logits[:expected]

    # -- states

    def save(self, seq_id: int) -> tuple[bytes, ...]:
        """One sealed blob per stage (``llama_state_seq_get_data``)."""
        return tuple(
            seal_state(
                stage.pool.context.save_sequence(stage.pool.physical_ids(seq_id)[0]), identity_of(stage)
            )
            for stage in self.stages
        )

    def load(self, seq_id: int, sealed: Sequence[bytes]) -> None:
        """Restore what ``save`` gave into a sequence, whatever it held.

        Raises ``StateRefused`` for a truncated, changed or foreign blob, before any stage is
        touched, and when llama.cpp refuses one; the sequence is then empty in every stage,
        and no other sequence is changed.
        """
        if len(sealed) != len(self.stages):
            raise StateRefused(f"{len(sealed)} saved states", why=f"the chain has {len(self.stages)} stages")
        pairs = zip(self.stages, sealed, strict=True)
        blobs = [unseal_state(blob, identity_of(stage)) for stage, blob in pairs]
        if not all(self.load_raw(seq_id, blobs)):
            self.remove(seq_id)
            raise StateRefused("saved state", why="llama.cpp did not take it: is there room for it?")

    def load_raw(self, seq_id: int, blobs: Sequence[bytes]) -> list[bool]:
        """Hand llama.cpp blobs without their seals; per stage whether it took the blob, whole.

        A shadow id owns what its sequence owns, so it is copied, not restored.
        """
        self.remove(seq_id)
        taken = []
        for stage, blob in zip(self.stages, blobs, strict=True):
            first, *shadows = stage.pool.physical_ids(seq_id)
            taken.append(stage.pool.context.load_sequence(first, blob))
            for shadow in shadows:
                stage.pool.context.copy(first, shadow)
        return taken

    def close(self) -> None:
        for stage in self.stages:
            stage.close()


@contextmanager
def hand_driver(settings: Sequence[StageSettings], *, call_rows: Sequence[int] = ()) -> Iterator[HandDriver]:
    """A ``HandDriver`` on stages of its own, closed at the end."""
    driver = HandDriver([Stage(stage) for stage in settings], call_rows=call_rows)
    try:
        yield driver
    finally:
        driver.close()
