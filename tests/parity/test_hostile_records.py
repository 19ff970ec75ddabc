"""Case files and goldens that mean harm: one line with the key's path, or the very same text again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parity.engines.numerics import NumericsProfile
from parity.errors import UsageError
from parity.golden.cases import GoldenMode, golden_path
from parity.golden.record import Golden
from parity.models.families import load_families
from parity.records import (
    Case,
    Divergence,
    Fault,
    FaultKind,
    Finding,
    Outcome,
    Session,
    Verdict,
    outcome_from_data,
    outcome_to_data,
)
from scheduler.records import SamplingParams, ServiceLevel

REPOSITORY = Path(__file__).resolve().parent.parent.parent
CASES = sorted((REPOSITORY / "tests/regressions").glob("*.json"))
GOLDENS = [golden_path(name, mode) for name in load_families() for mode in GoldenMode]
FULL = Case(
    family="llama",
    model="llama",
    sessions=(
        Session(
            prompt=(5, 6, 7),
            max_tokens=4,
            sampling=SamplingParams(temperature=0.5, key="k"),
            slo=ServiceLevel(ttft_ms=20.0),
            stop_token_ids=(9,),
            hidden_output_tokens=3,
        ),
        Session(prompt=(5,), max_tokens=1),
    ),
    faults=(Fault(kind=FaultKind.CANCEL, step=1, session=1, in_flight=True, amount=2.5),),
    policy_options=(("weight", 2), ("kind", "p90")),
    stage_cells=(40, 50),
    split="0:2,2:6",
)


def changed(path: str, value: Any) -> str:
    """The full case with one value replaced; ``...`` removes it."""
    data = json.loads(FULL.to_json())
    *parents, last = [int(key) if key.isdigit() else key for key in path.split(".")]
    place = data
    for key in parents:
        place = place[key]
    if value is ...:
        del place[last]
    else:
        place[last] = value
    return json.dumps(data)


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_case_files_stay_byte_for_byte(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert Case.from_json(text, where=str(path)).to_json() == text


@pytest.mark.parametrize("path", GOLDENS, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_goldens_stay_byte_for_byte(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert Golden.from_text(text, where=str(path)).to_text() == text


def test_there_are_case_files_and_goldens() -> None:
    assert len(CASES) >= 15 and len(GOLDENS) >= 25


def test_full_records_come_back_equal() -> None:
    assert Case.from_json(FULL.to_json()) == FULL
    outcome = Outcome(
        case=FULL,
        verdict=Verdict.FAIL,
        divergences=(
            Divergence(
                session=0,
                step=1,
                scheduler_step=2,
                expected_token=3,
                actual_token=None,
                margin=0.5,
                distance=float("inf"),
                neighbours=(1,),
                chunks=((0, 2), (2, 3)),
                cells=(7, 8),
            ),
        ),
        findings=(Finding("ends", "text", {"step": 1, "cells": [1, 2]}),),
        noise=(0.0, 1.5),
    )
    assert outcome_from_data(FULL, json.loads(json.dumps(outcome_to_data(outcome)))) == outcome
    profile = NumericsProfile(name="row", environment=(("A", "1"),))
    assert NumericsProfile.from_json(profile.to_json()) == profile


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ("family", 7, "7 is not text at family"),
        ("family", ..., "key 'family' is missing"),
        ("pool_cells", "100", "'100' is not a whole number at pool_cells"),
        ("pool_cells", 100.0, "100.0 is not a whole number at pool_cells"),
        ("pool_cells", True, "True is not a whole number at pool_cells"),
        ("pool_cells", None, "None is not a whole number at pool_cells"),
        ("prefix_cache", 1, "1 is not true or false at prefix_cache"),
        ("ms_per_step", "10", "'10' is not a number at ms_per_step"),
        ("layout", "heap", "'heap' is not a valid Layout at layout"),
        ("colour", "red", "unknown key 'colour'"),
        ("sessions", {}, "{} is not a list at sessions"),
        ("sessions", "ab", "'ab' is not a list at sessions"),
        ("sessions.1", 5, "is not a list of key and value at sessions[1]"),
        ("sessions.1", [], "at sessions[1]"),
        ("sessions.0.prompt", "567", "'567' is not a list at sessions[0].prompt"),
        ("sessions.0.prompt.2", 1.5, "1.5 is not a whole number at sessions[0].prompt[2]"),
        (
            "sessions.0.sampling.temperature",
            "hot",
            "'hot' is not a number at sessions[0].sampling.temperature",
        ),
        ("sessions.0.sampling.temperature", -1, "sampling out of range"),
        ("sessions.0.slo.ttft_ms", [], "at sessions[0].slo.ttft_ms"),
        ("sessions.0.max_tokens", "9" * 100_000, "is not a whole number at sessions[0].max_tokens"),
        ("faults.0.kind", "flood", "'flood' is not a valid FaultKind at faults[0].kind"),
        ("faults.0.step", None, "None is not a whole number at faults[0].step"),
        ("policy_options.0", ["a", 1, 2], "does not have 2 items at policy_options[0]"),
        ("policy_options.0", "ab", "'ab' is not a list at policy_options[0]"),
        ("stage_cells.0", "40", "'40' is not a whole number at stage_cells[0]"),
    ],
)
def test_case_of_wrong_types_is_one_short_line(path: str, value: Any, said: str) -> None:
    with pytest.raises(UsageError, match="case cannot be read in x.json") as caught:
        Case.from_json(changed(path, value), where="x.json")
    line = caught.value.line
    assert said in line and "\n" not in line and len(line) < 400


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "null",
        "[" * 100_000,
        '{"a":' * 100_000,
        FULL.to_json().replace("10.0", "NaN"),
        FULL.to_json().replace("10.0", "1e999"),
        FULL.to_json().replace("10.0", "-Infinity"),
        FULL.to_json().replace("1000,", "9" * 5000 + ","),
    ],
    ids=["empty", "list", "null", "deep-list", "deep-object", "nan", "too-large", "infinite", "5000-digits"],
)
def test_text_that_is_no_case_is_one_short_line(text: str) -> None:
    with pytest.raises(UsageError, match="case cannot be read") as caught:
        Case.from_json(text)
    assert "\n" not in caught.value.line and len(caught.value.line) < 400


ODD = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.just([]) | st.just({})
)


NO_SAMPLING = {"temperature": 0.0, "seed": 0, "top_k": 0, "top_p": 1.0, "key": ""}
NO_OBJECTIVES = {"ttft_ms": None, "tbt_ms": None}


@given(data=st.data())
@settings(max_examples=200, deadline=None)
def test_any_value_anywhere_is_kept_as_it_is_or_refused(data: st.DataObject) -> None:
    case = json.loads(FULL.to_json())
    place: Any = case
    while True:
        key = data.draw(st.sampled_from(sorted(place) if isinstance(place, dict) else range(len(place))))
        if not isinstance(place[key], dict | list) or not place[key] or data.draw(st.booleans()):
            break
        place = place[key]
    place[key] = data.draw(ODD)
    try:
        read = Case.from_json(json.dumps(case))
    except UsageError as error:
        assert "\n" not in error.line
    else:
        for session in case["sessions"]:  # a key that is left out has its default
            session["sampling"] = {**NO_SAMPLING, **session["sampling"]}
            session["slo"] = {**NO_OBJECTIVES, **session["slo"]}
        assert json.loads(read.to_json()) == case


def test_a_case_may_leave_out_what_has_a_default() -> None:
    case = json.loads(FULL.to_json())
    case["sessions"][0] |= {"sampling": {}, "slo": {}}
    session = json.loads(Case.from_json(json.dumps(case)).to_json())["sessions"][0]
    assert (session["sampling"], session["slo"]) == (NO_SAMPLING, NO_OBJECTIVES)
