"""Pure judgement over a server's answers: what is a fault, what rounding explains, which tier is reached."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import Enum
from typing import Any

from parity.endpoint.answers import Answer, Choice, Token
from parity.endpoint.case import Question
from parity.endpoint.compare import Comparison, behind_its_best, compare, logprob_problem
from parity.endpoint.noise import (
    FEWEST_SAMPLES,
    UNMEASURED,
    Baseline,
    Limit,
    Sample,
    SoloAnswer,
    is_larger_all_over,
    is_more_often,
)
from parity.records import Verdict

SELF_LIMIT = (
    0.25  # nats; a greedy token is the best of its own list, but for how a server rounds what it shows
)
REFUSED_UNDER_LOAD = (429, 503)  # these mean "later"; other 5xx are failures


class SystemTier(Enum):
    """What a server keeps under load, strongest first: every shown number; the output; the output but for
    what rounding moves.
    """

    BITS = "bits"
    BYTES = "bytes"
    ROUNDING = "rounding"


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One answer: to which question (index), in which scope (``cold``, ``warm``, ``load``), which round, and
    as which session of that round's case (None alone).
    """

    question: int
    scope: str
    answer: Answer
    round: int = 0
    session: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What no rounding explains. ``size`` over ``limit`` says how clearly, infinite where no number is
    needed.
    """

    kind: str
    text: str
    question: int | None = None
    scope: str = ""
    round: int = 0
    session: int | None = None
    size: float = math.inf
    limit: float = 0.0

    @property
    def weight(self) -> float:
        return math.inf if math.isinf(self.size) else self.size / max(self.limit, 1e-9)


def in_report_order(faults: Iterable[Fault]) -> list[Fault]:
    """Those that name a prompt first, clearest first: a prompt can be asked again, a rate cannot."""
    return sorted(faults, key=lambda f: (f.question is None, -f.weight, f.round, f.session or 0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One answer that is not its reference, with the comparison to the nearest."""

    asked: Asked
    choice: int
    comparison: Comparison


@dataclass(slots=True)
class Judgement:
    """Everything that was found. ``unproved`` says what keeps a pass from being one."""

    verdict: Verdict = Verdict.UNKNOWN
    tier: SystemTier | None = None
    demanded: SystemTier | None = None
    limit: Limit = UNMEASURED
    faults: list[Fault] = field(default_factory=list)
    unproved: list[str] = field(default_factory=list)
    differences: list[Difference] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    canaries: dict[str, tuple[int, int]] = field(default_factory=dict)
    logprobs: str = ""
    counts: dict[str, int] = field(default_factory=dict)


def judge(
    questions: Sequence[Question],
    asked: Sequence[Asked],
    *,
    demanded: SystemTier | None,
    baseline: Baseline | None,
    ran_together: str,
    load_rounds: int,
    may_hold_back: bool = False,
) -> Judgement:
    """Verdict and evidence.

    Fail: an answer moved further than rounding does, an error under load, or less than the demanded tier.
    Unknown: something was not proved. Without a demand every tier that is reached will do, rounding with a
    baseline only.
    """
    limit = UNMEASURED if baseline is None else baseline.limit(2 * len(questions))
    found = Judgement(demanded=demanded, limit=limit)
    by_question: dict[int, list[Asked]] = {index: [] for index in range(len(questions))}
    for item in asked:
        by_question[item.question].append(item)
    _judge_requests(asked, found)
    found.logprobs = logprob_problem(
        [c for item in asked if item.answer.is_whole for c in item.answer.choices],
        may_hold_back=may_hold_back,
    )
    equal_bits, equal_output, compared = True, True, 0
    for index, items in by_question.items():
        question = questions[index]
        alone = [item for item in items if item.scope != "load" and item.answer.is_whole]
        load = [item for item in items if item.scope == "load" and item.answer.is_whole]
        if not alone:
            continue
        for item in (*alone, *load):
            where = {"question": index, "scope": item.scope, "round": item.round, "session": item.session}
            found.faults += [replace(f, **where) for f in judge_alone(question, item.answer, limit)]
        for scope, these in (("warm", alone[1:]), ("load", load)):
            references = [alone[0].answer] if scope == "warm" else [item.answer for item in alone]
            compared += bool(these) and scope == "load"
            apart = [diff for item in these for diff in _nearest(references, item)]
            apart += [diff for item in these for diff in _among_choices(question, item)]
            if not these:
                continue
            found.differences += [
                d for d in apart if not d.comparison.same_bits and not _unseen(d.comparison)
            ]
            equal_bits &= all(diff.comparison.same_bits or _unseen(diff.comparison) for diff in apart)
            equal_output &= all(diff.comparison.same_output for diff in apart)
            found.samples.append(_sample(scope, question, apart))
    _judge_sizes(questions, found)
    if baseline is not None:
        _judge_against_baseline(questions, by_question, baseline, found)
    _plant_canaries(questions, by_question, found)
    _look_for_sameness(questions, by_question, found)
    found.counts = _counts(questions, asked, found, compared)
    if not ran_together:
        found.unproved.append("nothing shows that two sessions ever ran together")
    if not load_rounds or compared < len(questions):
        found.unproved.append(
            f"{len(questions) - compared} of {len(questions)} questions were not compared under load"
        )
    _decide(found, equal_bits=equal_bits, equal_output=equal_output, baseline=baseline)
    return found


def _unseen(comparison: Comparison) -> bool:
    """Equal as far as it was shown: a stream that holds tokens back is no evidence against bits."""
    return comparison.blind and comparison.same_output and comparison.top_equal


# -- single answers


def _judge_requests(asked: Sequence[Asked], found: Judgement) -> None:
    """Errors: failures of the server under load are faults, also where a retry was answered."""
    for item in asked:
        where = {"question": item.question, "scope": item.scope, "round": item.round, "session": item.session}
        failures = [s for s in item.answer.statuses if s >= 500 and s not in REFUSED_UNDER_LOAD]
        if item.scope == "load" and failures:
            text = (
                item.answer.error or f"HTTP {failures[0]}, answered after {len(item.answer.statuses)} retries"
            )
            found.faults.append(Fault(kind="error under load", text=text, **where))
        elif item.answer.error:
            found.unproved.append(
                f"question {item.question}, {item.scope}: no answer after "
                f"{len(item.answer.statuses)} attempts: {item.answer.error}"
            )
        elif item.answer.is_whole and all(choice.is_empty for choice in item.answer.choices):
            found.unproved.append(f"question {item.question}, {item.scope}: the answer is empty")


def judge_alone(question: Question, answer: Answer, limit: Limit) -> list[Fault]:
    """What is wrong with an answer whatever the others are."""
    found = []
    choices = answer.choices
    if len(choices) != question.n:
        found.append(Fault(kind="choices", text=f"{len(choices)} choices, {question.n} were asked for"))
    for choice in choices:
        last = choice.length
        if last > question.max_tokens:
            text = f"{last} tokens, at most {question.max_tokens} were asked for"
            found.append(Fault(kind="too long", text=text))
        if choice.finish_reason == "length" and 0 < last < question.max_tokens:
            text = f"it ended for its length after {last} of {question.max_tokens} tokens"
            found.append(Fault(kind="too short", text=text))
        if kept := [stop for stop in question.stop if stop in choice.text]:
            found.append(Fault(kind="stop string", text=f"the answer holds the stop string {kept[0]!r}"))
        if question.chooses == "greedy" and (behind := behind_its_best(choice)) > SELF_LIMIT:
            text = f"a greedy token is {behind:.3g} nats behind the best of its own list"
            found.append(Fault(kind="not the best", text=text, size=behind, limit=SELF_LIMIT))
    return found


def _nearest(references: Sequence[Answer], item: Asked) -> list[Difference]:
    """For each choice the comparison with the reference that it is nearest to."""
    found = []
    for index, choice in enumerate(item.answer.choices):
        against = [ref.choices[index] for ref in references if index < len(ref.choices)]
        if not against:
            continue
        best = min((compare(one, choice) for one in against), key=_order)
        found.append(Difference(asked=item, choice=index, comparison=best))
    return found


def _among_choices(question: Question, item: Asked) -> list[Difference]:
    """Of several greedy completions of one prompt each against the first."""
    first, *others = item.answer.choices if question.chooses == "greedy" else item.answer.choices[:1]
    return [
        Difference(asked=item, choice=index, comparison=compare(first, other))
        for index, other in enumerate(others, 1)
    ]


def _order(comparison: Comparison) -> tuple[float, int]:
    """Nearest first: by size, then the one that stayed equal for longest."""
    return comparison.size, -comparison.compared


def _sample(scope: str, question: Question, apart: Sequence[Difference]) -> Sample:
    comparisons = [diff.comparison for diff in apart]
    # A margin is a matter of rounding only where the best token is chosen, and by what is shown.
    margins = [c.margin or 0.0 for c in comparisons if question.chooses == "greedy"]
    return Sample(
        scope=scope,
        chooses=question.chooses,
        distance=max((c.distance for c in comparisons), default=0.0),
        margin=max(margins, default=0.0),
        parted=any(not c.same_output for c in comparisons),
        compared=min((c.compared for c in comparisons if not c.same_output), default=_shown(comparisons)),
    )


def _shown(comparisons: Sequence[Comparison]) -> int:
    return max((c.compared for c in comparisons), default=0)


def _judge_sizes(questions: Sequence[Question], found: Judgement) -> None:
    """Differences that are too large for the limits."""
    for diff in found.differences:
        item, comparison = diff.asked, diff.comparison
        where = {
            "question": item.question,
            "scope": item.scope,
            "round": item.round,
            "session": item.session,
        }
        if comparison.broken:
            text = f"{comparison.broken}: {comparison.expected} against {comparison.actual}"
            found.faults.append(Fault(kind="broken", text=text, **where))
            continue
        if comparison.distance > found.limit.distance:
            text = (
                f"log probabilities moved too far for rounding: {comparison.distance:.2g} against "
                f"{found.limit.distance:.2g}"
            )
            size = {"size": comparison.distance, "limit": found.limit.distance}
            found.faults.append(Fault(kind="distance", text=text, **size, **where))
        greedy = questions[item.question].chooses == "greedy"
        if greedy and comparison.margin is not None and comparison.margin > found.limit.margin:
            text = (
                f"another token at {comparison.position}, {comparison.actual} for {comparison.expected}, by "
                f"a margin too large for rounding: {comparison.margin:.2g} against {found.limit.margin:.2g}"
            )
            size = {"size": comparison.margin, "limit": found.limit.margin}
            found.faults.append(Fault(kind="margin", text=text, **size, **where))


# -- the run as a whole


def _judge_against_baseline(
    questions: Sequence[Question], by_question: dict[int, list[Asked]], baseline: Baseline, found: Judgement
) -> None:
    """How often answers part, how far all of them move, and the answers alone against the known-good
    server's.
    """
    for scope in ("warm", "load"):
        for chooses in ("greedy", "sampled", "penalised"):
            ours = [s for s in found.samples if (s.scope, s.chooses) == (scope, chooses)]
            known = [s for s in baseline.samples if (s.scope, s.chooses) == (scope, chooses)]
            hits, before = sum(s.parted for s in ours), sum(s.parted for s in known)
            tokens, seen = sum(s.compared for s in ours), sum(s.compared for s in known)
            if is_more_often(hits, tokens, before, seen):
                text = (
                    f"{hits} of {len(ours)} {chooses} questions have another answer ({scope}), one in "
                    f"{tokens / hits:.3g} tokens; of the known-good server {before} of {len(known)}, one in "
                    f"{seen / max(before, 1):.3g}"
                )
                size = {"size": hits / max(tokens, 1), "limit": (before + 1) / (seen + 1)}
                found.faults.append(Fault(kind="too often", text=text, scope=scope, **size))
        moved = [s.distance for s in found.samples if s.scope == scope]
        usual = [s.distance for s in baseline.samples if s.scope == scope]
        if is_larger_all_over(moved, usual):
            size = {"size": sorted(moved)[len(moved) // 2], "limit": sorted(usual)[len(usual) // 2]}
            text = (
                f"log probabilities of most questions moved too far ({scope}): median "
                f"{size['size']:.2g} against {size['limit']:.2g}"
            )
            found.faults.append(Fault(kind="moved all over", text=text, scope=scope, **size))
    known_solo = {item.question: item for item in baseline.solo}
    for index, items in by_question.items():
        solo = known_solo.get(questions[index])
        first = next((item for item in items if item.scope == "cold" and item.answer.is_whole), None)
        if solo is None or first is None:
            continue
        _judge_solo(questions, solo, first, found)


def _judge_solo(questions: Sequence[Question], known: SoloAnswer, first: Asked, found: Judgement) -> None:
    """One answer alone against what the known-good server says to the same question."""
    for expected, actual in zip(known.choices, first.answer.choices, strict=False):
        comparison = compare(expected, actual)
        greedy = questions[first.question].chooses == "greedy"
        too_far = comparison.distance > found.limit.distance
        too_wide = greedy and (comparison.margin or 0.0) > found.limit.margin
        if comparison.broken or too_far or too_wide:
            size, limit = (
                (comparison.distance, found.limit.distance)
                if too_far
                else (comparison.margin or math.inf, found.limit.margin)
            )
            text = (
                f"alone it answers otherwise than the known-good server: "
                f"{comparison.broken or f'{size:.2g} against {limit:.2g}'}"
            )
            where = {"question": first.question, "scope": "baseline"}
            found.faults.append(Fault(kind="other than known", text=text, size=size, limit=limit, **where))


def _plant_canaries(
    questions: Sequence[Question], by_question: dict[int, list[Asked]], found: Judgement
) -> None:
    """Three wrong answers made of right ones; what is not told from this run's noise proves nothing."""
    answers = []
    for index, items in by_question.items():
        load = [item for item in items if item.scope == "load" and item.answer.is_whole]
        whole = [
            item
            for item in load
            if item.answer.choices[0].tokens and item.answer.choices[0].shows_every_token
        ]
        if load and questions[index].chooses == "greedy":
            answers.append((whole or load)[0].answer.choices[0])
    pairs = list(zip(answers, answers[1:] + answers[:1], strict=True)) if len(answers) > 1 else []
    told = {"a neighbour's answer": [], "one token late": [], "one log probability off": []}
    for own, other in pairs:
        told["a neighbour's answer"].append(_is_told(own, other, found.limit))
        told["one token late"].append(_is_told(own, _late(own), found.limit))
        if found.logprobs == "" and (moved := _one_off(own, other)) is not None:
            told["one log probability off"].append(_is_told(own, moved, found.limit))
    found.canaries = {name: (sum(seen), len(seen)) for name, seen in told.items() if seen}
    if not pairs:
        found.unproved.append("no two answers to make a canary of")
    for name, (seen, planted) in found.canaries.items():
        if 2 * seen < planted:
            found.unproved.append(
                f"{name} would be taken for rounding in {planted - seen} of {planted} answers"
            )


def _is_told(own: Choice, wrong: Choice, limit: Limit) -> bool:
    comparison = compare(own, wrong)
    if not own.tokens:
        return not comparison.same_output
    if not own.has_logprobs:
        return not comparison.same_output
    return bool(
        comparison.broken
        or comparison.distance > limit.distance
        or (comparison.margin or 0.0) > limit.margin
        or (not limit.is_measured and not comparison.same_bits)
    )


def _late(choice: Choice) -> Choice:
    """The answer without its first token (or character)."""
    tokens = tuple(replace(token, position=token.position - 1) for token in choice.tokens[1:])
    total = None if choice.total_tokens is None else choice.total_tokens - 1
    return replace(choice, text=choice.text[1:], tokens=tokens, total_tokens=total)


def _one_off(own: Choice, other: Choice) -> Choice | None:
    """The answer with one log probability that is somebody else's: the one that is furthest from its own."""
    pairs = [
        (abs(mine.logprob - yours.logprob), index, yours)
        for index, (mine, yours) in enumerate(zip(own.tokens, other.tokens, strict=False))
        if not math.isnan(mine.logprob) and not math.isnan(yours.logprob)
    ]
    if not pairs:
        return None
    _, index, yours = max(pairs, key=lambda pair: pair[0])
    mine: Token = own.tokens[index]
    top = tuple((key, yours.logprob if key == mine.key else value) for key, value in mine.top)
    tokens = (*own.tokens[:index], replace(mine, logprob=yours.logprob, top=top), *own.tokens[index + 1 :])
    return replace(own, tokens=tokens)


def _look_for_sameness(
    questions: Sequence[Question], by_question: dict[int, list[Asked]], found: Judgement
) -> None:
    """Different prompts need different answers, or a mix-up could not be seen."""
    answers = []
    for index, items in by_question.items():
        first = next((item for item in items if item.answer.is_whole), None)
        if first is not None and questions[index].kind not in ("stop",):
            choice = first.answer.choices[0]
            answers.append((choice.text, tuple(token.name for token in choice.tokens)))
    if len(answers) > 2 and (most := Counter(answers).most_common(1)[0][1]) * 2 > len(answers):
        found.unproved.append(f"{most} of {len(answers)} different prompts have one and the same answer")


def _counts(
    questions: Sequence[Question], asked: Sequence[Asked], found: Judgement, compared: int
) -> dict[str, int]:
    def with_difference(scope: str, *, parted: bool) -> int:
        return len(
            {
                d.asked.question
                for d in found.differences
                if d.asked.scope == scope and d.comparison.same_output is not parted
            }
        )

    return {
        "prompts": len(questions),
        "answers": sum(item.answer.is_whole for item in asked),
        "failed": sum(bool(item.answer.error) for item in asked),
        "retries": sum(len(item.answer.statuses) for item in asked if not item.answer.error),
        "compared": compared,
        "differ_alone": with_difference("warm", parted=True),
        "differ_under_load": with_difference("load", parted=True),
        "moved_alone": with_difference("warm", parted=False),
        "moved_under_load": with_difference("load", parted=False),
        "cached_tokens": sum(item.answer.cached_tokens or 0 for item in asked if item.scope == "load"),
    }


def _decide(found: Judgement, *, equal_bits: bool, equal_output: bool, baseline: Baseline | None) -> None:
    """Which tier is reached, and the verdict."""
    found.faults = in_report_order(found.faults)
    limit = found.limit
    largest = max((s.distance for s in found.samples), default=0.0)
    shown = not found.logprobs
    if found.faults:
        found.verdict = Verdict.FAIL
        return
    order = list(SystemTier)
    if equal_bits and shown:
        found.tier = SystemTier.BITS
    elif equal_output:
        found.tier = SystemTier.BYTES
    elif limit.is_measured and shown:
        found.tier = SystemTier.ROUNDING
    if found.demanded is None:
        if found.tier is None and found.logprobs == "none are shown":
            text = "answers differ, and the server shows no log probabilities to tell rounding by"
            found.faults.append(Fault(kind="other output", text=text))
        elif found.tier is None:
            found.unproved.append(
                "answers differ, and without a baseline nothing says how far rounding moves them"
            )
        if found.logprobs not in ("", "none are shown"):
            found.unproved.append(f"log probabilities say nothing: {found.logprobs}")
        if found.tier is SystemTier.BYTES and not limit.is_measured and largest > limit.distance / 2:
            found.unproved.append(f"log probabilities moved by {largest:.2g}, and there is no baseline")
    elif found.tier is None or order.index(found.tier) > order.index(found.demanded):
        if found.demanded is SystemTier.BITS and not shown:
            found.unproved.append(f"no bits to compare: {found.logprobs}")
        elif found.demanded is SystemTier.ROUNDING:
            found.unproved.append("tier rounding needs a baseline")
        else:
            reached = found.tier.value if found.tier else "none"
            text = f"tier {found.demanded.value} is demanded, {reached} is reached"
            found.faults.append(Fault(kind="tier", text=text))
    if baseline is not None and len(baseline.samples) < FEWEST_SAMPLES and found.tier is SystemTier.ROUNDING:
        found.unproved.append(
            f"the baseline has {len(baseline.samples)} questions, too few to know rounding by"
        )
    found.verdict = Verdict.FAIL if found.faults else Verdict.UNKNOWN if found.unproved else Verdict.PASS


def advice(found: Judgement, *, kind: str) -> list[str]:
    """What to try for a stronger tier; empty where the strongest is reached."""
    if found.tier is SystemTier.BITS:
        return []
    moved_alone = found.counts["differ_alone"] + found.counts["moved_alone"]
    hints = []
    if moved_alone:
        off = {
            "llama-server": "--extra-body '{\"cache_prompt\": false}'",
            "vllm": "--no-enable-prefix-caching",
        }
        hints.append(
            f"{moved_alone} answers move alone, when they are asked again: turn the prefix cache off"
            + (f" ({off[kind]})" if kind in off else "")
        )
    if found.counts["differ_under_load"] + found.counts["moved_under_load"]:
        own = {
            "llama-server": "private cells for each slot (-np N without -kvu), then -np 1",
            "vllm": "VLLM_BATCH_INVARIANT=1",
            "sglang": "--enable-deterministic-inference",
        }
        hints.append(
            f"answers move under load: try {own.get(kind, 'batch-invariant kernels, or private cells')}"
        )
    return hints


def fault_data(fault: Fault) -> dict[str, Any]:
    """A fault as JSON data: an infinite size is None."""
    data = asdict(fault)
    data["size"] = None if math.isinf(fault.size) else fault.size
    return data
