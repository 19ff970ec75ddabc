"""What is asked: prompts that share prefixes as trees, long ones, every setting that a server has, and then
what builds on its answers: conversations that go on, stop strings that are met, what a client that left had
begun.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from parity.endpoint.answers import Answer
from parity.endpoint.case import Question, SystemCase, SystemSession
from parity.endpoint.system import SystemFacts

WORDS = (
    "river stone lamp paper green seven winter door music table cloud engine north copper garden window "
    "market letter island yellow bridge silver mountain number question answer harbour needle candle forest"
).split()
SHARED_WORDS, OWN_WORDS = 40, (1, 4, 16, 40, 120)
LONG_WORDS = 320
SAMPLED = {"temperature": 1.0, "kind": "sampled"}
PENALISED = {"repeat_penalty": 1.5, "kind": "penalty"}
# How sessions of a round that starts all at once are grouped: what a batch or a slot has after its like.
GROUPS = "long sampled penalty bias n twin tree turn stop returned plain".split()


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptSizes:
    """``words`` scales ordinary prompts (1.0: up to 160 words); ``long_words`` is the length of long ones."""

    words: float = 1.0
    long_words: int = LONG_WORDS


def prompt_sizes(
    facts: SystemFacts, *, tokens_per_word: float, max_tokens: int, prompt_tokens: int | None
) -> PromptSizes:
    """Sizes that a session's share of the context has room for. ``prompt_tokens`` is what the user wants of
    the long ones. A server with one pool says the whole pool for each slot, one with private parts a part.
    """
    context = facts.context_tokens
    long_words = LONG_WORDS if prompt_tokens is None else max(1, int(prompt_tokens / tokens_per_word))
    wanted = 1.0 if prompt_tokens is None else min(1.0, long_words / (SHARED_WORDS + max(OWN_WORDS)))
    if context is None:
        return PromptSizes(words=wanted, long_words=long_words)
    shared_out = context / facts.slots if facts.slots else context
    room = (shared_out if shared_out >= 256 else context) - 2 * max_tokens
    ordinary = max(room * 0.6 / tokens_per_word, 4.0) / (SHARED_WORDS + max(OWN_WORDS))
    if prompt_tokens is None:
        long_words = min(long_words, max(4, int(0.75 * room / tokens_per_word)))
    return PromptSizes(words=min(wanted, ordinary), long_words=long_words)


def first_questions(
    count: int,
    *,
    seed: int,
    max_tokens: int,
    temperature: float,
    facts: SystemFacts,
    sizes: PromptSizes = PromptSizes(),
) -> list[Question]:
    """``count`` questions that need no answer first, all different. A ``temperature`` above 0 samples all of
    them.
    """
    rng = random.Random(f"endpoint {seed}")
    roots = [_words(rng, max(1, round(SHARED_WORDS * sizes.words))) for _ in range(2)]
    branches = [f"{root} {_words(rng, max(1, round(16 * sizes.words)))}" for root in roots for _ in range(2)]
    extras: list[dict] = [{}, SAMPLED, {}]
    if facts.takes_penalties:
        bias = {"logit_bias": tuple((id_, 4.0) for id_ in range(40, 60)), "kind": "bias"}
        extras = [{}, PENALISED, SAMPLED, bias, PENALISED]
    if facts.takes_n:
        extras.insert(1, {"n": 2, "kind": "n"})
    questions = []
    for index in range(count):
        own = _words(rng, max(1, round(rng.choice(OWN_WORDS) * sizes.words)))
        kind = "plain"
        if index % 6 == 5:
            prompt, kind = f"{_words(rng, sizes.long_words)} {index}", "long"
        elif index % 2:
            prompt, kind = f"{roots[index // 2 % 2]} {own} {index}", "tree"
        elif index % 4 == 2:
            # Twins: the second of two differs from the first in its last character only.
            prompt, kind = f"{branches[index // 8 % 4]} turn {index // 8}{'ab'[index // 4 % 2]}", "twin"
        else:
            prompt = f"{own} {index}"
        question = Question(prompt=prompt, max_tokens=max_tokens, kind=kind)
        if temperature > 0:
            question = replace(question, temperature=temperature, kind="sampled")
        elif index % 6 == 3:
            question = replace(question, **SAMPLED)
        elif index % 3 == 1:
            question = replace(question, **{"kind": kind, **extras[index // 3 % len(extras)]})
            if question.kind == "penalty":
                # Few different tokens: a penalty for anybody else's is seen.
                question = replace(question, prompt=f"{'abcdef'[index % 6] * 12} {index}")
        if question.temperature > 0:
            question = replace(question, seed=seed + index)
        questions.append(question)
    return questions


def later_questions(
    asked: Sequence[Question], answers: Sequence[Answer], *, seed: int, ids: Sequence[tuple[int, ...] | None]
) -> tuple[list[Question], dict[int, int]]:
    """Questions that build on answers (given alone): further turns, stop strings, and for clients that will
        leave what they come back with. ``ids`` are the prompts' token ids where the server says them.

    Also which question (index into ``asked``) a client leaves, for each one (index into the result) that
    continues it.
    """
    rng = random.Random(f"later {seed}")
    found: list[Question] = []
    left: dict[int, int] = {}
    usable = [
        index
        for index, (question, answer) in enumerate(zip(asked, answers, strict=True))
        if answer.is_whole
        and question.n == 1
        and question.kind not in ("long", "sampled", "penalty", "bias")
        and len(answer.choices[0].tokens or answer.choices[0].text) >= 4
    ]
    rng.shuffle(usable)
    parts = max(1, len(usable) // 6)
    turns, leavers, rest = usable[: 2 * parts], usable[2 * parts : 3 * parts], usable[3 * parts :]
    for index in turns:
        found.append(_go_on(asked[index], answers[index], ids[index], rng, None))
    for index in leavers:
        left[len(found)] = index
        found.append(_go_on(asked[index], answers[index], ids[index], rng, 3))
    # Few answers of a model that writes bytes hold a text to stop at, so all are looked through.
    stops = ((index, _stop_string(answers[index].choices[0].text)) for index in (*rest, *turns, *leavers))
    met = [replace(asked[index], stop=(stop,), kind="stop") for index, stop in stops if stop]
    return found + met[: 2 * parts], left


def _go_on(
    question: Question, answer: Answer, ids: tuple[int, ...] | None, rng: random.Random, count: int | None
) -> Question:
    """The question whose prompt is this one, its answer (or ``count`` tokens of it) and some words. By ids
    where all are known.
    """
    tokens = answer.choices[0].tokens
    own = f" and {_words(rng, 3)}"
    kind = "turn" if count is None else "returned"
    plain = {"kind": kind, "temperature": 0.0, "stop": ()}
    known = [token.id for token in tokens]
    if (
        ids is not None
        and known
        and None not in known
        and [t.position for t in tokens] == [*range(len(tokens))]
    ):
        # Any ids do for the new words: they need to be another text, not a sentence.
        return replace(question, prompt=(*ids, *known[:count], *ids[-7:]), **plain)
    text = answer.choices[0].text
    return replace(
        question, prompt=f"{question.prompt}{text[: None if count is None else 2 * count]}{own}", **plain
    )


def _stop_string(text: str) -> str:
    """Two characters of an answer's middle that come there for the first time; empty where there are none.

    Those in front are ASCII too: where bytes are held back servers look for stop strings in several ways.
    """
    for index in range(max(4, len(text) // 3), len(text) - 2):
        stop, near = text[index : index + 2], text[index - 4 : index + 2]
        if near.isascii() and stop.isprintable() and text.find(stop) == index and stop.strip() == stop:
            return stop
    return ""


def load_case(
    questions: Sequence[Question],
    left: dict[int, int],
    *,
    seed: int,
    number: int,
    concurrency: int,
    disconnects: int,
    facts: SystemFacts,
    chat: bool,
    stream: bool,
) -> tuple[SystemCase, list[int | None]]:
    """One round under load: every question in a new order, some twice, with clients that leave among them.

    ``left`` names for a question (by index) the one that its client left before. Also for each session the
    question that it asks, None for clients that leave.
    """
    rng = random.Random(f"load {seed} {number}")
    jobs: list[tuple[int, int | None]] = [(index, None) for index in range(len(questions))]
    again = [index for index, question in enumerate(questions) if question.chooses != "greedy"]
    again += rng.sample(range(len(questions)), len(questions) // 8)
    jobs += [(index, None) for index in again]
    rng.shuffle(jobs)
    if number % 2 == 0:
        jobs.sort(key=lambda job: GROUPS.index(questions[job[0]].kind))
    leavers = [(rng.randrange(len(questions)), rng.choice((0, 1, 3))) for _ in range(disconnects)]
    for place, leaver in enumerate(leavers):
        jobs.insert(place * len(jobs) // max(1, len(leavers)) + place % 3, leaver)
    for index, origin in sorted(left.items()):
        if disconnects:
            place = next(i for i, (q, leave) in enumerate(jobs) if q == index and leave is None)
            jobs.insert(place, (origin, 3))
    sessions: list[SystemSession] = []
    for place, (index, leave) in enumerate(jobs):
        after = place - concurrency if place >= concurrency else None
        after_tokens = rng.choice((1, 2, 5, None, None, None)) if number % 2 else None
        if leave is None and index in left and place and jobs[place - 1] == (left[index], 3):
            after, after_tokens = place - 1, None
        elif after is None and number % 2 and place:
            after, after_tokens = rng.randrange(place), rng.choice((1, 2, 5))
        streams = leave is not None or (stream and (not facts.holds_back or place % 3 == 0))
        sessions.append(
            SystemSession(
                question=questions[index],
                after=after,
                after_tokens=after_tokens,
                leave_after=leave,
                stream=streams,
            )
        )
    asks = [None if leave is not None else index for index, leave in jobs]
    return SystemCase(sessions=tuple(sessions), chat=chat), asks


def _words(rng: random.Random, count: int) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(count))
