"""The numerics self-test: candidates by tensor types, the fastest exact one
chosen, no exact one is unknown.
"""

from __future__ import annotations

from parity.engines.numerics import ROW, NumericsProfile, profile_candidates
from parity.run.profiles import Trial, choose, engine_fingerprint, profile_of
from scheduler.limits import Layout


def trial(name: str, identical: int, speed: float, problem: str = "") -> Trial:
    return Trial(NumericsProfile(name=name), 10, identical, speed, problem)


def test_fastest_exact_candidate_is_chosen() -> None:
    choice = choose((trial("fast", 9, 900.0), trial("slow", 10, 100.0), trial("middle", 10, 500.0)))

    assert choice.exact and choice.profile.name == "middle"


def test_no_exact_candidate_is_unknown_with_a_reason_and_the_rebuild_command() -> None:
    choice = choose((trial("fast", 9, 900.0), trial("dead", 0, 0.0, "ended by SIGILL")))

    assert not choice.exact and choice.profile.name == "fast"
    assert "no candidate is exact" in choice.reason and "GGML_LLAMAFILE=OFF" in choice.reason


def test_candidate_that_compared_nothing_is_never_exact() -> None:
    assert not Trial(ROW, 0, 0, 0.0).exact


def test_float_weights_have_one_candidate_and_k_quants_the_most() -> None:
    counts = [
        len(profile_candidates(quantised=q, k_quants=k))
        for q, k in ((False, False), (True, False), (True, True))
    ]

    assert counts == [1, 2, 5]


def test_layouts_use_the_profiles_products_with_their_own_kernels() -> None:
    profile = NumericsProfile(name="x", use_extra_bufts=False, environment=(("A", "1"),))

    assert profile.for_layout(Layout.UNIFIED) == profile
    streams, stock = profile.for_layout(Layout.STREAMS), profile.for_layout(Layout.STOCK)
    assert not streams.flash_attention and stock.flash_attention
    assert {p.environment for p in (streams, stock)} == {profile.environment}
    assert not streams.use_extra_bufts and not stock.use_extra_bufts


def test_profile_survives_json() -> None:
    profile = NumericsProfile(name="x", environment=(("A", "1"),), max_call_rows=48)

    assert NumericsProfile.from_json(profile.to_json()) == profile


def test_self_test_finds_the_row_profile_exact_on_this_machine() -> None:
    choice = profile_of("llama")

    assert choice.exact and choice.profile == ROW
    assert all(t.sessions >= 20 for t in choice.trials)
    assert engine_fingerprint()["version"]
