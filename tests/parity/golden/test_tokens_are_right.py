"""A golden whose tokens the float64 reference does not pick is refused, with
both tokens and their distance.
"""

from __future__ import annotations

from parity.golden.run import check_tokens_are_right
from parity.models import resolve_model
from parity.reference import load_weights, run_reference

PROMPTS = [[256, 65, 66, 67], [256, 90]]


def test_only_tokens_that_the_reference_picks_become_goldens() -> None:
    weights = load_weights(resolve_model("llama").path)
    answers = []
    for prompt in PROMPTS:
        tokens = list(prompt)
        for _ in range(4):
            tokens.append(int(run_reference(weights, tokens).logits[-1].argmax()))
        answers.append(tokens[len(prompt) :])
    assert check_tokens_are_right(weights, PROMPTS, answers) == []
    logits = run_reference(weights, [*PROMPTS[1], *answers[1][:2]]).logits[-1]
    second = int(logits.argsort()[-2])
    gap = logits.max() - logits[second]
    (problem,) = check_tokens_are_right(weights, PROMPTS, [answers[0], [*answers[1][:2], second, 7]])
    assert problem == (
        f"session 1: the float64 reference picks token {answers[1][2]} where generated token 2 is {second}, "
        f"{gap:.2g} below it"
    )
