"""Is an engine's answer the truth, up to what rounding can do? A bound for every position, and ties by name.

The bound is the model's own. The reference is run again a few times with every value of every operation moved
by one float32 ulp (*shaken*), and, where a kernel rounds to fewer bits, once with the roundings that are
nearest to going the other way gone the other way (*flipped*). How far that moves a row of logits, root mean
square over the vocabulary, is that row's *reach*; a later row has at least the reach of the rows that it
sees. An engine's row may be twice the reach away: the reference itself rounds where the kernel does, so it is
one such sample, and the engine is another.

A *tie* is a choice that rounding decides: two experts whose scores are nearer than their reach, two tokens
whose logits are. Ties are found by that margin, before anything is compared. Where an engine is beyond its
bound and a tie of experts could be why, the reference takes the other expert and says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from parity.reference.arithmetic import Arithmetic, Kernel
from parity.reference.forward import Pass, run_reference
from parity.reference.operations import Choices, choose_experts
from parity.reference.weights import Weights

SHAKEN_RUNS = 3
SAMPLES_APART = 2.0  # engine and reference are one sample each of what rounding may do
MAX_RESOLVED_TIES = 8
MAX_EARLIER_TIES = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertTie:
    """In ``layer`` for the token at ``position`` rounding decides between two sets of experts."""

    layer: int
    position: int
    chosen: tuple[int, ...]
    other: tuple[int, ...]

    @property
    def text(self) -> str:
        left, right = (
            "+".join(map(str, sorted(set(a) - set(b))))
            for a, b in ((self.chosen, self.other), (self.other, self.chosen))
        )
        return f"layer {self.layer}, position {self.position}: expert {left} or {right}"


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenTie:
    """At ``position`` the engine picks another token, and the logits are too near to tell."""

    position: int
    expected: int
    found: int
    gap: float

    @property
    def text(self) -> str:
        return f"position {self.position}: token {self.expected} or {self.found}, {self.gap:.2g} apart"


@dataclass(frozen=True, slots=True)
class Expectation:
    """``logits`` float64 [tokens, n_vocab]; ``bound`` [tokens], root mean square over the vocabulary;
    ``widest`` [tokens], the most that one logit may move; ``ties`` in order of position and layer.
    """

    logits: np.ndarray
    bound: np.ndarray
    widest: np.ndarray
    ties: tuple[ExpertTie, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TruthComparison:
    """An engine's logits beside the reference's. ``error`` and ``bound`` [tokens] as in ``Expectation``.

    ``resolved``: ties in which the reference had to take the other experts. ``wrong_tokens``: positions whose
    best token is another one although the reference has no tie there.
    """

    error: np.ndarray
    bound: np.ndarray
    resolved: tuple[ExpertTie, ...] = ()
    token_ties: tuple[TokenTie, ...] = ()
    wrong_tokens: tuple[int, ...] = ()
    expectation: Expectation = field(repr=False)

    @property
    def beyond(self) -> tuple[int, ...]:
        """Positions that are further from the reference than rounding can bring them; a NaN is one."""
        return tuple(np.flatnonzero(~(self.error <= self.bound)).tolist())

    @property
    def worst(self) -> float:
        """The largest error as a part of its bound."""
        return float(np.max(self.error / self.bound))

    @property
    def is_right(self) -> bool:
        return not self.beyond and not self.wrong_tokens


def rms(x: np.ndarray) -> np.ndarray:
    """Root mean square over the last axis."""
    return np.sqrt(np.mean(x * x, axis=-1))


def expect_logits(
    weights: Weights, tokens: Sequence[int], kernel: Kernel, choices: Choices | None = None
) -> Expectation:
    """The reference's logits of every position under a kernel's rounding, their bounds, and the ties."""
    choices = dict(choices or {})
    base = run_reference(weights, tokens, Arithmetic(kernel), choices)
    # The moved runs keep to the base's experts: a bound that jumps with a tie would hide everything behind
    # it.
    kept = {(r.layer, i): tuple(row) for r in base.routings for i, row in enumerate(r.chosen.tolist())}
    ways = [Arithmetic(kernel, shake=seed) for seed in range(SHAKEN_RUNS)]
    if rounds_to_fewer_bits(weights, kernel):
        ways.append(Arithmetic(kernel, flips=True))
    moved = [run_reference(weights, tokens, way, kept) for way in ways]
    deviations = [run.logits - base.logits for run in moved]
    bound, widest = (
        SAMPLES_APART * np.maximum.accumulate(np.max(sizes, axis=0))
        for sizes in ([rms(d) for d in deviations], [np.abs(d).max(axis=-1) for d in deviations])
    )
    return Expectation(base.logits, bound, widest, tuple(find_expert_ties(weights, base, moved, choices)))


def rounds_to_fewer_bits(weights: Weights, kernel: Kernel) -> bool:
    """Is anything rounded to less than float32, so that single roundings can be flipped?"""
    return (
        kernel in (Kernel.HALF, Kernel.ROW)
        or weights.architecture == "gemma2"
        or any(tensor.kind != "F32" for tensor in weights.tensors.values())
    )


def find_expert_ties(
    weights: Weights, base: Pass, moved: Sequence[Pass], settled: Choices
) -> list[ExpertTie]:
    """Sets of experts that would be chosen if one score, or one group's, were raised by what moved."""
    ties = {}
    for place, routing in enumerate(base.routings):
        scores, n_expert = routing.scores, routing.scores.shape[-1]
        reach = np.max([np.abs(run.routings[place].scores - scores).max(axis=-1) for run in moved], axis=0)
        raised = 2 * SAMPLES_APART * np.maximum.accumulate(reach)  # one score up and the other down
        single = [[expert] for expert in range(n_expert)]
        n_group = max(1, weights.get("expert_group_count", 0))
        groups = np.arange(n_expert).reshape(n_group, -1).tolist() if n_group > 1 else []
        for members in single + groups:
            higher = scores.copy()
            higher[:, members] += raised[:, None]
            other = choose_experts(weights, higher)
            for position in np.flatnonzero((other != routing.chosen).any(axis=-1)).tolist():
                if (routing.layer, position) not in settled:
                    sets = tuple(routing.chosen[position].tolist()), tuple(other[position].tolist())
                    ties[(position, routing.layer, sets[1])] = ExpertTie(
                        layer=routing.layer, position=position, chosen=sets[0], other=sets[1]
                    )
    return [ties[key] for key in sorted(ties)]


def compare_with_reference(
    weights: Weights, tokens: Sequence[int], found: np.ndarray, kernel: Kernel
) -> TruthComparison:
    """``found``: an engine's logits of every position of ``tokens``, float32 [tokens, n_vocab]."""
    found = np.asarray(found, np.float64)
    choices: dict[tuple[int, int], tuple[int, ...]] = {}
    resolved: list[ExpertTie] = []
    expected = expect_logits(weights, tokens, kernel)
    while len(resolved) < MAX_RESOLVED_TIES:
        beyond = np.flatnonzero(~(rms(found - expected.logits) <= expected.bound))
        if not len(beyond) or not np.isfinite(found).all():
            break
        tie = _explaining_tie(weights, tokens, found, kernel, expected, choices, int(beyond[0]))
        if tie is None:
            break
        resolved.append(tie)
        choices[(tie.layer, tie.position)] = tie.other
        expected = expect_logits(weights, tokens, kernel, choices)
    wrong, ties = _compare_tokens(expected, found)
    return TruthComparison(
        error=rms(found - expected.logits),
        bound=expected.bound,
        resolved=tuple(resolved),
        token_ties=ties,
        wrong_tokens=wrong,
        expectation=expected,
    )


def _explaining_tie(
    weights: Weights,
    tokens: Sequence[int],
    found: np.ndarray,
    kernel: Kernel,
    expected: Expectation,
    choices: Choices,
    row: int,
) -> ExpertTie | None:
    """The tie that explains ``row``, the first row beyond its bound; None if none does.

    Other experts show first in their own token's row, so its ties are tried first, then those of the tokens
    before it, the nearest first. A tie of its own explains if it brings ``row`` within half of how far it is
    off (another may bring it the rest of the way), an earlier one if it brings it within its bound; and no
    row before it may go beyond its bound.
    """
    head = list(tokens[: row + 1])

    def errors(tried: Choices) -> np.ndarray:
        return rms(found[: row + 1] - run_reference(weights, head, Arithmetic(kernel), tried).logits)

    off = errors(choices)[row]
    if off <= expected.bound[row]:
        return None  # right if nothing came after it, so no choice of experts is what is wrong
    own = [tie for tie in expected.ties if tie.position == row]
    before = [tie for tie in reversed(expected.ties) if tie.position < row][:MAX_EARLIER_TIES]
    for group, wanted in ((own, max(off / 2, expected.bound[row])), (before, expected.bound[row])):
        best, best_error = None, wanted
        for tie in group:
            error = errors({**choices, (tie.layer, tie.position): tie.other})
            if error[row] < best_error and (error[:row] <= expected.bound[:row]).all():
                best, best_error = tie, error[row]
        if best is not None:
            return best
    return None


def _compare_tokens(expected: Expectation, found: np.ndarray) -> tuple[tuple[int, ...], tuple[TokenTie, ...]]:
    wrong, ties = [], []
    for position, (right, logits) in enumerate(zip(expected.logits, found, strict=True)):
        best, taken = int(right.argmax()), int(logits.argmax())
        gap = float(right[best] - right[taken])
        if best == taken:
            continue
        if gap <= 2 * expected.widest[position]:
            ties.append(TokenTie(position=position, expected=best, found=taken, gap=gap))
        else:
            wrong.append(position)
    return tuple(wrong), tuple(ties)
