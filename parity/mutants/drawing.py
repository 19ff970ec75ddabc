"""Mutants of sampling. Engine and oracle draw with the same function, so a wrong one agrees with itself:
what it must give is written down here, computed by hand.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

import parity.engines.sampling as sampling_module
from parity.mutants.mutant import Complaint, Killer, Reach, Trial, mutant
from parity.mutants.seam import in_method
from scheduler.records import SamplingParams

# Tokens 0 to 3 have these odds at temperature 1: by rank 16, 9, 4, 1 of 30. At 0.5 the odds are squared
# (256, 81, 16, 1 of 354), at 2 they are the roots (4, 3, 2, 1 of 10).
ODDS = (4.0, 1.0, 16.0, 9.0)
SEED, KEY = 7, "b"
# The draws for positions 0 to 11, in [0, 1): 0.880 0.879 0.307 0.488 0.391 0.829 0.449 0.601 0.565 0.064
# 0.585 0.978, from `printf 7/b/0 | b2sum -l 64` and so on: the upper 53 bits, lowest byte first.
DRAWN: dict[SamplingParams, tuple[int, ...]] = {
    SamplingParams(temperature=1.0): (0, 0, 2, 2, 2, 3, 2, 3, 3, 2, 3, 1),
    SamplingParams(temperature=0.5): (3, 3, 2, 2, 2, 3, 2, 2, 2, 2, 2, 0),
    SamplingParams(temperature=2.0): (0, 0, 2, 3, 2, 0, 3, 3, 3, 2, 3, 1),
    SamplingParams(temperature=1.0, top_k=2): (3, 3, 2, 2, 2, 3, 2, 2, 2, 2, 2, 3),
    SamplingParams(temperature=1.0, top_k=3): (0, 0, 2, 2, 2, 3, 2, 3, 3, 2, 3, 0),
    SamplingParams(temperature=1.0, top_p=0.9): (
        0,
        0,
        2,
        2,
        2,
        3,
        2,
        3,
        3,
        2,
        3,
        0,
    ),  # 27 of 30: three tokens
    SamplingParams(temperature=1.0, top_p=0.5): (2,) * 12,  # 15 of 30: one token
    SamplingParams(temperature=2.0, top_p=0.75): (
        0,
        0,
        2,
        3,
        2,
        0,
        3,
        3,
        3,
        2,
        3,
        0,
    ),  # 7.5 of 10: three tokens
    # top_k first: 6.75 of 9 are two tokens; the other way round three would stay.
    SamplingParams(temperature=2.0, top_k=3, top_p=0.75): (3, 3, 2, 2, 2, 3, 2, 3, 2, 2, 3, 3),
}


def check_draws() -> tuple[Complaint, ...]:
    """Every token that is not the one drawn by hand, with its settings and position."""
    logits = np.log(np.array(ODDS, np.float64)).astype(np.float32)
    wrong = []
    for params, expected in DRAWN.items():
        seeded = replace(params, seed=SEED, key=KEY)
        for position, token in enumerate(expected):
            drawn = sampling_module.sample_token(logits, seeded, request_id="any", position=position)
            if drawn != token:
                wrong.append(
                    f"at temperature {params.temperature:g}, top_k {params.top_k}, top_p {params.top_p:g} "
                    f"position {position} draws token {drawn}; by hand it is {token}"
                )
    return tuple(Complaint(Killer.SELF_TEST, text) for text in wrong)


BY_HAND = Trial(name="tokens drawn by hand", run=check_draws)
Original = Callable[..., int]


def in_params(change: Callable[[SamplingParams], SamplingParams]) -> Callable[[Original, Reach], Original]:
    """A fault that is the right function with other settings."""

    def plant(original: Original, reach: Reach) -> Original:
        def sample_token(logits: np.ndarray, sampling: SamplingParams, **rest: Any) -> int:
            changed = change(sampling)
            if changed != sampling:
                reach()
            return original(logits, changed, **rest)

        return sample_token

    return plant


@mutant(
    in_method(sampling_module, "sample_token"),
    part="sampling",
    killers=(Killer.SELF_TEST,),
    trials=(BY_HAND,),
)
def logits_times_temperature(original: Original, reach: Reach) -> Original:
    """Logits are multiplied by the temperature instead of divided."""

    return in_params(lambda s: replace(s, temperature=1 / s.temperature))(original, reach)


@mutant(
    in_method(sampling_module, "sample_token"),
    part="sampling",
    killers=(Killer.SELF_TEST,),
    trials=(BY_HAND,),
)
def top_k_keeps_one_more(original: Original, reach: Reach) -> Original:
    """One token more than top_k may be drawn."""

    return in_params(lambda s: replace(s, top_k=s.top_k + 1) if s.top_k else s)(original, reach)


@mutant(
    in_method(sampling_module, "sample_token"),
    part="sampling",
    killers=(Killer.SELF_TEST,),
    trials=(BY_HAND,),
)
def top_p_ignored(original: Original, reach: Reach) -> Original:
    """The smallest set of mass top_p is not cut out."""

    return in_params(lambda s: replace(s, top_p=1.0))(original, reach)


@mutant(
    in_method(sampling_module, "sample_token"),
    part="sampling",
    killers=(Killer.SELF_TEST,),
    trials=(BY_HAND,),
)
def seed_ignored(original: Original, reach: Reach) -> Original:
    """Every seed draws what seed 0 draws."""

    return in_params(lambda s: replace(s, seed=0))(original, reach)


@mutant(
    in_method(sampling_module, "uniform"),
    part="sampling",
    killers=(Killer.SELF_TEST,),
    trials=(BY_HAND,),
)
def position_not_in_the_draw(original: Callable[..., float], reach: Reach) -> Callable[..., float]:
    """A session draws the same number at every position."""

    def uniform(seed: int, request_id: str, position: int) -> float:
        if position:
            reach()
        return original(seed, request_id, 0)

    return uniform
