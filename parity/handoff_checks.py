"""Does a chain give the whole model's logits? Whole prompts and generated tokens,
every row, every bit, no scheduler.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from parity.engines.stages_build import hand_settings
from parity.engines.stages_hand import HandDriver, hand_driver
from parity.engines.stages_stage import StageSettings
from parity.families import load_family
from parity.models import resolve_model
from parity.state_checks import tokens_for

PROMPT_LENGTHS = (1, 37, 64, 130)
GENERATED_TOKENS = 32
CALL_ROWS = (63, 31, 50, 7)  # each stage cuts the same rows into other calls


@dataclass(frozen=True, slots=True)
class HandoffReport:
    """Logit rows compared, and what differed first of each prompt, one sentence each."""

    model: str
    split: str
    stages: int
    rows: int
    differing: tuple[str, ...]


def check_handoff(
    model: str,
    split: str,
    *,
    kv_type: str = "f16",
    prepare: Callable[[Sequence[StageSettings]], Sequence[StageSettings]] = tuple,
) -> HandoffReport:
    """Run prompts of several lengths and 32 generated tokens each on a chain and on the unsplit model.

    ``prepare`` may change the chain's settings, to show that a wrong chain is noticed.
    """
    file = resolve_model(model)
    family = load_family(file.family)
    settings = prepare(hand_settings(file, family, split, kv_type=kv_type))
    rows, differing = 0, []
    with (
        hand_driver(hand_settings(file, family, None, kv_type=kv_type), call_rows=(40,)) as whole,
        hand_driver(settings, call_rows=CALL_ROWS[: len(settings)]) as chain,
    ):
        for length in PROMPT_LENGTHS:
            tokens = tokens_for(f"{model} hand-off {length}", length)
            expected = _logits(whole, tokens)
            actual = _logits(chain, tokens)
            rows += len(expected)
            wrong = (expected.view(np.uint32) != actual.view(np.uint32)).any(axis=1)
            if wrong.any():
                where = int(wrong.argmax())
                what = f"prompt token {where}" if where < length else f"generated token {where - length}"
                differing.append(f"prompt of {length} tokens: {int(wrong.sum())} rows, the first is {what}")
    return HandoffReport(model, split, len(settings), rows, tuple(differing))


def _logits(driver: HandDriver, tokens: list[int]) -> np.ndarray:
    """Logits of a prompt and of greedy steps: float32 [tokens + GENERATED_TOKENS, n_vocab]."""
    driver.clear()
    logits = driver.feed(1, tokens, 0)
    return np.concatenate([logits, driver.generate(1, logits[-1], len(tokens), GENERATED_TOKENS)])


def check_handoff_here(arguments: dict[str, Any]) -> dict[str, Any]:
    """Entry point of a worker process. JSON in, JSON out."""
    return asdict(check_handoff(**arguments))
