"""Results are compared at equal coordinates only, and a refusal names the coordinate."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from parity.bench.coordinates import Coordinates, are_comparable, differences
from parity.bench.summary import Goodput
from parity.bench.sweep import Point, SweepOptions, coordinates_of
from parity.bench.workload import Lengths, Workload
from parity.commands.compare import command
from parity.errors import ExitCode, UsageError
from scheduler.records import ServiceLevel

BASE = Coordinates(
    model="abc",
    hardware={"cpu": "x", "threads": 1},
    workload={"name": "short/long", "seed": 0},
    baseline=None,
    metric={"latencies": ["p99_ttft_ms"]},
    slo={"ttft_ms": None, "tbt_ms": None},
    load={"concurrency": 8},
    evidence="measured in process",
)
OTHER = {
    "model": "abd",
    "hardware": {"cpu": "x", "threads": 2},
    "workload": {"name": "short/long", "seed": 1},
    "baseline": "single_lane",
    "metric": {"latencies": ["p95_ttft_ms"]},
    "slo": {"ttft_ms": 5.0, "tbt_ms": None},
    "load": {"concurrency": 16},
    "evidence": "measured over HTTP",
}


def saved(path: Path, *rows: tuple[Coordinates, float]) -> Path:
    data = [{"output_throughput": value, "coordinates": asdict(found)} for found, value in rows]
    path.write_text(json.dumps({"rows": data}))
    return path


def compare(first: Path, second: Path) -> Any:
    return CliRunner().invoke(
        command, [str(first), str(second)], standalone_mode=False, catch_exceptions=False
    )


def test_equal_coordinates_are_comparable() -> None:
    assert are_comparable(BASE, replace(BASE))


@pytest.mark.parametrize("name", OTHER)
def test_one_coordinate_that_differs_is_enough_and_is_named(name: str, tmp_path: Path) -> None:
    other = replace(BASE, **{name: OTHER[name]})
    assert not are_comparable(BASE, other)
    assert [said.split(" ")[0] for said in differences(BASE, other)] == [name]
    files = saved(tmp_path / "a.json", (BASE, 1.0)), saved(tmp_path / "b.json", (other, 2.0))
    with pytest.raises(UsageError, match=f"not comparable.*{name} differs: ") as refused:
        compare(*files)
    assert "\n" not in refused.value.line


def test_a_difference_says_the_part_and_both_values() -> None:
    other = replace(BASE, hardware={"cpu": "x", "threads": 2})
    assert [*differences(BASE, other)] == ["hardware differs: threads 1 and 2"]


def test_comparable_rows_are_shown_side_by_side_whatever_their_order(tmp_path: Path) -> None:
    wide = replace(BASE, load={"concurrency": 16})
    first = saved(tmp_path / "a.json", (BASE, 2.0), (wide, 4.0))
    second = saved(tmp_path / "b.json", (wide, 5.0), (BASE, 3.0))
    result = compare(first, second)
    assert result.return_value is ExitCode.PASS
    assert "2 rows at equal coordinates" in result.output
    assert "1.5" in result.output and "1.25" in result.output


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"rows": 3}', '{"rows": [{}]}', '{"rows": []}'])
def test_a_file_without_results_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(UsageError):
        compare(tmp_path / "a.json", saved(tmp_path / "b.json", (BASE, 1.0)))


def test_a_bench_row_carries_its_workload_load_objectives_and_metric() -> None:
    workload = Workload(
        name="w",
        lengths=Lengths(input_len=4, output_len=2),
        num_prompts=5,
        clients=2,
        slo=ServiceLevel(ttft_ms=5.0),
    )
    options = SweepOptions(
        target={}, goodput=Goodput(ttft_ms=9.0), metrics=("ttft",), percentiles=(99,), held_for={"model": "m"}
    )
    found = Coordinates(**coordinates_of(Point(workload=workload, concurrency=3), options))
    assert (found.model, found.slo, found.load["concurrency"]) == ("m", {"ttft_ms": 5.0, "tbt_ms": None}, 3)
    assert found.workload["clients"] == 2 and found.workload["lengths"]["input_len"] == 4
    assert found.metric["latencies"] == ["p99_ttft_ms"] and found.metric["goodput"]["ttft_ms"] == 9.0
    other = Coordinates(**coordinates_of(Point(workload=workload, request_rate=3.0), options))
    assert [said.split(" ")[0] for said in differences(found, other)] == ["load"]
