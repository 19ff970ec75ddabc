"""How far two answers are apart: by hand-worked pairs."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from parity.endpoint.answers import Choice, Token, choice_from_data, choice_to_data
from parity.endpoint.compare import behind_its_best, compare, logprob_problem


def token(position: int, id_: int, logprob: float, top: dict[int, float], data: bytes | None = None) -> Token:
    pairs = tuple(top.items())
    return Token(position=position, id=id_, key=id_, logprob=logprob, top=pairs, data=data)


ONE = Choice(
    text="ab",
    finish_reason="length",
    tokens=(
        token(0, 1, -0.5, {1: -0.5, 2: -2.0}),
        token(1, 2, -0.25, {2: -0.25, 3: -0.75}),
    ),
)


def with_last(last: Token, **changed: object) -> Choice:
    return replace(ONE, tokens=(ONE.tokens[0], last), **changed)


def test_equal_answers_are_equal_in_every_bit() -> None:
    found = compare(ONE, ONE)
    assert found.same_bits and found.same_output and (found.distance, found.compared) == (0.0, 2)


def test_moved_log_probabilities_are_a_distance_and_the_same_output() -> None:
    found = compare(ONE, with_last(token(1, 2, -0.375, {2: -0.375, 3: -0.75})))
    assert found.same_output and not found.same_bits and found.distance == 0.125


def test_another_token_has_the_larger_of_both_margins() -> None:
    # Ours prefers 2 to 3 by 0.5; theirs prefers 3 to 2 by 0.25.
    found = compare(ONE, with_last(token(1, 3, -0.5, {3: -0.5, 2: -0.75}), text="ac"))
    assert (found.position, found.margin, found.distance) == (1, 0.5, 0.5)


def test_token_that_is_not_among_those_shown_has_a_lower_bound_of_a_margin() -> None:
    # 9 is below -0.75 for us, so 2 is ahead of it by 0.5 at least; for them 2 is below -4: by 3.9 at least.
    found = compare(ONE, with_last(token(1, 9, -0.1, {9: -0.1, 8: -4.0}), text="az"))
    assert found.position == 1 and found.margin == pytest.approx(3.9)
    # Our 2 at -0.25 is below -4 for them: 3.75 apart at least; their 9 at -0.1 is below -0.75 for us: 0.65.
    assert found.distance == pytest.approx(3.75)


@pytest.mark.parametrize(
    ("changed", "broken"),
    [
        ({"text": "ab!"}, "other text"),
        ({"finish_reason": "stop"}, "another end"),
        ({"tokens": ONE.tokens[:1], "text": "a"}, "one ended at its limit before the other"),
    ],
)
def test_what_no_rounding_does_is_broken(changed: dict, broken: str) -> None:
    assert broken in compare(ONE, replace(ONE, **changed)).broken


def test_end_of_generation_in_place_of_a_token_is_a_parting_with_its_margin() -> None:
    found = compare(ONE, replace(ONE, tokens=ONE.tokens[:1], text="a", finish_reason="stop"))
    assert (found.position, found.broken, found.margin) == (1, "", 0.5)


# -- tokens that a stream holds back

WHOLE = Choice(
    text="x\ufffdy",
    finish_reason="length",
    tokens=tuple(
        token(i, byte, -1.0, {byte: -1.0, 7: -1.5}, bytes([byte])) for i, byte in enumerate(b"x\xe2y")
    ),
)


def held(data: bytes) -> Choice:
    tokens = (WHOLE.tokens[0], token(2, data[-1], -1.0, {data[-1]: -1.0, 7: -1.5}, data))
    return replace(WHOLE, tokens=tokens)


def test_held_back_bytes_are_found_in_the_next_token() -> None:
    found = compare(WHOLE, held(b"\xe2y"))
    assert found.same_output and found.blind and found.compared == 2


def test_other_held_back_bytes_part_where_they_differ() -> None:
    # The text is the same: both bytes are U+FFFD in it. Which token came is not known, only that it was not
    # the best.
    found = compare(WHOLE, held(b"\xe3y"))
    assert (found.position, found.margin, found.distance) == (1, 0.5, 0.0)


def test_nothing_after_unknown_bytes_is_compared() -> None:
    last = replace(WHOLE.tokens[2], logprob=-9.0, data=None)
    hidden = replace(held(b"\xe3y"), tokens=(WHOLE.tokens[0], last))
    found = compare(WHOLE, hidden)
    assert (found.position, found.distance, found.blind, found.compared) == (None, 0.0, True, 1)


def test_end_that_was_never_sent_is_no_other_text() -> None:
    cut = replace(WHOLE, text="x", tokens=WHOLE.tokens[:1], total_tokens=3)
    whole = replace(WHOLE, text="x\ufffd\ufffd", total_tokens=3)
    assert compare(whole, cut).same_output
    assert compare(replace(whole, text="xyz"), cut).broken


def test_texts_alone_are_compared_by_characters() -> None:
    one, other = Choice(text="abc", finish_reason="stop"), Choice(text="abd", finish_reason="stop")
    found = compare(one, other)
    assert (found.position, found.margin, found.expected, found.actual) == (2, None, "'c'", "'d'")
    assert compare(one, one).same_output and not compare(one, one).same_bits


# -- log probabilities that say nothing


def answer(*values: float) -> Choice:
    return Choice(text="a", tokens=tuple(token(i, i, v, {i: v}) for i, v in enumerate(values)))


@pytest.mark.parametrize(
    ("choices", "problem"),
    [
        ([answer(-1.0, -2.0), answer(-0.5)], ""),
        ([Choice(text="a")], "none are shown"),
        ([answer(*[0.0] * 9)], "all are 0"),
        ([answer(*[-1.0] * 9)], "all are -1"),
        ([answer(-1.0, math.nan)], "some are missing"),
        ([answer(-1.0), Choice(text="b", tokens=(Token(position=0, id=1),))], "some answers have none"),
        ([answer(-1.0, 0.5)], "some are above 0"),
    ],
)
def test_log_probabilities_that_say_nothing(choices: list[Choice], problem: str) -> None:
    assert logprob_problem(choices) == problem


def test_greedy_token_is_held_against_the_best_of_its_list() -> None:
    assert behind_its_best(ONE) == 0.0
    assert behind_its_best(with_last(token(1, 3, -0.75, {2: -0.25, 3: -0.75}))) == 0.5


def test_answers_survive_json() -> None:
    known = replace(WHOLE, tokens=(*WHOLE.tokens, Token(position=3, id=5)))
    again = choice_from_data(choice_to_data(known))
    assert again.tokens[:3] == WHOLE.tokens and math.isnan(again.tokens[3].logprob)
    assert again.tokens[3].data is None and again.text == known.text
