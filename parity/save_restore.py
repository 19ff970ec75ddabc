"""S12: a session's state is saved, restored into a sequence beside neighbours, and goes on bit by bit the
same.
"""

from __future__ import annotations

import numpy as np

from parity.engines.stages_build import hand_settings
from parity.engines.stages_hand import HandDriver, hand_driver
from parity.engines.stages_state import StateRefused
from parity.families import load_family
from parity.models import resolve_model
from parity.scenarios_pressure import Restore
from parity.strategies import tokens_of

SAVED, OTHER, NEIGHBOUR, HOLE, FRESH = 1, 2, 3, 4, 5
TOKENS = 6


def run_restore(restore: Restore) -> list[str]:
    """Run one S12 case in this process, which must be a worker; returns what is wrong, one sentence each."""
    family = load_family(restore.family)
    settings = hand_settings(resolve_model(restore.family), family, None)
    prompt = tokens_of(restore.seed, restore.length)
    with hand_driver(settings) as driver:
        expected = _alone(driver, prompt)
        return _restored(driver, restore, prompt, expected)


def run_restore_here(arguments: dict) -> list[str]:
    """Entry point of the worker: JSON in, JSON out."""
    return run_restore(Restore(**arguments))


def _alone(driver: HandDriver, tokens: tuple[int, ...]) -> np.ndarray:
    """Logits of what follows ``tokens`` with nobody else in the pool: float32 [TOKENS, n_vocab]."""
    driver.clear()
    logits = driver.generate(SAVED, driver.feed(SAVED, tokens, 0)[-1], len(tokens), TOKENS)
    driver.clear()
    return logits


def _restored(driver: HandDriver, restore: Restore, prompt: tuple[int, ...],
              expected: np.ndarray) -> list[str]:
    neighbour = tokens_of(restore.seed + 50, 11)
    undisturbed = _alone(driver, neighbour)
    if restore.hole:
        driver.feed(HOLE, tokens_of(restore.seed + 60, 7), 0)
    near = driver.feed(NEIGHBOUR, neighbour, 0)[-1]
    start = driver.feed(SAVED, prompt, 0)[-1]
    if restore.hole:
        driver.remove(HOLE)
    blob = driver.save(SAVED)
    target = {"same": SAVED, "other": OTHER, "fresh": FRESH}[restore.into]
    if restore.into == "other":
        driver.feed(OTHER, tokens_of(restore.seed + 70, 5), 0)
    problems = []
    if restore.cut:
        try:
            driver.load(target, [part[: -restore.cut] for part in blob])
            problems.append(f"a blob that lacks {restore.cut} bytes was restored")
        except StateRefused:
            pass
    for number in range(restore.times):
        driver.load(target, blob)
        again = driver.generate(target, start, len(prompt), TOKENS)
        if not np.array_equal(again, expected):
            problems.append(f"restore {number} into the {restore.into} sequence went on differently")
    if not np.array_equal(driver.generate(NEIGHBOUR, near, len(neighbour), TOKENS), undisturbed):
        problems.append("the neighbour of a restored sequence went on differently")
    return problems
