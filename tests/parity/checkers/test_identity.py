"""Identity, noise and verdicts on hand-written answers: what must be rejected is, at the right step."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from parity.checkers.identity import compare_session
from parity.checkers.noise import is_noise, logit_distance
from parity.engines.sampling import logits_digest, sample_token, top_margin, uniform
from parity.history import Answer
from parity.records import Case, Divergence, Outcome, Session, Verdict
from parity.run.explain import explain_outcome
from scheduler.records import SamplingParams

ALONE = Answer((4, 5, 6), ("a", "b", "c"))


@pytest.mark.parametrize(
    ("actual", "complete", "bits_step", "bytes_step"),
    [
        (Answer((4, 5, 6), ("a", "b", "c")), True, None, None),
        (Answer((4, 5, 6), ("a", "x", "c")), True, 1, None),
        (Answer((4, 9, 6), ("a", "x", "y")), True, 1, 1),
        (Answer((4, 5), ("a", "b")), True, 2, 2),  # ended too early
        (Answer((4, 5), ("a", "b")), False, None, None),  # cancelled: compared as far as it went
        (Answer((4, 5, 6, 7), ("a", "b", "c", "d")), False, 3, 3),  # a token too many
    ],
)
def test_comparison_names_the_first_differing_step(
    actual: Answer, complete: bool, bits_step: int | None, bytes_step: int | None
) -> None:
    comparison = compare_session(0, ALONE, actual, complete=complete)

    assert (comparison.bits_step, comparison.bytes_step) == (bits_step, bytes_step)


def test_one_changed_bit_changes_the_digest() -> None:
    row = np.linspace(-1, 1, 64, dtype=np.float32)
    changed = row.copy()
    changed.view(np.uint32)[17] ^= 1

    assert logits_digest(row) == logits_digest(row.copy())
    assert logits_digest(row) != logits_digest(changed)


def test_noise_excuses_small_first_differences_only() -> None:
    reference = np.random.default_rng(0).normal(size=100).astype(np.float32)

    assert is_noise(1e-4, reference, [1e-5] * 50)
    spread = float(reference.std())
    assert is_noise(0.4 * spread, reference, [0.1 * spread] * 50)
    assert not is_noise(0.4 * spread, reference, [0.01 * spread] * 50)
    assert not is_noise(0.6 * spread, reference, [0.1 * spread] * 50)  # however far others move
    assert not is_noise(2.0, reference, [1e-5] * 50)
    assert not is_noise(logit_distance(reference, np.full(100, np.nan, np.float32)), reference, [1e-5] * 50)


def test_seeded_sampling_does_not_depend_on_anything_but_its_key() -> None:
    logits = np.random.default_rng(1).normal(size=50).astype(np.float32)
    sampling = SamplingParams(temperature=1.0, seed=3)
    draws = [sample_token(logits, sampling, request_id="s1", position=p) for p in range(200)]

    assert draws == [sample_token(logits, sampling, request_id="s1", position=p) for p in range(200)]
    assert draws != [sample_token(logits, sampling, request_id="s2", position=p) for p in range(200)]
    assert 0 <= uniform(3, "s1", 0) < 1 and len(set(draws)) > 10


def test_sampling_restricted_to_one_token_is_greedy() -> None:
    logits = np.array([0.1, 3.0, 2.9, -1.0], np.float32)
    only_one = (SamplingParams(temperature=2.0, top_k=1), SamplingParams(temperature=2.0, top_p=1e-6))

    for sampling in (SamplingParams(), *only_one):
        assert {sample_token(logits, sampling, request_id="s", position=p) for p in range(50)} == {1}
    assert top_margin(logits) == pytest.approx(0.1, abs=1e-6)


def test_merged_verdict_is_the_worst_and_of_nothing_unknown() -> None:
    assert Verdict.merge([Verdict.PASS, Verdict.UNKNOWN]) is Verdict.UNKNOWN
    assert Verdict.merge([Verdict.FAIL, Verdict.UNKNOWN, Verdict.PASS]) is Verdict.FAIL
    assert Verdict.merge([]) is Verdict.UNKNOWN


def test_explanation_names_session_step_tokens_margin_neighbours_chunks_cells_and_replay(
    tmp_path: Path,
) -> None:
    case = Case(family="llama", model="llama", sessions=(Session(prompt=(5,), max_tokens=1),))
    divergence = Divergence(
        session=3,
        step=2,
        scheduler_step=11,
        expected_token=7,
        actual_token=8,
        margin=0.25,
        distance=0.5,
        neighbours=(0, 4),
        chunks=((0, 9), (9, 10)),
        cells=(1, 2, 3, 9),
    )
    text = explain_outcome(
        Outcome(case=case, verdict=Verdict.FAIL, sessions=1, divergences=(divergence,)),
        case_file=tmp_path / "case.json",
    )

    for part in (
        "session 3",
        "token 2",
        "step 11",
        "token 8 instead of 7",
        "0.25",
        "[0, 4]",
        "[0,9) [9,10)",
        "1-3 9",
        f"parity replay {tmp_path / 'case.json'}",
    ):
        assert part in text
