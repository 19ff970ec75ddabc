"""Saved states that are truncated, changed or foreign: refused whole, and nobody else's state is touched."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from parity.engines.stage_by_hand import HandDriver, hand_driver
from parity.engines.stage_state import StateRefused, seal_state, unseal_state
from parity.models import resolve_model
from parity.models.families import load_family
from parity.plugin import family_params
from parity.run.chains import hand_settings
from parity.suites.states import NEIGHBOUR, OTHER, OWN, StateChecks, tokens_for

IDENTITY = bytes(16)
FOREIGN = {
    "llama": "deepseek2",
    "deepseek2": "gemma2",
    "gemma2": "llama",
    "falcon_h1": "qwen3next",
    "qwen3next": "llama",
}


@contextmanager
def model_driver(family: str, split: str | None = None, kv_type: str = "f16") -> Iterator[HandDriver]:
    with hand_driver(
        hand_settings(resolve_model(family), load_family(family), split, kv_type=kv_type)
    ) as driver:
        yield driver


def saved_state(family: str, kv_type: str = "f16", split: str | None = None) -> tuple[bytes, ...]:
    with model_driver(family, split, kv_type) as driver:
        driver.feed(OWN, tokens_for(f"{family} prompt", 33), 0)
        return driver.save(OWN)


def unsealed(sealed: bytes) -> bytes:
    return sealed[len(seal_state(b"", IDENTITY)) :]


@pytest.mark.parametrize("family", family_params())
def test_truncated_changed_or_foreign_state_is_refused_and_neighbours_are_unchanged(family: str) -> None:
    own, other = tokens_for(f"{family} prompt", 60), tokens_for(f"{family} neighbour", 60)
    foreign = saved_state(FOREIGN[family])
    wrong_type = saved_state(family, kv_type="f32")
    with model_driver(family) as driver:
        expected = driver.feed(NEIGHBOUR, other, 0)
        driver.clear()
        driver.feed(OWN, own[:33], 0)
        driver.feed(NEIGHBOUR, other[:20], 0)
        (saved,) = driver.save(OWN)
        middle = len(saved) // 2
        flipped = saved[:middle] + bytes([saved[middle] ^ 1]) + saved[middle + 1 :]
        for blob in (b"", saved[:10], saved[:middle], saved[:-1], saved + b"x", flipped):
            with pytest.raises(StateRefused, match="not the whole of what was saved"):
                driver.load(OTHER, (blob,))
        for blobs in (foreign, wrong_type):
            with pytest.raises(StateRefused, match="another model, stage or cache type"):
                driver.load(OTHER, blobs)
        with pytest.raises(StateRefused, match="the chain has 1 stages"):
            driver.load(OTHER, (saved, saved))

        assert holds(driver, OTHER) == [-1]
        assert (driver.feed(NEIGHBOUR, other[20:], 20) == expected[20:]).all()


def holds(driver: HandDriver, seq_id: int) -> list[int]:
    """Largest position of a sequence in every stage."""
    return [stage.pool.context.last_position(stage.pool.physical_ids(seq_id)[0]) for stage in driver.stages]


@pytest.mark.parametrize("family", family_params())
def test_llama_cpp_itself_refuses_damaged_states_and_leaves_neighbours_alone(family: str) -> None:
    """Pinned behaviour of the engine, without our seal.

    It takes a blob with bytes behind its end; we call that refused.
    """
    other = tokens_for(f"{family} neighbour", 60)
    foreign = tuple(map(unsealed, saved_state(FOREIGN[family])))
    wrong_type = tuple(map(unsealed, saved_state(family, kv_type="f32")))
    with model_driver(family) as driver:
        expected = driver.feed(NEIGHBOUR, other, 0)
        driver.clear()
        driver.feed(OWN, tokens_for(f"{family} prompt", 33), 0)
        driver.feed(NEIGHBOUR, other[:20], 0)
        blob = unsealed(driver.save(OWN)[0])
        damaged = [b"", blob[:4], blob[: len(blob) // 2], blob[:-1], bytes(len(blob)), b"\xff" * len(blob)]
        for candidate in (*damaged, *foreign, *wrong_type):
            assert driver.load_raw(OTHER, [candidate]) == [False]
            assert holds(driver, OTHER) == [-1]
        assert driver.load_raw(OTHER, [blob + b"x"]) == [False]
        driver.remove(OTHER)

        assert (driver.feed(NEIGHBOUR, other[20:], 20) == expected[20:]).all()


@pytest.mark.family_llama
def test_state_without_room_for_it_is_refused_and_the_sequence_left_empty_in_every_stage() -> None:
    prompt = tokens_for("room", 200)
    with model_driver("llama", "thirds") as driver:
        driver.feed(OWN, prompt, 0)
        saved = driver.save(OWN)
        driver.feed(NEIGHBOUR, prompt, 0)
        with pytest.raises(StateRefused, match="is there room for it"):
            driver.load(OTHER, saved)

        assert holds(driver, OTHER) == [-1, -1, -1]
        assert holds(driver, NEIGHBOUR) == [199, 199, 199]


@pytest.mark.family_llama
def test_states_of_two_stages_are_never_exchanged() -> None:
    with model_driver("llama", "halves") as driver:
        driver.feed(OWN, tokens_for("exchange", 20), 0)
        first, second = driver.save(OWN)
        with pytest.raises(StateRefused, match="another model, stage"):
            driver.load(OTHER, (second, first))

        assert holds(driver, OTHER) == [-1, -1]


@pytest.mark.parametrize("family", family_params())
def test_wrong_state_is_noticed_by_the_check(family: str) -> None:
    """The check can fail: one bit of a saved value changes, which llama.cpp cannot know."""

    def load_damaged(driver: HandDriver, seq_id: int, sealed: tuple[bytes, ...]) -> None:
        blobs = []
        for blob in map(unsealed, sealed):
            values = np.frombuffer(blob, np.uint8).copy()
            values[len(values) - 300 : len(values) - 1 : 2] ^= 0x10
            blobs.append(values.tobytes())
        assert all(driver.load_raw(seq_id, blobs))

    report = StateChecks(family, lengths=(16,), load=load_damaged).run()

    assert "another id at 16 tokens: goes on" in report.differing
    assert not any("neighbour" in text or "original" in text for text in report.differing)


def test_seal_says_what_is_wrong() -> None:
    sealed = seal_state(b"state", IDENTITY)

    assert unseal_state(sealed, IDENTITY) == b"state"
    for blob in (b"", sealed[:-1], sealed[:40] + b"?" + sealed[41:]):
        with pytest.raises(StateRefused, match="not the whole"):
            unseal_state(blob, IDENTITY)
    with pytest.raises(StateRefused, match="another model"):
        unseal_state(sealed, b"1" * 16)
