"""A golden whose tokens the float64 reference does not pick is refused, with both tokens and their distance,
unless rounding decides between the two: then the tie is named.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from parity.golden.run import ask_reference
from parity.models import resolve_model
from parity.reference import Weights, load_weights, run_reference
from parity.reference.weights import Tensor

PROMPT = [256, 90]


def greedy(weights: Weights, count: int) -> list[int]:
    tokens = list(PROMPT)
    for _ in range(count):
        tokens.append(int(run_reference(weights, tokens).logits[-1].argmax()))
    return tokens[len(PROMPT) :]


def test_tokens_that_the_reference_picks_come_with_its_margin() -> None:
    weights = load_weights(resolve_model("llama").path)
    answer = greedy(weights, 4)
    said, wrong = ask_reference(weights, PROMPT, answer)
    leads = []
    for step in range(4):
        logits = sorted(run_reference(weights, [*PROMPT, *answer[:step]]).logits[-1])
        leads.append(logits[-1] - logits[-2])
    assert (said.tokens, said.ties, wrong) == (tuple(answer), (), ())
    assert said.margin == pytest.approx(min(leads), rel=1e-9)


def test_other_token_is_a_problem() -> None:
    weights = load_weights(resolve_model("llama").path)
    answer = greedy(weights, 3)
    logits = run_reference(weights, [*PROMPT, *answer[:2]]).logits[-1]
    second = int(logits.argsort()[-2])
    gap = logits.max() - logits[second]
    said, wrong = ask_reference(weights, PROMPT, [*answer[:2], second, 7])
    assert said.tokens[:3] == tuple(answer) and said.ties == ()
    assert wrong == (
        f"the float64 reference picks token {answer[2]} where generated token 2 is {second}, "
        f"{gap:.2g} below it",
    )


def test_tie_is_named_and_no_problem() -> None:
    """A head whose second best row is the best one's but for a millionth: rounding decides."""
    weights = load_weights(resolve_model("llama").path)
    best, other = (int(i) for i in run_reference(weights, PROMPT).logits[-1].argsort()[[-1, -2]])
    head = weights.tensors["output"]
    values = head.values.copy()
    values[other] = values[best] * (1 - 1e-7)
    near = replace(weights, tensors={**weights.tensors, "output": Tensor(values, head.kind)})
    logits = run_reference(near, PROMPT).logits[-1]
    said, wrong = ask_reference(near, PROMPT, [other])
    assert (said.tokens, wrong) == ((best,), ())
    assert said.ties == (f"generated token 0: {best} or {other}, {logits[best] - logits[other]:.2g} apart",)
    assert said.margin == pytest.approx(np.diff(np.sort(logits)[-2:])[0])


def test_what_half_cells_decide_is_no_tie() -> None:
    """The same a thousandth apart: a row kernel may turn it round, float32 rounding can't."""
    weights = load_weights(resolve_model("llama").path)
    best, other = (int(i) for i in run_reference(weights, PROMPT).logits[-1].argsort()[[-1, -2]])
    head = weights.tensors["output"]
    values = head.values.copy()
    values[other] = values[best] * (1 - 1e-3)
    near = replace(weights, tensors={**weights.tensors, "output": Tensor(values, head.kind)})
    said, wrong = ask_reference(near, PROMPT, [other])
    assert said.ties == () and len(wrong) == 1
