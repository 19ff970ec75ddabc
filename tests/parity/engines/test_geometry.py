"""Sequence ids and cells of a context, against numbers worked by hand."""

from __future__ import annotations

import pytest

from parity.engines.geometry import ids_of, round_cells, sequences_of
from parity.models.families import load_family

# sequences, with a window cache, with a state, ids
IDS = [
    (1, False, False, 1),
    (8, False, False, 8),
    (8, True, False, 16),
    (8, False, True, 9),
    (8, True, True, 17),
]


@pytest.mark.parametrize(("sequences", "shadow", "recurrent", "ids"), IDS)
def test_ids_of_sequences_and_back(sequences: int, shadow: bool, recurrent: bool, ids: int) -> None:
    assert ids_of(sequences, shadow=shadow, recurrent=recurrent) == ids
    assert sequences_of(ids, shadow=shadow, recurrent=recurrent) == sequences
    assert sequences_of(ids - 1, shadow=shadow, recurrent=recurrent) == sequences - 1


@pytest.mark.parametrize(("asked", "made"), [(1, 256), (256, 256), (257, 512), (512, 512), (2042, 2048)])
def test_cells_are_rounded_up_to_256(asked: int, made: int) -> None:
    assert round_cells(asked) == made


@pytest.mark.parametrize(
    ("family", "sequences"),
    [("llama", 64), ("deepseek2", 64), ("gemma2", 64), ("falcon_h1", 63), ("qwen3next", 63)],
)
def test_sequences_of_the_default_contexts(family: str, sequences: int) -> None:
    assert load_family(family).most_sequences == sequences
