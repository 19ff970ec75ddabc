"""llama.cpp's answers are right, up to what rounding can do; and the goldens are what the reference picks."""

from __future__ import annotations

import numpy as np
import pytest

from parity.gate.plan import GateJob
from parity.gate.result import CheckKind
from parity.golden.cases import GoldenMode, golden_path
from parity.golden.record import MIN_MARGIN, Golden
from parity.models import resolve_model
from parity.models.families import load_families
from parity.models.quantise import FILE_TYPES
from parity.models.tiny.variants import VARIANTS
from parity.models.vocabulary import BOS
from parity.plugin import family_params, gate_params
from parity.records import Verdict
from parity.reference import load_weights, run_reference
from parity.suites.truth import PROMPT_TOKENS, WAYS, measure_distances, variant_models

SHORTER = (1, 7, 33, 100)
FAMILIES = load_families()


def variant_params() -> list:
    """Every variant row under its family's marker."""
    return [
        pytest.param(f"{family}:{name}", marks=getattr(pytest.mark, FAMILIES[family].marker))
        for family, variants in VARIANTS.items()
        for name in variants
    ]


def quantised_params() -> list:
    """Every quantised model under its family's marker."""
    return [
        pytest.param(model, marks=getattr(pytest.mark, FAMILIES[model.partition(":")[0]].marker))
        for model in variant_models()
        if model.rpartition(":")[2] in FILE_TYPES
    ]


def check_right(model: str, ways: tuple[str, ...], prompt_tokens: tuple[int, ...]) -> None:
    for distance in measure_distances(model, ways=ways, prompt_tokens=prompt_tokens):
        assert distance.positions == sum(prompt_tokens)
        if distance.worst_of_bound is None:  # stock placement is measured, nothing is claimed of it
            continue
        assert distance.verdict is Verdict.PASS, (distance.way, distance.beyond)
        assert distance.same_bits, distance.way
        assert 0 < distance.rms < 0.2 and 0 < distance.worst_of_bound <= 1


@pytest.mark.parametrize("job", gate_params(CheckKind.TRUTH))
def test_tiny_model_is_right(job: GateJob) -> None:
    check_right(job.model, tuple(WAYS), PROMPT_TOKENS)


@pytest.mark.parametrize("model", variant_params())
def test_variant_model_is_right(model: str) -> None:
    check_right(model, ("plain",), PROMPT_TOKENS)


@pytest.mark.nightly
@pytest.mark.parametrize("model", variant_params())
def test_variant_model_is_right_with_half_cells(model: str) -> None:
    check_right(model, ("streams", "unified"), SHORTER)


@pytest.mark.parametrize("family", family_params("llama", "gemma2"))
def test_half_cells_are_further_from_the_truth_than_float32_ones(family: str) -> None:
    plain, streams = measure_distances(family, ways=("plain", "streams"), prompt_tokens=(33,))
    assert streams.rms > 2 * plain.rms


@pytest.mark.parametrize("family", family_params())
def test_goldens_carry_what_the_reference_picks(family: str) -> None:
    weights = load_weights(resolve_model(family).path)
    for mode in GoldenMode:
        path = golden_path(family, mode)
        golden = Golden.from_text(path.read_text(encoding="utf-8"), where=str(path))
        assert golden.provenance.model == resolve_model(family).sha256
        for session in golden.sessions:
            prompt = [BOS, *session.prompt.encode()]
            logits = run_reference(weights, [*prompt, *session.tokens[:-1]]).logits[len(prompt) - 1 :]
            assert tuple(logits.argmax(axis=-1)) == session.tokens == session.reference.tokens
            best, second = logits.max(axis=-1), sorted_second(logits)
            assert session.reference.margin == pytest.approx((best - second).min(), rel=1e-5)
            assert session.reference.ties == ()
            # The engine's margin is of a kernel with half cells: near the reference's, and no tie by either.
            assert session.reference.margin > MIN_MARGIN / 2, (mode, session.prompt)


def sorted_second(logits: np.ndarray) -> np.ndarray:
    return np.sort(logits, axis=-1)[:, -2]


@pytest.mark.quantised
@pytest.mark.parametrize("model", quantised_params())
def test_quantised_model_is_right_by_its_own_weights(model: str) -> None:
    kinds = {tensor.kind for tensor in load_weights(resolve_model(model).path).tensors.values()}
    assert kinds & {"Q8_0", "Q4_0", "Q4_K"}
    for distance in measure_distances(model, ways=("plain", "unified"), prompt_tokens=SHORTER):
        assert distance.verdict is Verdict.PASS, (distance.way, distance.beyond)
