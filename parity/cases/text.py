"""Text prompts for models with a real vocabulary: a few sentences of our own,
tokenised by the model itself.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from parity.models import resolve_model
from parity.models.facts import read_facts
from parity.processes import shared_worker

SMALL_VOCABULARY = 512  # the tiny models' bytes and special tokens; a real vocabulary has tens of thousands
PROMPT_TOKENS = 320  # at least as long as the longest prompt of a case
REAL_WORK_TOKENS = 500  # rows of one case: a real model's row costs a hundred times a tiny one's

SENTENCES = (
    "The ferry leaves the north quay at six, unless the fog bell rings before that.",
    "Write a short letter to a neighbour whose apple tree leans over your fence.",
    "What is the difference between a lake and a reservoir?",
    "In the third year of the survey, only two of the seven springs still carried water.",
    "def area(width, height):\n    return width * height",
    "Give me three reasons to keep a paper map in the car.",
    "My grandmother counted eggs in Welsh and money in English.",
    "Seventeen plus twenty-six is forty-three, and half of that is not a whole number.",
    "The museum's oldest clock runs backwards because it was built to be read in a mirror.",
    "Translate into French: the bread is still warm, please wait a little.",
    "A queue is fair only if everybody can see where it begins.",
    "List the planets from the sun outwards, then say which of them have rings.",
    "She mended the radio with a hairpin and refused to explain how.",
    "Wenn der Zug hält, steigen zuerst die Leute mit Fahrrädern aus.",
    '{"name": "kettle", "litres": 1.7, "colours": ["steel", "red"]}',
    "Explain to a child why the moon seems to follow a moving train.",
    "Nobody on the committee had read the report, yet all of them had marked page nine.",
    "The recipe asks for a spoon of salt but does not say which spoon.",
    "Une carte ne montre jamais le vent, et c'est pourtant lui qui décide.",
    "Summarise the rules of chess in four sentences, without naming any piece twice.",
    "When the bridge was closed, the two halves of the village learned to shout.",
    "Prices: tea 2.40, soup 5.10, bread 1.35; how much do two teas and a soup cost?",
    "Keep the lamp away from the curtain and the cat away from the lamp.",
    "The last sentence of the diary was written in pencil, and somebody had rubbed half of it out.",
)


@dataclass(frozen=True, slots=True)
class TextPrompts:
    """Tokenised running texts. ``prompts(seed, count)`` is the beginning of one of them, so that an equal
    seed gives a prefix of a longer draw.
    """

    texts: tuple[tuple[int, ...], ...]

    def __call__(self, seed: int, count: int) -> tuple[int, ...]:
        text = self.texts[seed % len(self.texts)]
        if count > len(text):
            raise ValueError(f"a text of {len(text)} tokens has no {count}")
        return text[:count]


def running_text(start: int) -> str:
    """All sentences in order, from the ``start``-th on and round, twice."""
    order = SENTENCES[start:] + SENTENCES[:start]
    return " ".join(order + order)


def has_real_vocabulary(model: str) -> bool:
    """Whether token ids below 250 are not simply bytes, so that prompts must be tokenised text."""
    return read_facts(resolve_model(model).path).n_vocab > SMALL_VOCABULARY


@functools.cache
def text_prompts(model: str) -> TextPrompts:
    """Prompts for a model, tokenised in a worker process."""
    texts = [running_text(start) for start in range(len(SENTENCES))]
    tokens = shared_worker(()).call("parity.cases.text:tokenise_here", {"model": model, "texts": texts})
    return TextPrompts(tuple(tuple(each[:PROMPT_TOKENS]) for each in tokens))


def tokenise_here(arguments: dict[str, Any]) -> list[list[int]]:
    """In the worker: token ids of each text under the model's own tokenizer."""
    from parity.engines.llama import LlamaModel

    model = LlamaModel(resolve_model(arguments["model"]).path, use_extra_bufts=False)
    try:
        return [model.tokenize(text) for text in arguments["texts"]]
    finally:
        model.close()
