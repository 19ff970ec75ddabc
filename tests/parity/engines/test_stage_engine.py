"""Stages without a scheduler's suites: what is refused before llama.cpp, what a hand-off
may never do, ceilings, layouts.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import parity.engines.stage as stages_stage
from parity.engines.numerics import ROW
from parity.engines.stage import HiddenRows, Stage, equal_length_parts, ggml_layout
from parity.engines.stage_by_hand import hand_driver
from parity.errors import UsageError
from parity.models import resolve_model
from parity.models.families import load_family
from parity.plugin import family_params
from parity.processes import shared_worker
from parity.records import Verdict
from parity.run.chains import hand_settings, legal_split, stage_limits
from parity.run.contained import run_case
from parity.run.explain import explain_outcome
from parity.run.runner import Runner, known_model, pool_limits
from parity.suites.states import check_handoff, tokens_for
from parity.suites.suite import crowd_case, pinned_splits
from scheduler.engine import PAD_ROW, Call, EngineFailure
from scheduler.limits import Sharing


def crowd(family: str, place: int = 0) -> Any:
    return crowd_case(family, pinned_splits(family)[place], 0)


# -- refused before llama.cpp


@pytest.fixture
def no_llama(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails the test at the first model or context."""

    def touched(*_: object, **__: object) -> None:
        raise AssertionError("llama.cpp was called")

    monkeypatch.setattr(stages_stage, "LlamaModel", touched)
    monkeypatch.setattr(stages_stage, "PoolContext", touched)
    monkeypatch.setattr("parity.engines.llama.library", touched)


@pytest.mark.family_qwen3next
@pytest.mark.usefixtures("no_llama")
def test_stage_of_recurrent_layers_only_is_refused_before_llama_cpp() -> None:
    case = replace(crowd("qwen3next"), split="4,7", stage_cells=())

    with pytest.raises(UsageError, match=r"not legal: stage 1 \(layers 4:7\) has recurrent layers only"):
        Runner().run(case, ROW)


@pytest.mark.family_qwen3next
def test_refusal_of_an_illegal_split_comes_out_of_the_worker() -> None:
    with pytest.raises(UsageError, match="recurrent layers only"):
        run_case(replace(crowd("qwen3next"), split="4,7", stage_cells=()), profile=ROW)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"split": "sevenths"}, "no split 'sevenths'.*its splits are halves, thirds, uneven_four"),
        ({"split": "4,2"}, "boundaries 4,2 cut no model of 6 layers"),
        ({"split": "3,9"}, "boundaries 3,9 cut no model of 6 layers"),
        ({"stage_cells": (300,)}, "stage_cells .300. in case: split .* has 2 stages"),
        ({"stage_cells": (300, 0)}, "stage_cells"),
        ({"split": None}, "stage_cells"),
    ],
    ids=["unknown", "unordered", "outside", "too few pools", "empty pool", "pools without a split"],
)
@pytest.mark.family_llama
@pytest.mark.usefixtures("no_llama")
def test_unusable_split_is_refused_with_the_reason(change: dict, message: str) -> None:
    case = replace(crowd("llama"), **change)

    with pytest.raises(UsageError, match=message):
        run_case(case, profile=ROW) if case.split is None else Runner().run(case, ROW)


# -- hand-off


def test_layout_of_ggml_tensors_is_measured_not_assumed() -> None:
    layout = ggml_layout()

    assert 0 < layout.scale_offset < layout.name_offset < 400
    assert layout is ggml_layout()


@pytest.mark.family_llama
def test_stage_whose_last_layer_is_not_in_the_graph_fails_by_name() -> None:
    first, *_ = hand_settings(resolve_model("llama"), load_family("llama"), "halves")

    with pytest.raises(EngineFailure, match=r"stage 0 \(layers 0:4\): handed over 0 hidden states of 1 rows"):
        with hand_driver([replace(first, stop=first.stop + 1)]):
            pass


@pytest.mark.family_llama
def test_error_inside_the_callback_reaches_the_caller() -> None:
    stage = Stage(hand_settings(resolve_model("llama"), load_family("llama"), "halves")[0])
    try:
        stage.tap.rows = stage.tap.rows[
            :1
        ]  # too small for what is captured: the copy inside the callback fails
        stage.pool.context.decode_rows([5, 6], [0, 1], [[1], [1]], [1, 1])
        with pytest.raises(RuntimeError, match="hidden states could not be read: 512 bytes after 0 rows"):
            stage.tap.take()
    finally:
        stage.close()


def test_hidden_rows_are_read_by_batch_row_and_never_before_they_were_given() -> None:
    handed = HiddenRows(4, 2)
    handed.give((3, PAD_ROW, 1), np.array([[3, 3], [9, 9], [1, 1]], np.float32))

    assert handed.take((1, PAD_ROW, 3)).tolist() == [[1, 1], [0, 0], [3, 3]]
    assert not handed.has((0, 1))
    with pytest.raises(EngineFailure, match=r"batch rows \[0, 2\] were not handed over"):
        handed.take((0, 1, 2))


def test_calls_outside_unified_are_cut_into_groups_that_llama_cpp_keeps_in_order() -> None:
    call = Call((), (0, 1, 2, 3, 4, 5), (7, 4, 4, 2, 9, 9), (-1,) * 6)

    parts = equal_length_parts(call)

    assert [(part.rows, part.seq_ids) for part in parts] == [
        ((3, 0), (2, 7)),
        ((1, 2), (4, 4)),
        ((4, 5), (9, 9)),
    ]


@pytest.mark.family_gemma2
@pytest.mark.parametrize("split", ["1", "2"])
def test_handoff_is_exact_where_the_scale_is_no_power_of_two(split: str) -> None:
    report = shared_worker(()).call(
        "parity.suites.states:check_handoff_here", {"model": "gemma2:odd_scale", "split": split}
    )
    assert report["differing"] == [] and report["rows"] > 300

    outcome = run_case(
        replace(crowd("gemma2"), model="gemma2:odd_scale", split=split, stage_cells=()), profile=ROW
    )
    assert outcome.verdict is Verdict.PASS, explain_outcome(outcome)
    assert outcome.bit_identical == outcome.sessions >= 15


@pytest.mark.family_gemma2
def test_dividing_by_the_scale_would_not_be_exact() -> None:
    """Why states enter behind the scale: some of those that occur have no float32
    that the scale maps onto them.
    """
    settings = hand_settings(resolve_model("gemma2:odd_scale"), load_family("gemma2"), "2")
    with hand_driver(settings) as chain:
        states = chain.hidden(1, tokens_for("odd scale", 100), 0)[0]
    scale = np.sqrt(np.float32(144))
    quotient = states / scale
    neighbours = [
        quotient,
        np.nextafter(quotient, np.float32(np.inf)),
        np.nextafter(quotient, np.float32(-np.inf)),
    ]
    reachable = np.any([near * scale == states for near in neighbours], axis=0)

    assert ((states / np.float32(8)) * np.float32(8) == states).all()  # a power of two undoes itself
    assert (quotient * scale != states).mean() > 0.01
    assert (~reachable).mean() > 0.01


@pytest.mark.family_gemma2
def test_wrong_chain_is_noticed_by_the_handoff_check() -> None:
    report = check_handoff(
        "gemma2", "halves", prepare=lambda chain: [replace(stage, embedding_scale=1.0) for stage in chain]
    )
    assert len(report.differing) == 4
    assert (
        report.differing[0].startswith("prompt of 1 tokens")
        and "the first is prompt token 0" in report.differing[0]
    )


# -- pools and ceilings


@pytest.mark.family_llama
def test_small_stage_is_the_back_pressure_point_and_nothing_fails() -> None:
    """Contexts are hardly larger than the pools, so that llama.cpp itself would refuse
    what the small stage can't hold.
    """
    runner = Runner()
    runner.chains.tight_contexts = True
    case = replace(crowd("llama", 1), stage_cells=(1900, 1900, 120))
    family, file = load_family("llama"), known_model(case.model)
    engine = runner.engine(case, file, family, ROW)
    assert [stage.pool.settings.n_ctx for stage in engine.stages] == [2048, 2048, 256]

    attempt = runner.attempt(case, engine, family, ROW, file)
    outcome = runner.run(case, ROW)
    runner.chains.close()

    assert outcome.verdict is Verdict.PASS, explain_outcome(outcome)
    assert outcome.marks["engine_failed"] == outcome.marks["refused"] == 0
    assert len(attempt.completions) == len(case.sessions)
    assert max(record.cells_available for record in attempt.records) <= 120
    assert max(record.cells_used for record in attempt.records) <= 120  # of the first stage, which has 1900
    assert max(record.waiting for record in attempt.records) > 5


@pytest.mark.family_llama
def test_session_that_the_smallest_stage_cannot_hold_is_refused_with_the_numbers() -> None:
    case = replace(crowd("llama", 1), stage_cells=(1900, 50, 1900))
    longest = max(len(session.prompt) + session.max_tokens - 1 for session in case.sessions)
    assert longest > 50

    runner = Runner()
    family, file = load_family("llama"), known_model(case.model)
    run = runner.attempt(case, runner.engine(case, file, family, ROW), family, ROW, file)
    runner.chains.close()

    assert run.refusals and not run.problems
    assert all(r.available == 50 and r.needed > 50 and not r.retryable for r in run.refusals.values())


@pytest.mark.parametrize("family", family_params())
def test_limits_of_a_stage_follow_its_layers(family: str) -> None:
    known, case = load_family(family), crowd(family)
    legal = legal_split(resolve_model(family), case.split)
    whole = pool_limits(case, known, ROW)

    for limits in stage_limits(legal, whole, (100, 200)[: len(legal.split.stages)]):
        assert limits.recurrent == known.is_hybrid
        assert limits.sharing is (Sharing.WHOLE_STATE if known.is_hybrid else Sharing.POSITIONAL)
    for stage in hand_settings(resolve_model(family), known, case.split):
        assert stage.shadow == known.needs_shadow
