"""Pure judgement over a server's answers: no request is made here."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from parity.checkers.identity import first_difference
from parity.endpoint.client import EndpointAnswer
from parity.records import Tier, Verdict


@dataclass(frozen=True, slots=True)
class Asked:
    """One answer: in which round (``alone 0``, ``load 1``, ...) and to which prompt (index)."""

    round: str
    prompt: int
    answer: EndpointAnswer

    @property
    def is_alone(self) -> bool:
        return self.round.startswith("alone")


def difference(expected: EndpointAnswer, actual: EndpointAnswer) -> tuple[str, str, int] | None:
    """Kind (``tokens``, ``text``, ``finish``), unit and index of the first difference in output, or None."""
    if expected.tokens and actual.tokens and expected.tokens != actual.tokens:
        return "tokens", "token", first_difference(expected.tokens, actual.tokens)
    if expected.text != actual.text:
        return "text", "character", first_difference(expected.text, actual.text)
    if expected.finish_reason != actual.finish_reason:
        return "finish", "token", len(expected.tokens)
    return None


def explain(
    kind: str, reference: EndpointAnswer, asked: Asked, found: tuple[str, str, int]
) -> dict[str, Any]:
    """One divergence as data; the margin is the reference's top-1 minus top-2
    log probability there, if known.
    """
    what, unit, index = found
    margin = reference.margins[index] if unit == "token" and index < len(reference.margins) else math.nan
    sources = (
        (reference.tokens, asked.answer.tokens) if unit == "token" else (reference.text, asked.answer.text)
    )
    expected, actual = (
        (s[index] if index < len(s) else None) if unit == "token" else s[index : index + 24] for s in sources
    )
    return {
        "prompt": asked.prompt,
        "round": asked.round,
        "kind": f"{what} {kind}",
        "unit": unit,
        "index": index,
        "expected": expected,
        "actual": actual,
        "margin": None if math.isnan(margin) else margin,
    }


def by_prompt_and_errors(asked: Sequence[Asked], prompts: int) -> tuple[dict[int, list[Asked]], list[str]]:
    """Answers per prompt in the order of asking, and one line per question that got none."""
    by_prompt: dict[int, list[Asked]] = {index: [] for index in range(prompts)}
    errors = []
    for item in asked:
        if item.answer.error:
            errors.append(f"prompt {item.prompt}, round {item.round!r}: {item.answer.error}")
        else:
            by_prompt[item.prompt].append(item)
    return by_prompt, errors


def judge(
    asked: Sequence[Asked],
    *,
    prompts: int,
    tier: Tier | None,
    most_in_flight: int,
    alone_rounds: int,
    load_rounds: int,
) -> tuple[Verdict, dict[str, Any]]:
    """Verdict and report. A prompt that is not stable alone fails by itself and is not compared under load.
    ``tier`` None is bits where the server gives log probabilities, else bytes.
    """
    has_logprobs = any(item.answer.logprobs for item in asked)
    tier = tier or (Tier.BITS if has_logprobs else Tier.BYTES)
    by_prompt, errors = by_prompt_and_errors(asked, prompts)
    divergences: list[dict[str, Any]] = []
    stable = differ_alone = differ_load = differ_logprobs = compared = most_distinct = distance = 0
    for items in by_prompt.values():
        alone = [item for item in items if item.is_alone]
        most_distinct = max(most_distinct, len({(i.answer.text, i.answer.tokens) for i in items}))
        if len(alone) < alone_rounds:
            continue
        reference = alone[0].answer
        found = [(item, diff) for item in alone[1:] if (diff := difference(reference, item.answer))]
        if found:
            differ_alone += 1
            divergences += [explain("alone", reference, item, diff) for item, diff in found]
            continue
        stable += 1
        under_load = [item for item in items if not item.is_alone]
        compared += bool(under_load)
        found = [(item, diff) for item in under_load if (diff := difference(reference, item.answer))]
        differ_load += bool(found)
        divergences += [explain("under load", reference, item, diff) for item, diff in found]
        apart = [logprob_distance(reference, item.answer) for item in (*alone[1:], *under_load)]
        differ_logprobs += not found and any(apart)
        distance = max([distance, *apart]) if not found else distance
    failed = differ_alone or differ_load or (tier is Tier.BITS and differ_logprobs)
    unproved = len(errors) or compared < prompts or most_in_flight < 2
    unproved = unproved or (tier is Tier.BITS and not has_logprobs)
    verdict = Verdict.FAIL if failed else Verdict.UNKNOWN if unproved else Verdict.PASS
    divergences.sort(key=lambda item: (item["round"], item["prompt"]))
    return verdict, {
        "verdict": verdict.value,
        "tier": tier.value,
        "prompts": prompts,
        "stable_alone": stable,
        "compared": compared,
        "answers": sum(map(len, by_prompt.values())),
        "load_rounds": load_rounds,
        "differ_alone": differ_alone,
        "differ_under_load": differ_load,
        "differ_in_logprobs": differ_logprobs,
        "most_logprob_distance": distance,
        "most_distinct_answers": most_distinct,
        "has_logprobs": has_logprobs,
        "failed": len(errors),
        "errors": errors[:20],
        "most_in_flight": most_in_flight,
        "divergences": divergences[:50],
    }


def logprob_distance(expected: EndpointAnswer, actual: EndpointAnswer) -> float:
    """Largest difference between log probabilities of the same tokens; 0.0 where either gives none."""
    if expected.tokens != actual.tokens:
        return 0.0
    return max((abs(a - b) for a, b in zip(expected.logprobs, actual.logprobs, strict=False)), default=0.0)
