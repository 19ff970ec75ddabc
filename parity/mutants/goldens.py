"""Mutants of what goldens carry of the float64 reference: how two of them are compared, and how an engine's
tokens are held to it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

import parity.golden.record as record_module
import parity.golden.run as run_module
from parity.golden.cases import GoldenMode, golden_path
from parity.golden.record import Golden, ReferenceAnswer, find_differences
from parity.models import resolve_model
from parity.mutants.mutant import Complaint, Killer, Reach, Trial, mutant
from parity.mutants.seam import in_method
from parity.reference import Kernel, Pass, Weights, load_weights, run_reference
from parity.reference.comparison import Expectation
from parity.reference.weights import Tensor

PROMPT = (256, 90)
NEAR = 1e-3  # too far apart for float32 rounding, near enough for half cells


def must_differ(name: str, change: Callable[[ReferenceAnswer], ReferenceAnswer]) -> Trial:
    """A golden beside itself with another answer of the reference: the comparison must say so."""

    def run() -> tuple[Complaint, ...]:
        path = golden_path("llama", GoldenMode.SHORT)
        golden = Golden.from_text(path.read_text(encoding="utf-8"), where=str(path))
        first = golden.sessions[0]
        changed = replace(first, reference=change(first.reference))
        if find_differences(golden, replace(golden, sessions=(changed, *golden.sessions[1:]))):
            return ()
        return (Complaint(Killer.SELF_TEST, f"{name} of the reference was not noticed"),)

    return Trial(name=name, run=run)


def must_refuse(name: str, answer: Callable[[Weights], tuple[Weights, Sequence[int]]]) -> Trial:
    """Tokens that the reference doesn't pick, with no tie: they must be a problem."""

    def run() -> tuple[Complaint, ...]:
        weights, tokens = answer(load_weights(resolve_model("llama").path))
        _, wrong = run_module.ask_reference(weights, PROMPT, tokens)
        return () if wrong else (Complaint(Killer.SELF_TEST, f"{name}: accepted without a tie"),)

    return Trial(name=name, run=run)


def second_best(weights: Weights) -> tuple[Weights, Sequence[int]]:
    """The second best token after the prompt, and the best one after that."""
    second = int(run_reference(weights, PROMPT).logits[-1].argsort()[-2])
    return weights, (second, int(run_reference(weights, (*PROMPT, second)).logits[-1].argmax()))


def nearly_best(weights: Weights) -> tuple[Weights, Sequence[int]]:
    """The second best token of a model in which it is ``NEAR`` the best."""
    best, other = (int(token) for token in run_reference(weights, PROMPT).logits[-1].argsort()[[-1, -2]])
    head = weights.tensors["output"]
    values = head.values.copy()
    values[other] = values[best] * (1 - NEAR)
    return replace(weights, tensors={**weights.tensors, "output": Tensor(values, head.kind)}), (other,)


@mutant(
    in_method(record_module, "_session_differences"),
    part="goldens",
    killers=(Killer.SELF_TEST,),
    trials=(
        must_differ("another margin", lambda said: replace(said, margin=said.margin * 1.001)),
        must_differ("another token", lambda said: replace(said, tokens=(*said.tokens[:-1], 1))),
        must_differ("a tie", lambda said: replace(said, ties=("near",))),
    ),
)
def golden_reference_not_compared(original: Callable[..., Any], reach: Reach) -> Callable[..., Any]:
    """What the reference says of a golden's tokens is on record, and nobody compares it."""

    def differences(was: Any, now: Any, *, bits: bool) -> list[str]:
        reach()
        return original(was, replace(now, reference=was.reference), bits=bits)

    return differences


@mutant(
    in_method(run_module, "expect_logits"),
    part="goldens",
    killers=(Killer.SELF_TEST,),
    trials=(must_refuse("a token that half cells may pick", nearly_best),),
)
def golden_tie_by_half_cells(original: Callable[..., Any], reach: Reach) -> Callable[..., Any]:
    """Ties of goldens are as wide as the row kernel's rounding: other layouts give other tokens."""

    def expect(weights: Weights, tokens: Sequence[int], kernel: Kernel) -> Expectation:
        reach()
        return original(weights, tokens, Kernel.ROW)

    return expect


@mutant(
    in_method(run_module, "run_reference"),
    part="goldens",
    killers=(Killer.SELF_TEST,),
    trials=(must_refuse("the second best token", second_best),),
)
def golden_reference_follows_the_engine(original: Callable[..., Any], reach: Reach) -> Callable[..., Any]:
    """The reference picks whatever the engine went on with."""

    def follow(weights: Weights, tokens: Sequence[int]) -> Pass:
        run = original(weights, tokens)
        logits = run.logits.copy()
        taken = np.asarray(tokens[1:])
        logits[np.arange(len(taken)), taken] = logits.max() + 1
        reach()
        return replace(run, logits=logits)

    return follow
