"""The numerics self-test: candidates by tensor types, the fastest exact one
chosen, no exact one is unknown.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from parity.engines.numerics import ROW, NumericsProfile, profile_candidates
from parity.processes import Worker
from parity.records import Case, Finding, Outcome, Verdict
from parity.run.profiles import (
    JUDGING_CODE,
    ProfileChoice,
    Trial,
    choose,
    code_version,
    engine_fingerprint,
    probe_here,
    profile_of,
    try_profile,
)
from scheduler.limits import Layout


def trial(name: str, identical: int, speed: float, problem: str = "") -> Trial:
    return Trial(NumericsProfile(name=name), 10, identical, speed, problem)


def test_fastest_exact_candidate_is_chosen() -> None:
    choice = choose((trial("fast", 9, 900.0), trial("slow", 10, 100.0), trial("middle", 10, 500.0)))

    assert choice.exact and choice.profile.name == "middle"


def test_no_exact_candidate_is_unknown_with_a_reason_and_the_rebuild_command() -> None:
    choice = choose((trial("fast", 9, 900.0), trial("other", 8, 100.0)))

    assert not choice.exact and choice.profile.name == "fast"
    assert "no candidate is exact" in choice.reason and "GGML_LLAMAFILE=OFF" in choice.reason


def test_accident_is_named_and_never_read_as_a_judgement_of_the_kernels() -> None:
    choice = choose((trial("fast", 9, 900.0), trial("dead", 0, 0.0, "ended by SIGKILL")))

    assert not choice.exact
    assert "did not finish" in choice.reason and "dead: ended by SIGKILL" in choice.reason
    assert "no candidate is exact" not in choice.reason and "rebuild" not in choice.reason


def test_exact_candidate_is_chosen_beside_an_accident() -> None:
    choice = choose((trial("dead", 0, 0.0, "ended by SIGKILL"), trial("good", 10, 5.0)))

    assert choice.exact and choice.profile.name == "good"


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[Callable]]:
    """A stack of self-tests to come, the next one last; the cache of profiles is empty."""
    to_come: list[Callable] = []
    monkeypatch.setattr("parity.run.profiles.cache_dir", lambda *parts: tmp_path)
    monkeypatch.setattr("parity.run.profiles.try_profile", lambda *args: to_come.pop()(*args))
    yield to_come
    assert not to_come


def ask_anew(model: str = "llama") -> ProfileChoice:
    """``profile_of`` as a new process would ask."""
    profile_of.cache_clear()
    try:
        return profile_of(model)
    finally:
        profile_of.cache_clear()


def judged(model: str, family: str, profile: NumericsProfile) -> Trial:
    return Trial(profile, 10, 10, 5.0)


def inexact(model: str, family: str, profile: NumericsProfile) -> Trial:
    return Trial(profile, 10, 9, 5.0)


def accident(model: str, family: str, profile: NumericsProfile) -> Trial:
    return Trial(profile, 0, 0, 0.0, "ended by SIGKILL")


def test_accident_is_not_remembered_and_a_judgement_is(counted: list[Callable]) -> None:
    counted += [judged, accident]  # from the end: the first process's worker is killed

    assert not ask_anew().exact
    assert ask_anew().exact
    assert ask_anew().exact  # remembered: a third self-test would find the stack empty


def test_judgement_against_a_candidate_is_remembered(counted: list[Callable]) -> None:
    counted += [inexact]

    assert [ask_anew().exact, ask_anew().exact] == [False, False]


def test_other_code_judges_again(counted: list[Callable], monkeypatch: pytest.MonkeyPatch) -> None:
    counted += [judged, inexact]

    assert not ask_anew().exact
    monkeypatch.setattr("parity.run.profiles.code_version", lambda: "another")
    assert ask_anew().exact


def test_version_of_the_code_sees_every_byte_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in JUDGING_CODE:
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "a.py").write_text("x = 1")
    monkeypatch.setattr("parity.run.profiles.REPOSITORY", tmp_path)
    seen = {code_version.__wrapped__()}
    for folder in JUDGING_CODE:
        (tmp_path / folder / "a.py").write_text("x = 2")
        seen.add(code_version.__wrapped__())

    assert len(seen) == 1 + len(JUDGING_CODE)


@pytest.mark.parametrize(
    "outcome",
    [
        {"crashed": True, "reason": "GGML_ASSERT(x)"},
        {"findings": (Finding("legality", "session 1 was scheduled twice"),)},
    ],
)
def test_run_that_went_wrong_is_an_accident(outcome: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    class Runner:
        def run(self, case: Case, profile: NumericsProfile) -> Outcome:
            return Outcome(case=case, verdict=Verdict.FAIL, sessions=8, bit_identical=3, **outcome)

    monkeypatch.setattr("parity.run.runner.process_runner", lambda n_threads: Runner())
    with pytest.raises(RuntimeError, match="GGML_ASSERT|legality"):
        probe_here({"profile": ROW.to_json(), "n_threads": 1, "family": "llama", "model": "llama"})


def test_killed_worker_is_an_accident(monkeypatch: pytest.MonkeyPatch) -> None:
    call = Worker.call
    monkeypatch.setattr(
        "parity.run.profiles.Worker.call",
        lambda self, function, arguments: call(self, "parity.run.faults:die_here", {}),
    )
    found = try_profile("llama", "llama", ROW)

    assert not found.is_judgement and "SIGKILL" in found.problem


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
