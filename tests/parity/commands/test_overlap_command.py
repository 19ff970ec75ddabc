"""``parity overlap`` measures what it says: both ways in turns, the same tokens, and shares by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from parity.bench.overlap import ChainRun, OverlapRow, idle_share
from parity.commands.overlap import command
from parity.errors import ExitCode, UsageError
from parity.telemetry import Totals
from scheduler.pipeline import Pipeline
from tests.scheduler.serving import Serving, request


@pytest.mark.family_llama
def test_command_runs_both_ways_and_writes_json(tmp_path: Path) -> None:
    out = tmp_path / "overlap.json"
    arguments = ["llama", "--split", "thirds", "--sessions", "3", "--rounds", "1", "--output-len", "4"]

    result = CliRunner().invoke(command, [*arguments, "--json", str(out)], standalone_mode=False)

    assert result.return_value is ExitCode.PASS, result.output
    (row,) = json.loads(out.read_text())
    assert (row["model"], row["split"], row["stages"], row["sessions"]) == ("llama", "thirds", 3, 3)
    one, three = row["output_throughput_1"]["median"], row["output_throughput_3"]["median"]
    assert row["ratio"]["median"] == pytest.approx(three / one)
    assert 0 < row["idle_share_3"] < 1 and 0 < row["bubble_share_3"] < 1 and row["bubble_share_1"] < 0.5
    assert "thirds" in result.output and "tokens/s" in result.output


def test_unknown_split_is_bad_input() -> None:
    with pytest.raises(UsageError, match="no split 'sevenths'"):
        CliRunner().invoke(
            command, ["llama", "--split", "sevenths"], standalone_mode=False, catch_exceptions=False
        )


def test_idle_share_is_what_the_stages_did_not_use() -> None:
    """Two stages for 10 s, busy for 4 and 8 s: 8 of 20 stage seconds are idle."""
    assert idle_share([4.0, 8.0], 10.0) == pytest.approx(0.4)


def test_ratios_are_taken_round_by_round() -> None:
    def runs(depth: int, *throughputs: float) -> tuple[ChainRun, ...]:
        return tuple(
            ChainRun(steps_in_flight=depth, output_throughput=each, idle_share=0.5, bubble_share=0.1)
            for each in throughputs
        )

    row = OverlapRow(
        model="m",
        split="s",
        stages=2,
        sessions=4,
        single=runs(1, 100.0, 50.0, 80.0),
        several=runs(2, 150.0, 100.0, 80.0),
    )
    assert row.ratios == [1.5, 2.0, 1.0]
    assert row.as_dict()["ratio"] == {"median": 1.5, "min": 1.0, "max": 2.0}
    assert row.as_dict()["output_throughput_2"] == {"median": 100.0, "min": 80.0, "max": 150.0}


@pytest.mark.parametrize(
    ("sessions", "depth", "launches", "bubbles"),
    [
        # One session, three tokens: its prompt and two rows, and a step without rows behind each, because its
        # next row needs the token: six launches with two places, one of them empty at each.
        (1, 2, 6, 6),
        # Two sessions in turns, a b a b a b: one place is empty at the first launch, and at the last one, of
        # the step without rows behind the last row of b.
        (2, 2, 7, 2),
        # One step in flight: its only place is filled at each of three launches.
        (2, 1, 3, 0),
    ],
)
def test_bubbles_are_places_without_rows_at_a_launch(
    sessions: int, depth: int, launches: int, bubbles: int
) -> None:
    serving, totals = Serving(steps_in_flight=depth, prefix_cache=False), Totals()
    serving.submit(*(request(name, 2, 3) for name in "ab"[:sessions]))
    pipeline = Pipeline(serving.scheduler, serving.engine, depth=depth)
    while not serving.scheduler.is_idle:
        pipeline.begin(0.0)
        pipeline.launch()
        for done in pipeline.complete() if pipeline.must_complete else ():
            totals.add(done.record.as_dict())
    assert totals.steps == launches
    assert totals.values["pipeline_places"] == launches * depth
    assert totals.values["pipeline_bubbles"] == bubbles
    assert totals.bubble_share == pytest.approx(bubbles / (launches * depth))
