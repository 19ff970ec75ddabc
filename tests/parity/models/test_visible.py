"""Tiny models in llama.cpp: every visible token moves the output, greedy text is lively, text is bytes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from parity.engines.llama import ContextSettings, LlamaContext, LlamaModel
from parity.models import resolve_model
from parity.models.families import load_families

SPECS = [f"{name}:{row}" for name in load_families() for row in ("tiny", "wide")]
CHUNK = 60


class Solo:
    """One sequence in its own context, cleared before each prompt."""

    def __init__(self, spec: str) -> None:
        self.is_wide = spec.endswith(":wide")
        self.model = LlamaModel(resolve_model(spec).path, use_extra_bufts=False)
        settings = ContextSettings(n_ctx=512, n_seq_max=1, kv_type="f32", n_threads=1)
        self.context = LlamaContext(self.model, settings)

    def last_logits(self, prompt: Sequence[int]) -> np.ndarray:
        self.context.clear()
        for start in range(0, len(prompt), CHUNK):
            logits = self.run(prompt[start : start + CHUNK], start)
        return logits

    def run(self, tokens: Sequence[int], start: int) -> np.ndarray:
        """Logits after the last of ``tokens``, float32 [n_vocab]."""
        count = len(tokens)
        positions = range(start, start + count)
        return self.context.decode_rows(tokens, positions, [[0]] * count, [0] * (count - 1) + [1])[0]

    def greedy(self, prompt: Sequence[int], count: int) -> tuple[list[int], list[float]]:
        """Greedy tokens and the margins between the best two logits."""
        logits, tokens, margins = self.last_logits(prompt), [], []
        for place in range(count):
            second, best = np.sort(logits)[-2:]
            tokens.append(int(logits.argmax()))
            margins.append(float(best - second))
            logits = self.run(tokens[-1:], len(prompt) + place)
        return tokens, margins

    def close(self) -> None:
        self.context.close()
        self.model.close()


@pytest.fixture(scope="module", params=SPECS)
def solo(request: pytest.FixtureRequest) -> Iterator[Solo]:
    made = Solo(request.param)
    yield made
    made.close()


def random_prompt(count: int) -> list[int]:
    return np.random.default_rng(7).integers(0, 256, count).tolist()


def test_every_token_of_a_prompt_moves_the_logits(solo: Solo) -> None:
    prompt = random_prompt(50)  # more than three windows
    reference = solo.last_logits(prompt)
    for place in range(0, len(prompt), 7 if solo.is_wide else 1):
        changed = [*prompt[:place], (prompt[place] + 1) % 256, *prompt[place + 1 :]]
        moved = np.abs(solo.last_logits(changed) - reference).max()
        assert moved > 1e-3, f"token {place} moves the logits by {moved}"


def test_tokens_far_back_in_a_long_prompt_move_the_logits(solo: Solo) -> None:
    prompt = random_prompt(300)
    reference = solo.last_logits(prompt)
    for place in (0, 150, 283):
        changed = [*prompt[:place], (prompt[place] + 1) % 256, *prompt[place + 1 :]]
        moved = np.abs(solo.last_logits(changed) - reference).max()
        assert moved > 1e-3, f"token {place} moves the logits by {moved}"


def test_same_prompt_gives_the_same_bits(solo: Solo) -> None:
    prompt = random_prompt(50)
    assert np.array_equal(solo.last_logits(prompt), solo.last_logits(prompt))


def test_greedy_text_is_lively_and_its_margins_are_wide(solo: Solo) -> None:
    tokens, margins = solo.greedy(random_prompt(32), 64)
    assert len(set(tokens)) >= 20
    assert 0.2 < np.median(margins) < 5.0
    assert sum(token > 255 for token in tokens) <= 6  # control tokens are rare


def test_every_text_becomes_its_bytes_and_back(solo: Solo) -> None:
    text = "Grüße, 世界!\n\n\tdef f(x): return x  # 😀 \x00\x00 end"
    tokens = solo.model.tokenize(text, add_special=False)
    assert tokens == list(text.encode())
    assert b"".join(map(solo.model.token_bytes, tokens)).decode() == text
    assert [solo.model.token_bytes(token) for token in range(256)] == [bytes([token]) for token in range(256)]


def test_special_tokens_are_known_and_stand_for_no_bytes(solo: Solo) -> None:
    assert (solo.model.bos_token, solo.model.eos_token) == (256, 257)
    assert solo.model.tokenize("<|user|>hi</s>", add_special=False) == [260, 104, 105, 257]
    assert [solo.model.token_bytes(token) for token in range(256, solo.model.n_vocab)] == [b""] * 8
