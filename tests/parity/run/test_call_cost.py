"""What a call costs, fitted and remembered, and the number of shards that follows; values by hand."""

from __future__ import annotations

import json
from dataclasses import astuple

import pytest

from parity.run import call_cost
from parity.run.call_cost import CallCost, Sample, cost_of, fit, samples_here
from parity.run.profiles import profile_of

# 100 us a call, 10 us a row, 0.2 us a cell that it sees, 0.1 us a row and cell.
COST = CallCost(100e-6, 10e-6, 0.2e-6, 0.1e-6)


def test_costs_are_found_again_in_what_they_make() -> None:
    samples = [
        Sample(rows, cells, own, 100e-6 + rows * (10e-6 + 0.2e-6 * own + 0.1e-6 * cells))
        for rows in (2, 8, 32)
        for cells in (64, 512, 2048)
        for own in (2, cells // 32)
    ]
    assert astuple(fit(samples)) == pytest.approx(astuple(COST))


def test_no_cost_is_negative() -> None:
    """Wide calls that are cheaper by the row would make a call of no rows cost less than nothing."""
    samples = [
        Sample(2, 64, 2, 1e-5),
        Sample(8, 64, 2, 9e-5),
        Sample(32, 64, 2, 5e-4),
        Sample(32, 2048, 64, 5e-4),
    ]
    assert min(astuple(fit(samples))) >= 0


@pytest.mark.parametrize(
    ("shards", "threads", "step_us"),
    [
        (1, 1, 100 + 32 * (10 + 10 + 0.1 * 32 * 50)),
        (1, 2, (100 + 32 * (10 + 10 + 0.1 * 32 * 50)) / 2),  # both threads in one call
        (2, 2, 100 + 16 * (10 + 10 + 0.1 * 16 * 50)),  # side by side, one thread each
        (4, 2, 2 * (100 + 8 * (10 + 10 + 0.1 * 8 * 50))),  # two turns
        (3, 1, 3 * (100 + 11 * (10 + 10 + 0.1 * 11 * 50))),  # the fullest has 11 of 32
    ],
)
def test_a_step_takes_as_long_as_the_turns_of_its_fullest_shard(
    shards: int, threads: int, step_us: float
) -> None:
    found = COST.step_s(sessions=32, cells=50, shards=shards, threads=threads, call_rows=63)
    assert found * 1e6 == pytest.approx(step_us)


def test_rows_beyond_a_call_take_another_one() -> None:
    found = COST.step_s(sessions=100, cells=1, shards=1, threads=1, call_rows=63)
    assert found * 1e6 == pytest.approx(2 * 100 + 100 * (10 + 0.2 + 0.1 * 100))


@pytest.mark.parametrize(
    ("sessions", "cells", "most", "expected"),
    [
        (32, 50, 32, 8),  # 32 * sqrt(0.1 * 50 / 100) = 7.2; of 7 the fullest has 5, of 8 it has 4
        (32, 50, 4, 4),
        (1, 5000, 32, 1),
        (32, 0, 32, 1),  # nothing to walk: a call is only overhead
    ],
)
def test_the_best_number_is_about_the_root(sessions: int, cells: int, most: int, expected: int) -> None:
    found = COST.best_shards(sessions=sessions, cells=cells, threads=1, most=most, call_rows=63)
    assert found == expected


def test_a_call_is_measured_once_and_remembered(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    monkeypatch.setenv("SAMEBYTES_CACHE", str(tmp_path))
    choice = profile_of("llama")
    monkeypatch.setattr(call_cost, "profile_of", lambda model: choice)
    other = CallCost(1.0, 1.0, 1.0, 1.0)
    made = iter([COST, other])
    monkeypatch.setattr(call_cost, "measure", lambda model: next(made))
    cost_of.cache_clear()
    assert cost_of("llama") == COST
    cost_of.cache_clear()
    assert cost_of("llama") == COST
    assert cost_of("llama", again=True) == other
    cost_of.cache_clear()


def test_calls_of_a_real_model_are_measured_over_growing_pools() -> None:
    """In this process: 2 and 16 cells a sequence are 64 and 512 in all, each repeat leaves its rows behind,
    and with 512 in use the second time a row sees 2 and one sequence has the rest.
    """
    arguments = {"model": "llama", "profile": profile_of("llama").profile.to_json()}
    samples = json.loads(json.dumps(samples_here(arguments)))["samples"]
    assert [sample[0] for sample in samples[:9]] == [2, 8, 32] * 3
    for index, (cells, own) in enumerate([(64, 2), (512, 16), (512, 2)]):
        _, used, seen, seconds = samples[3 * index]
        assert cells <= used <= cells + 4 * 2 and own <= seen <= own + 4 and seconds > 0
