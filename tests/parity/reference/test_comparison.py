"""The bound, the ties, and what they don't excuse."""

from __future__ import annotations

import functools
from dataclasses import replace

import numpy as np
import pytest

from parity.models import resolve_model
from parity.reference import Kernel, Weights, load_weights, run_reference
from parity.reference.comparison import compare_with_reference, expect_logits, rms
from parity.reference.weights import Tensor

PROMPT = tuple(np.random.default_rng(11).integers(0, 256, 30).tolist())
LAYER = 2  # of the tiny deepseek2: its first with experts
known_weights = functools.cache(lambda family: load_weights(resolve_model(family).path))


@pytest.fixture(scope="module")
def tied() -> Weights:
    """The tiny deepseek2 with experts 1 and 2 of a layer equally good for every
    token, and otherwise as they were.
    """
    weights = known_weights("deepseek2")
    name = f"blk.{LAYER}.ffn_gate_inp"
    router = weights.tensors[name].values.copy()
    router[2] = router[1]
    return replace(weights, tensors={**weights.tensors, name: Tensor(router)})


def test_bound_is_the_same_every_time_and_never_shrinks_along_a_sequence() -> None:
    weights = known_weights("llama")
    first, second = (expect_logits(weights, PROMPT, Kernel.PLAIN) for _ in range(2))
    assert (first.bound == second.bound).all() and (first.logits == second.logits).all()
    assert (np.diff(first.bound) >= 0).all() and first.bound[0] > 0
    assert (first.logits == run_reference(weights, PROMPT).logits).all()


def test_coarser_kernel_has_a_wider_bound() -> None:
    weights = known_weights("llama")
    plain, half, row = (expect_logits(weights, PROMPT, kernel).bound for kernel in list(Kernel)[1:])
    assert (half > 2 * plain).all() and (row > 2 * plain).all()


@pytest.mark.parametrize("times", [0.9, 1.1])
def test_row_is_beyond_its_bound_exactly_when_it_is_further_away(times: float) -> None:
    weights = known_weights("llama")
    expected = expect_logits(weights, PROMPT, Kernel.PLAIN)
    found = expected.logits.copy()
    found[7] += times * expected.bound[7]
    compared = compare_with_reference(weights, PROMPT, found, Kernel.PLAIN)
    assert compared.worst == pytest.approx(times)
    assert compared.beyond == ((7,) if times > 1 else ())
    assert compared.is_right is (times < 1)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_no_number_is_wrong(value: float) -> None:
    for family in ("llama", "deepseek2"):  # without and with experts whose ties could be asked
        weights = known_weights(family)
        found = run_reference(weights, PROMPT).logits
        found[3, 100] = value
        compared = compare_with_reference(weights, PROMPT, found, Kernel.PLAIN)
        assert not compared.is_right and 3 in compared.beyond and not compared.resolved


def test_other_token_is_a_tie_only_where_the_logits_are_too_near_to_tell() -> None:
    weights = known_weights("llama")
    expected = expect_logits(weights, PROMPT, Kernel.PLAIN)
    best, second = np.argsort(expected.logits[9])[[-1, -2]]
    swapped = expected.logits.copy()
    swapped[9, [best, second]] = swapped[9, [second, best]]
    compared = compare_with_reference(weights, PROMPT, swapped, Kernel.PLAIN)
    assert compared.wrong_tokens == (9,) and not compared.token_ties and not compared.is_right
    # A head in which the two tokens are the same but for less than rounding: the swap is a tie, and named.
    output = weights.tensors["output"].values.copy()
    output[second] = output[best] * (1 - 1e-9)
    near = replace(weights, tensors={**weights.tensors, "output": Tensor(output)})
    logits = run_reference(near, PROMPT).logits
    taken, other = np.argsort(logits[9])[[-1, -2]]
    assert {taken, other} == {best, second}
    logits[9, [taken, other]] = logits[9, [other, taken]]
    compared = compare_with_reference(near, PROMPT, logits, Kernel.PLAIN)
    assert compared.is_right and [tie.position for tie in compared.token_ties] == [9]
    assert f"position 9: token {taken} or {other}" in compared.token_ties[0].text


def test_tie_of_experts_is_found_and_the_engines_side_of_it_taken(tied: Weights) -> None:
    expected = expect_logits(tied, PROMPT, Kernel.PLAIN)
    (routing,) = [r for r in run_reference(tied, PROMPT).routings if r.layer == LAYER]
    decided = [i for i, chosen in enumerate(routing.chosen.tolist()) if (1 in chosen) != (2 in chosen)]
    assert decided and set(decided) <= {tie.position for tie in expected.ties if tie.layer == LAYER}
    position = decided[len(decided) // 2]
    (tie,) = [tie for tie in expected.ties if (tie.position, tie.layer) == (position, LAYER)]
    assert "expert 1 or 2" in tie.text or "expert 2 or 1" in tie.text
    found = run_reference(tied, PROMPT, choices={(LAYER, position): tie.other}).logits
    assert rms(found - expected.logits)[position] > 100 * expected.bound[position]
    compared = compare_with_reference(tied, PROMPT, found, Kernel.PLAIN)
    assert compared.is_right and compared.resolved == (tie,)


def test_other_experts_without_a_tie_are_a_fault() -> None:
    weights = known_weights("deepseek2")
    assert not [tie for tie in expect_logits(weights, PROMPT, Kernel.PLAIN).ties if tie.position == 12]
    (routing,) = [r for r in run_reference(weights, PROMPT).routings if r.layer == LAYER]
    others = tuple(sorted(set(range(4)) - set(routing.chosen[12].tolist())))
    found = run_reference(weights, PROMPT, choices={(LAYER, 12): others}).logits
    compared = compare_with_reference(weights, PROMPT, found, Kernel.PLAIN)
    assert not compared.is_right and compared.beyond[0] == 12 and not compared.resolved


def test_tie_does_not_excuse_a_fault_in_the_expert(tied: Weights) -> None:
    name = f"blk.{LAYER}.ffn_down_exps"
    spoilt = tied.tensors[name].values.copy()
    spoilt[2] *= 1.01
    wrong = replace(tied, tensors={**tied.tensors, name: Tensor(spoilt)})
    found = run_reference(wrong, PROMPT).logits
    assert not compare_with_reference(tied, PROMPT, found, Kernel.PLAIN).is_right
