"""From logits to a token: against exact fractions, at the edges of every cut, and draws made by b2sum.

Engine and oracle share this function, so nothing that compares them can see it go wrong.
"""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from parity.engines.sampling import sample_token, uniform
from parity.mutants.drawing import check_draws
from scheduler.records import SamplingParams


@pytest.mark.parametrize(
    ("text", "number"),
    # `printf TEXT | b2sum -l 64`, its bytes read from the last to the first
    [("3/k/0", "8e946f5bf55848c8"), ("3/k/1", "6a7c32002ba38722"), ("3/k/3", "1678761e9cb6fcf9")],
)
def test_draw_is_the_upper_53_bits_of_a_keyed_digest(text: str, number: str) -> None:
    seed, key, position = text.split("/")
    assert uniform(int(seed), key, int(position)) == (int(number, 16) >> 11) / 2**53


def test_tokens_are_those_drawn_by_hand() -> None:
    assert check_draws() == ()


def drawn_exactly(odds: list[int], params: SamplingParams, position: int) -> int | None:
    """The token by fractions; None where draw or cut is too near an edge for float32 to tell."""
    ranked = sorted(range(len(odds)), key=lambda token: (-odds[token], token))
    ranked = ranked[: params.top_k or None]
    power = {Fraction(1, 2): 2, Fraction(1): 1}[Fraction(params.temperature)]
    masses = [Fraction(odds[token]) ** power for token in ranked]
    near = Fraction(1, 10**5)
    kept, total, wanted = [], Fraction(0), Fraction(params.top_p) * sum(masses)
    for token, mass in zip(ranked, masses, strict=True):
        kept.append(token)
        total += mass
        if params.top_p < 1 and abs(total - wanted) < near * sum(masses):
            return None
        if total >= wanted:
            break
    draw = Fraction(uniform(params.seed, "s", position)) * total
    reached = Fraction(0)
    for token, mass in zip(kept, masses, strict=False):
        reached += mass
        if abs(reached - draw) < near * total:
            return None
        if draw < reached:
            return token
    raise AssertionError("a draw beyond the whole")


@given(
    odds=st.lists(st.integers(1, 40), min_size=2, max_size=12),
    temperature=st.sampled_from((0.5, 1.0)),
    top_k=st.integers(0, 12),
    top_p=st.sampled_from((1.0, 0.9, 0.6, 0.3)),
    seed=st.integers(0, 50),
)
def test_sampling_agrees_with_exact_fractions(
    odds: list[int], temperature: float, top_k: int, top_p: float, seed: int
) -> None:
    params = SamplingParams(temperature=temperature, seed=seed, top_k=top_k, top_p=top_p)
    logits = np.log(np.array(odds, np.float64)).astype(np.float32)
    for position in range(4):
        expected = drawn_exactly(odds, params, position)
        if expected is not None:
            assert sample_token(logits, params, request_id="s", position=position) == expected


@pytest.mark.parametrize(("top_p", "kept"), [(0.25, {0}), (0.26, {0, 1}), (0.5, {0, 1}), (0.75, {0, 1, 2})])
def test_mass_that_is_reached_exactly_is_enough(top_p: float, kept: set[int]) -> None:
    """Four equal logits: every token is a quarter, exactly; the lowest index goes first."""
    params = SamplingParams(temperature=1.0, seed=1, top_p=top_p)
    logits = np.zeros(4, np.float32)
    drawn = {sample_token(logits, params, request_id="s", position=position) for position in range(60)}
    assert drawn == kept


def test_greedy_takes_the_lowest_of_equal_maxima() -> None:
    assert sample_token(np.array([1, 5, 5], np.float32), SamplingParams(), request_id="s", position=0) == 1


def test_key_stands_for_the_session() -> None:
    params = SamplingParams(temperature=1.0, seed=9, key="mine")
    logits = np.zeros(1000, np.float32)
    assert [sample_token(logits, params, request_id=name, position=3) for name in ("a", "b")] == [
        int(uniform(9, "mine", 3) * 1000)
    ] * 2
