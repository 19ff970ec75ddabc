"""Limits from a baseline: hand-worked values, and how often they alarm at a correct server."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from pathlib import Path

import pytest

from parity.endpoint.answers import Choice, Token
from parity.endpoint.case import Question
from parity.endpoint.noise import (
    FLOOR,
    Baseline,
    BaselineKey,
    Sample,
    SoloAnswer,
    is_larger_all_over,
    is_more_often,
    load_baseline,
    save_baseline,
    tail_limit,
)
from parity.errors import UsageError

KEY = BaselineKey(model="m", kind="k", cache="on", slots=8, settings={"prompts": 24})


def baseline(*distances: float, parted: int = 0) -> Baseline:
    samples = tuple(
        Sample(scope="load", chooses="greedy", distance=d, margin=0.0, parted=i < parted, compared=24)
        for i, d in enumerate(distances)
    )
    return Baseline(key=KEY, version="b1", samples=samples)


def test_limit_by_hand() -> None:
    # 50 values, the five largest exceed the sixth (1.0) by 1, 1, 1, 1, 1: s = 1 (1 + 2 / sqrt 5), and
    # k n / (N rate) = 5 * 10 / (50 * 0.001) = 1000.
    values = [2.0] * 5 + [1.0] * 45
    assert tail_limit(values, 10) == pytest.approx(1 + (1 + 2 / math.sqrt(5)) * math.log(1000))


def test_limit_of_a_server_that_never_moves_is_the_floor() -> None:
    assert tail_limit([0.0] * 100, 30) == tail_limit([], 30) == FLOOR


@pytest.mark.parametrize("scale", [0.05, 0.5])
def test_limit_alarms_in_less_than_one_of_a_hundred_runs(scale: float) -> None:
    """Made for one in a thousand; a limit is known from four runs of 30 questions. Seeded draws, no
    chance.
    """
    rng = random.Random(1)

    def draw(count: int) -> list[float]:
        return [rng.lognormvariate(math.log(scale / 5), 0.6) for _ in range(count)]

    alarms = sum(max(draw(30)) > tail_limit(sorted(draw(120), reverse=True), 30) for _ in range(2000))
    assert alarms <= 20


def test_more_partings_than_known() -> None:
    # One of ten thousand tokens known: three in a hundred are no chance, one is.
    assert is_more_often(3, 100, 1, 10_000)
    assert not is_more_often(1, 100, 1, 10_000)
    assert not is_more_often(0, 100, 0, 10_000)
    assert not is_more_often(30, 300, 100, 1000)


def test_partings_by_hand() -> None:
    # Nothing known in as many tokens: hits are negative binomial with shape 1/2 and share 1/2:
    # P(0) = 0.7071, P(1) = P(0) / 4, P(2) = P(1) * 3/8, P(3) = P(2) * 5/12; so P(at least 3) is 0.0498.
    assert is_more_often(3, 50, 0, 50, rate=0.0499) and not is_more_often(3, 50, 0, 50, rate=0.0497)


def test_partings_alarm_as_rarely_as_they_are_made_for() -> None:
    rng = random.Random(2)

    def hits(tokens: int) -> int:
        return sum(rng.random() < 0.004 for _ in range(tokens))

    alarms = sum(is_more_often(hits(700), 700, hits(2800), 2800) for _ in range(500))
    assert alarms <= 3


def test_larger_all_over_needs_size_and_rank() -> None:
    known = [0.04 + 0.001 * i for i in range(40)]
    assert is_larger_all_over([4 * value for value in known[:20]], known)
    assert not is_larger_all_over(known[:20], known)
    assert not is_larger_all_over([1.0] * 4, known)


def test_baselines_are_merged_kept_and_refused_for_others(tmp_path: Path) -> None:
    question = Question(prompt=(1, 2), max_tokens=4, logit_bias=((3, 1.5),), stop=("x",))
    choice = Choice(
        text="a", tokens=(Token(position=0, id=1, key=1, data=b"\xe2", logprob=-1.0, top=((1, -1.0),)),)
    )
    one = replace(baseline(0.1, 0.2), solo=(SoloAnswer(question=question, choices=(choice,)),))
    both = one.merged(baseline(0.3, parted=1))
    assert (both.runs, len(both.samples), len(both.solo)) == (2, 3, 1)
    save_baseline(both, tmp_path / "noise.json")
    assert load_baseline(tmp_path / "noise.json") == both
    other = replace(KEY, slots=4)
    assert "slots" in both.differs_from(other)
    with pytest.raises(UsageError, match="slots"):
        one.merged(replace(one, key=other))
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(UsageError, match="no baseline"):
        load_baseline(tmp_path / "bad.json")
