"""How far two completions of one question are apart: where the output parts, and how much was between."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from parity.endpoint.answers import Choice, Key, Token


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Two completions, ``expected`` and ``actual``.

    ``position`` is that of the first generated token that differs, None for equal output. ``distance`` is the
    largest difference in nats of two log probabilities after equal tokens, up to and with that position.
    ``margin`` is how far the token that came was behind the one that was expected, in nats, as the side says
    to
    which that is a larger step: a lower bound where the token is not among those shown, None where nothing is
    known. ``broken`` names what no rounding explains. ``compared`` counts tokens; ``blind`` means that tokens
    were not shown.
    """

    position: int | None = None
    distance: float = 0.0
    margin: float | None = None
    compared: int = 0
    broken: str = ""
    blind: bool = False
    expected: str = ""
    actual: str = ""
    top_equal: bool = True

    @property
    def same_output(self) -> bool:
        return self.position is None and not self.broken

    @property
    def same_bits(self) -> bool:
        return self.same_output and self.top_equal and not self.blind

    @property
    def size(self) -> float:
        """The one number that orders differences."""
        return math.inf if self.broken else max(self.distance, (self.margin or 0.0) / 2)


def compare(expected: Choice, actual: Choice) -> Comparison:
    """Compare by ids, else by bytes, else by texts that hide nothing; what is not shown is not compared."""
    if not expected.tokens or not actual.tokens:
        return _compare_texts(expected, actual)
    ours, theirs = _by_position(expected), _by_position(actual)
    last = max(max(ours), max(theirs))
    distance, compared, blind, equal = 0.0, 0, False, True
    held_from: int | None = None
    for position in range(last + 1):
        mine, other = ours.get(position), theirs.get(position)
        if mine is None or other is None:
            if position > max(ours) or position > max(theirs):
                break
            held_from = position if held_from is None else held_from
            continue
        if held_from is not None:
            blind = True
            parted = _parted_while_held(ours, theirs, held_from, position)
            if parted is None:
                return Comparison(
                    position=None if expected.text == actual.text else held_from,
                    distance=distance,
                    compared=compared,
                    blind=True,
                    top_equal=equal,
                    expected=_show(ours.get(held_from)),
                    actual=_show(theirs.get(held_from)),
                )
            if parted >= 0:
                known = ours.get(parted) or theirs.get(parted)
                return Comparison(
                    position=parted,
                    distance=distance,
                    margin=_lead(known) if known is not None else None,
                    compared=compared,
                    blind=True,
                    top_equal=False,
                    expected=_show(ours.get(parted)),
                    actual=_show(theirs.get(parted)),
                )
            held_from = None
        apart, same_top = _distance_at(mine, other)
        distance = max(distance, apart)
        equal = equal and same_top
        compared += 1
        if not is_same_token(mine, other):
            return Comparison(
                position=position,
                distance=distance,
                margin=_margin_at(mine, other),
                compared=compared,
                blind=blind,
                top_equal=False,
                expected=_show(mine),
                actual=_show(other),
            )
    return _compare_ends(expected, actual, distance=distance, compared=compared, blind=blind, equal=equal)


def is_same_token(one: Token, other: Token) -> bool:
    """By ids where both have one, else by the names that log probabilities have; what is hidden counts as
    equal.
    """
    if one.id is not None and other.id is not None:
        return one.id == other.id
    if one.key is None or other.key is None:
        return True
    return one.key == other.key


def _compare_ends(
    expected: Choice, actual: Choice, *, distance: float, compared: int, blind: bool, equal: bool
) -> Comparison:
    """All tokens that both show are equal."""
    fields = {"distance": distance, "compared": compared}
    blind = blind or not (expected.shows_every_token and actual.shows_every_token)
    ends = {"expected": _end(expected), "actual": _end(actual)}
    same_text = _same_text(expected.text, actual.text, may_lack_end=blind)
    if expected.length == actual.length or blind and same_text:
        if same_text and expected.finish_reason == actual.finish_reason:
            return Comparison(**fields, blind=blind, top_equal=equal)
        what = "another end" if same_text else "other text"
        return Comparison(**fields, broken=f"the same tokens with {what}", top_equal=equal, **ends)
    shorter, longer = (expected, actual) if expected.length < actual.length else (actual, expected)
    if shorter.finish_reason == "length":
        return Comparison(**fields, broken="one ended at its limit before the other", top_equal=False, **ends)
    following = _by_position(longer).get(shorter.length)
    margin = None if following is None else _lead(following)
    return Comparison(**fields, position=shorter.length, margin=margin, blind=blind, top_equal=False, **ends)


def _same_text(one: str, other: str, *, may_lack_end: bool) -> bool:
    """Equal, but for how many U+FFFD stand for bytes that are no character; a stream may lack the end of
    them.
    """
    one, other = (re.sub("\ufffd+", "\ufffd", text) for text in (one, other))
    shorter, longer = sorted((one, other), key=len)
    rest = longer[len(shorter) :]
    return one == other or (
        may_lack_end and longer.startswith(shorter) and (rest[0] == "\ufffd" or shorter.endswith("\ufffd"))
    )


def _compare_texts(expected: Choice, actual: Choice) -> Comparison:
    """Without tokens on both sides: texts and ends alone."""
    blind = bool(expected.tokens) != bool(actual.tokens)
    if expected.text == actual.text:
        if expected.finish_reason == actual.finish_reason:
            return Comparison(blind=True)
        ends = {"expected": _end(expected), "actual": _end(actual)}
        return Comparison(broken="the same text with another end", blind=True, **ends)
    pairs = zip(expected.text, actual.text, strict=False)
    index = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(expected.text), len(actual.text)))
    return Comparison(
        position=index,
        blind=blind,
        top_equal=False,
        expected=repr(expected.text[index : index + 24]),
        actual=repr(actual.text[index : index + 24]),
    )


def _by_position(choice: Choice) -> dict[int, Token]:
    return {token.position: token for token in choice.tokens}


def _parted_while_held(ours: dict[int, Token], theirs: dict[int, Token], begin: int, end: int) -> int | None:
    """Where the bytes of positions ``begin`` to ``end`` part: -1 nowhere, None where they are not known."""
    parts = []
    for side in (ours, theirs):
        held = [side[p].data for p in range(begin, end + 1) if p in side]
        if not held or any(data is None for data in held):
            return None
        parts.append(held)
    if b"".join(parts[0]) == b"".join(parts[1]):
        return -1
    one, other = parts if len(parts[0]) >= len(parts[1]) else parts[::-1]
    if len(one) != end - begin + 1 or b"" in one:
        return None  # which token has which of the bytes is not known
    whole, done = b"".join(other), 0
    for index, data in enumerate(one):
        if whole[done : done + len(data)] != data:
            return begin + index
        done += len(data)
    return None


def _distance_at(one: Token, other: Token) -> tuple[float, bool]:
    """Largest known difference of two log probabilities after the same tokens, and whether all are equal."""
    apart, equal = 0.0, True
    same = is_same_token(one, other)
    if same and not (math.isnan(one.logprob) and math.isnan(other.logprob)):
        if math.isnan(one.logprob) or math.isnan(other.logprob):
            equal = False
        elif one.logprob != other.logprob:
            apart, equal = abs(one.logprob - other.logprob), False
    mine, theirs = dict(one.top), dict(other.top)
    if not mine or not theirs:
        return apart, equal and bool(mine) == bool(theirs)
    equal = equal and mine == theirs
    for key, value in mine.items():
        apart = max(apart, _apart(value, key, theirs))
    for key, value in theirs.items():
        apart = max(apart, _apart(value, key, mine))
    return apart, equal


def _apart(value: float, key: Key, others: dict[Key, float]) -> float:
    if key in others:
        return 0.0 if value == others[key] else abs(value - others[key])
    return max(0.0, value - min(others.values()))  # it is below all that are shown


def _margin_at(mine: Token, other: Token) -> float | None:
    """How far each side's token is ahead of the other's, on the side where that is more."""
    margins = [gap for gap in (_gap(mine, other), _gap(other, mine)) if gap is not None]
    return max(margins, default=None)


def _gap(here: Token, there: Token) -> float | None:
    """By how much ``here`` prefers its own token to ``there``'s; a lower bound where that is not shown."""
    if not here.top or math.isnan(here.logprob):
        return None
    values = dict(here.top)
    if there.key in values:
        return max(0.0, here.logprob - values[there.key])
    return max(0.0, here.logprob - min(values.values()))


def _lead(token: Token) -> float | None:
    """The best log probability less the second."""
    values = sorted((value for _, value in token.top), reverse=True)
    return values[0] - values[1] if len(values) > 1 else None


def _show(token: Token | None) -> str:
    if token is None:
        return "nothing"
    key = token.key
    word = repr(key[2:]) if isinstance(key, str) else ""
    return (
        " ".join(part for part in ("" if token.id is None else f"id {token.id}", word) if part)
        or "a hidden token"
    )


def _end(choice: Choice) -> str:
    return f"{choice.finish_reason or 'no reason'} after {choice.length} tokens, {choice.text[-16:]!r}"


def logprob_problem(choices: Sequence[Choice], *, may_hold_back: bool = False) -> str:
    """Why the log probabilities of these answers say nothing; empty if they do."""
    shown = [choice for choice in choices if choice.tokens and choice.has_logprobs]
    if not shown:
        return "none are shown"
    tokens = [token for choice in choices for token in choice.tokens]
    # A token that is held back, being a part of a character, has a log probability nowhere: that is not a
    # gap.
    values = [token.logprob for token in tokens if not (may_hold_back and math.isnan(token.logprob))]
    if any(not choice.has_logprobs for choice in choices if choice.tokens and not may_hold_back):
        return "some answers have none"
    if any(map(math.isnan, values)):
        return "some are missing"
    if any(value > 1e-6 for value in values):
        return "some are above 0"
    if len(values) > 8 and len(set(values)) == 1:
        return f"all are {values[0]:g}"
    for choice in shown:
        if len(shown) > 1 and len(choice.tokens) > 8 and len({token.logprob for token in choice.tokens}) == 1:
            return f"all {len(choice.tokens)} of one answer are {choice.tokens[0].logprob:g}"
    if len({round(value, 6) for value in values}) <= 3 < len(values) // 8:
        return "they take three values or fewer"
    return ""


def behind_its_best(choice: Choice) -> float:
    """By how many nats a token of a greedy answer is behind the best of its own list, at most."""
    return max(
        (max(value for _, value in token.top) - token.logprob for token in choice.tokens if token.top),
        default=0.0,
    )
