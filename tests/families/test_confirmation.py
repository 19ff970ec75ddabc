"""Real weights, real text: the confirmation row that needs no Hub. ``parity fetch --confirm`` brings it.

Without it these tests are red, not skipped: what was not run is not confirmed. The default
suite leaves ``nightly`` tests out.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from parity.cases.strategies import landmark
from parity.cases.text import SENTENCES, TextPrompts, has_real_vocabulary, running_text, text_prompts
from parity.models.families import load_family
from parity.records import Verdict
from parity.suites.suite import run_suite
from scheduler.limits import Layout

MODEL = "smollm2-135m"
SESSIONS = 50


@pytest.mark.nightly
@pytest.mark.family_llama
@pytest.mark.parametrize("layout", [Layout.UNIFIED, Layout.STREAMS], ids=lambda layout: layout.value)
def test_real_text_is_bit_identical(layout: Layout, tmp_path: Path) -> None:
    result = run_suite("llama", layout, model=MODEL, min_sessions=SESSIONS, failures=tmp_path)

    assert result.verdict is Verdict.PASS, f"{result.reason}\n{result.explanation}"
    assert result.bit_identical == result.byte_identical == result.sessions >= SESSIONS
    assert all(result.marks[mark.value] for mark in load_family("llama").marks)


@pytest.mark.nightly
@pytest.mark.family_llama
def test_stock_placement_of_real_text_diverges_only_by_noise(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """Reported, not hidden: on the machine where this was written 7 of 53 sessions gave other text."""
    result = run_suite("llama", Layout.STOCK, model=MODEL, min_sessions=SESSIONS, failures=tmp_path)
    record_property("bit_identical", f"{result.bit_identical} of {result.sessions}")
    record_property("byte_identical", f"{result.byte_identical} of {result.sessions}")

    assert result.verdict is Verdict.PASS, f"{result.reason}\n{result.explanation}"
    assert result.bit_identical < result.sessions


@pytest.mark.nightly
@pytest.mark.family_llama
def test_real_prompts_are_text_under_the_models_own_tokenizer() -> None:
    assert has_real_vocabulary(MODEL)
    prompts = text_prompts(MODEL)
    assert len({prompts(seed, 8) for seed in range(len(SENTENCES))}) == len(SENTENCES)
    assert max(token for text in prompts.texts for token in text) > 10_000
    case = landmark("llama", Layout.UNIFIED, model=MODEL, tokens=prompts)
    assert all(s.prompt[:4] == prompts(7, 4) for s in case.sessions[:8])


@pytest.mark.family_llama
def test_tiny_models_are_given_bytes() -> None:
    assert not has_real_vocabulary("llama")


def test_running_texts_begin_where_they_are_told_and_hold_every_sentence() -> None:
    for start in (0, 5):
        text = running_text(start)
        assert text.startswith(SENTENCES[start])
        assert all(sentence in text for sentence in SENTENCES)


def test_text_prompts_refuse_to_be_shorter_than_asked() -> None:
    prompts = TextPrompts(((1, 2, 3), (4, 5, 6)))
    assert (prompts(0, 2), prompts(3, 3)) == ((1, 2), (4, 5, 6))
    with pytest.raises(ValueError, match="has no 4"):
        prompts(0, 4)
