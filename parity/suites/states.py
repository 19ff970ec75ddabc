"""Does a restored state go on like a recomputed one? Saved around chunk and window
boundaries, restored everywhere.

The same checks for the unsplit model and for a chain, whose stages each save their own part.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from parity.engines.stage import StageSettings
from parity.engines.stage_by_hand import HandDriver, hand_driver
from parity.models import resolve_model
from parity.models.families import load_family
from parity.run.chains import hand_settings

# What is compared, and both arrays: float32 logits [rows, n_vocab].
Compared = tuple[str, np.ndarray, np.ndarray]

SAVED_AT = (1, 15, 16, 17, 63, 64, 65)
LATE = (127, 128, 129, 130, 255, 256, 257)  # after the second and the fourth call of 63 and 64 rows
GENERATED_TOKENS, TAIL_TOKENS = 3, 15  # the prompt goes on for so many tokens after the last saved state
OWN, OTHER, NEIGHBOUR, PASSING = 1, 2, 3, 4  # sequence ids; 0 is padding's


@dataclass(slots=True)
class StateReport:
    """What was compared bit for bit, and what differed."""

    compared: int = 0
    differing: list[str] = field(default_factory=list)

    def add(self, what: str, left: np.ndarray, right: np.ndarray) -> None:
        self.compared += 1
        if not np.array_equal(left.view(np.uint32), right.view(np.uint32)):
            self.differing.append(what)


def tokens_for(name: str, count: int) -> list[int]:
    """Token ids determined by a name."""
    rng = random.Random(f"state {name}")
    return [rng.randrange(3, 250) for _ in range(count)]


class StateChecks:
    """Scenarios of one family.

    ``save`` and ``load`` may be replaced, to show that a wrong state is noticed.
    """

    def __init__(
        self,
        family: str,
        split: str | None = None,
        *,
        lengths: Sequence[int] = SAVED_AT,
        load: Callable[[HandDriver, int, tuple[bytes, ...]], None] = HandDriver.load,
    ) -> None:
        self.family, self.lengths, self._load = family, tuple(lengths), load
        self.prompt_tokens = max(self.lengths) + TAIL_TOKENS
        # Three whole sequences and a part of a fourth lie in a pool at once.
        cells = 4 * (self.prompt_tokens + GENERATED_TOKENS) + 64
        self.settings = hand_settings(resolve_model(family), load_family(family), split, num_cells=cells)
        self.prompt = tokens_for(f"{family} prompt", self.prompt_tokens)
        self.other = tokens_for(f"{family} neighbour", self.prompt_tokens)

    def run(self) -> StateReport:
        """Every scenario at every length, against logits recomputed in one go."""
        report = StateReport()
        with hand_driver(self.settings) as driver, hand_driver(self.settings) as fresh:
            reference = self._whole(driver, self.prompt)
            neighbour = self._whole(driver, self.other)
            for count in self.lengths:
                for name, scenario in self._scenarios(fresh):
                    driver.clear()
                    fresh.clear()
                    for what, left, right in scenario(driver, count, reference, neighbour):
                        report.add(f"{name} at {count} tokens: {what}", left, right)
        return report

    def _scenarios(self, fresh: HandDriver) -> Iterator[tuple[str, Callable]]:
        yield "same id", self._same_id
        yield "another id", self._another_id
        yield (
            "fresh context",
            lambda driver, count, reference, _: self._fresh(driver, fresh, count, reference),
        )
        yield "fragmented pool", self._fragmented
        yield "twice", self._twice

    def _whole(self, driver: HandDriver, tokens: list[int]) -> np.ndarray:
        """Logits of a whole prompt and of what is generated from it."""
        driver.clear()
        logits = driver.feed(OWN, tokens, 0)
        more = driver.generate(OWN, logits[-1], self.prompt_tokens, GENERATED_TOKENS)
        return np.concatenate([logits, more])

    def _saved(self, driver: HandDriver, count: int) -> tuple[bytes, ...]:
        driver.feed(OWN, self.prompt[:count], 0)
        return driver.save(OWN)

    def _go_on(self, driver: HandDriver, seq_id: int, tokens: list[int], start: int) -> np.ndarray:
        """The rest of a prompt and what is generated from it."""
        logits = driver.feed(seq_id, tokens[start:], start)
        more = driver.generate(seq_id, logits[-1], self.prompt_tokens, GENERATED_TOKENS)
        return np.concatenate([logits, more])

    def _same_id(
        self, driver: HandDriver, count: int, reference: np.ndarray, _: np.ndarray
    ) -> Iterator[Compared]:
        saved = self._saved(driver, count)
        driver.feed(OWN, self.prompt[count : count + 7], count)  # what must be gone after the restore
        self._load(driver, OWN, saved)
        yield "goes on", self._go_on(driver, OWN, self.prompt, count), reference[count:]

    def _another_id(
        self, driver: HandDriver, count: int, reference: np.ndarray, neighbour: np.ndarray
    ) -> Iterator[Compared]:
        """Beside the original and a neighbour, both of which go on afterwards."""
        saved = self._saved(driver, count)
        driver.feed(NEIGHBOUR, self.other[:20], 0)
        driver.feed(OTHER, self.other[20:25], 0)  # what must be gone after the restore
        self._load(driver, OTHER, saved)
        yield "goes on", self._go_on(driver, OTHER, self.prompt, count), reference[count:]
        yield "original", self._go_on(driver, OWN, self.prompt, count), reference[count:]
        yield "neighbour", self._go_on(driver, NEIGHBOUR, self.other, 20), neighbour[20:]

    def _fresh(
        self, driver: HandDriver, fresh: HandDriver, count: int, reference: np.ndarray
    ) -> Iterator[Compared]:
        self._load(fresh, OTHER, self._saved(driver, count))
        yield "goes on", self._go_on(fresh, OTHER, self.prompt, count), reference[count:]

    def _fragmented(
        self, driver: HandDriver, count: int, reference: np.ndarray, neighbour: np.ndarray
    ) -> Iterator[Compared]:
        """Into the holes that a finished sequence left between a neighbour's cells; fewer than are needed, so
        that the sequence's cells stay in order when it goes on.
        """
        saved = self._saved(driver, count)
        driver.clear()
        for start in range(0, 12, 3):
            driver.feed(NEIGHBOUR, self.other[start : start + 3], start)
            driver.feed(PASSING, self.prompt[start : start + 3], start)
        driver.feed(NEIGHBOUR, self.other[12:15], 12)
        driver.remove(PASSING)
        self._load(driver, OTHER, saved)
        yield "goes on", self._go_on(driver, OTHER, self.prompt, count), reference[count:]
        yield "neighbour", self._go_on(driver, NEIGHBOUR, self.other, 15), neighbour[15:]

    def _twice(
        self, driver: HandDriver, count: int, reference: np.ndarray, _: np.ndarray
    ) -> Iterator[Compared]:
        """The same blob over itself, and again into another id; both go on, in turns."""
        saved = self._saved(driver, count)
        driver.clear()
        self._load(driver, OTHER, saved)
        self._load(driver, OTHER, saved)
        self._load(driver, OWN, saved)
        first = driver.feed(OTHER, self.prompt[count:], count)
        second = driver.feed(OWN, self.prompt[count:], count)
        yield "first", first, reference[count : self.prompt_tokens]
        yield "second", second, reference[count : self.prompt_tokens]
        again = driver.generate(OTHER, first[-1], self.prompt_tokens, GENERATED_TOKENS)
        yield "first, generated", again, reference[self.prompt_tokens :]


def check_states(family: str, split: str | None = None, *, lengths: Sequence[int] = SAVED_AT) -> StateReport:
    """All scenarios of a family on the unsplit tiny model, or on a chain of one of its splits."""
    return StateChecks(family, split, lengths=lengths).run()


def check_states_here(arguments: dict[str, Any]) -> dict[str, Any]:
    """Entry point of a worker process. JSON in, JSON out."""
    return asdict(check_states(**arguments))


# -- Does a chain give the whole model's logits? Whole prompts and generated tokens,
# every row, every bit, no scheduler.

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
