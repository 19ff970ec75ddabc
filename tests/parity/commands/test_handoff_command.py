"""``parity handoff`` measures what it says, and refuses what it cannot measure."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from parity.bench.handoff import IN_PROCESS, PROCESSES, UNSPLIT
from parity.commands.handoff import command
from parity.errors import ExitCode, UsageError


@pytest.mark.family_llama
def test_command_measures_every_way_of_one_workload_and_writes_json(tmp_path: Path) -> None:
    out = tmp_path / "handoff.json"
    arguments = ["llama", "--split", "thirds", "--sessions", "2", "--rounds", "1", "--json", str(out)]

    result = CliRunner().invoke(command, arguments, standalone_mode=False)

    assert result.return_value is ExitCode.PASS, result.output
    costs = json.loads(out.read_text())
    assert [cost["how"] for cost in costs] == [UNSPLIT, IN_PROCESS, PROCESSES]
    assert [cost["stages"] for cost in costs] == [1, 3, 3]
    assert {cost["tokens"] for cost in costs} == {2 * (32 + 23)}
    assert [cost["bytes_per_token"] for cost in costs] == [0, 256, 256]
    assert costs[0]["ratio"] == 1.0 and costs[0]["handoff_us"] is None
    for cost in costs[1:]:
        extra = (cost["us_per_token"] - costs[0]["us_per_token"]) / 2
        assert cost["handoff_us"] == pytest.approx(extra) and cost["us_per_token"] > 0
        assert cost["ratio"] == pytest.approx(costs[0]["us_per_token"] / cost["us_per_token"])
    for word in ("a process each", "hand-off", "thirds"):
        assert word in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["llama", "--split", "sevenths"], "no split 'sevenths'"),
        (["llama:wide"], "give boundaries with --split"),
        (["qwen3next", "--split", "4,7"], "recurrent layers only"),
        (["no_model"], "unknown model"),
    ],
)
def test_command_refuses_what_cannot_be_measured(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(command, arguments, standalone_mode=False)

    assert isinstance(result.exception, UsageError)
    assert message in result.exception.line
