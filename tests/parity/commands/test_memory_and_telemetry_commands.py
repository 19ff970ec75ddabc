"""explain-memory, telemetry, churn, endurance, doctor: figures add up, and bad input costs one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from parity.bench import scheduler_alone
from parity.bench.scheduler_alone import run_churn, run_endurance, run_small_cases, step_microseconds
from parity.commands import endurance
from parity.commands.churn import command as churn
from parity.commands.doctor import command as doctor
from parity.commands.explain_memory import command as explain_memory
from parity.commands.telemetry import command as telemetry
from parity.errors import ExitCode, UsageError
from parity.models import resolve_model
from parity.models.facts import read_facts
from parity.models.memory import Assumptions, binding_component, model_components
from parity.plugin import family_params
from parity.run.profiles import profile_of
from parity.telemetry import Totals, read_steps, step_log
from scheduler.memory import Memory
from tests.scheduler.serving import Serving, request


def run(command: Any, *arguments: str) -> str:
    result = CliRunner().invoke(command, arguments, standalone_mode=False, catch_exceptions=False)
    return result.output


def assumed(**change: Any) -> Assumptions:
    return Assumptions(
        **{"pool_cells": 1024, "floor_tokens": 64, "num_sequences": 64, "reserved_ids": 10, **change}
    )


@pytest.mark.parametrize("family", family_params())
def test_components_of_stages_add_up_to_those_of_the_whole_model(family: str) -> None:
    facts = read_facts(resolve_model(family).path)
    whole, halves = (model_components(facts, assumed(), cuts) for cuts in ((), (facts.n_layer // 2,)))
    for name in {component.name for component in whole}:
        parts = [component for component in halves if component.name == name]
        assert sum(part.unit_bytes for part in parts) == sum(c.unit_bytes for c in whole if c.name == name)
    assert {c.name: c.sessions for c in whole} == {
        c.name: min(h.sessions for h in halves if h.name == c.name) for c in whole
    }


def test_each_component_can_bind() -> None:
    facts = read_facts(resolve_model("qwen3next").path)
    slot = facts.slot_bytes()
    for change, name, sessions in (
        ({"floor_tokens": 512}, "attention cells", 2),
        ({"floor_tokens": 1, "num_sequences": 20}, "recurrent slots", 10),
        ({"floor_tokens": 1, "state_budget_bytes": 15 * slot}, "recurrent slots", 5),
    ):
        binding = binding_component(model_components(facts, assumed(**change)))
        assert (binding.name, binding.sessions) == (name, sessions)
    dense = read_facts(resolve_model("llama").path)
    binding = binding_component(
        model_components(dense, assumed(floor_tokens=1, num_sequences=256, reserved_ids=0))
    )
    assert (binding.name, binding.sessions) == ("sequence ids", 256)


def test_explanation_names_bytes_ceiling_and_what_binds_it() -> None:
    facts = read_facts(resolve_model("gemma2").path)
    text = run(explain_memory, "gemma2", "--cells", "1000", "--floor", "100")
    assert f"{1000 * facts.window_cell_bytes('f16'):,}" in text
    assert "ceiling: 10 sessions in flight, bound by the attention cells" in text
    assert "2 a session" in text, "every token of gemma2 is decoded under two ids"


def test_shards_divide_the_cells_and_each_rounds_down() -> None:
    """4000 cells hold 15 sessions of 256; four pools of 1000 hold 3 each."""
    text = run(explain_memory, "llama", "--cells", "4000", "--shards", "4")
    assert "each of 4 shards" in text and "1000 cells // 256 tokens a session" in text
    assert "in all 3,072,000 bytes" in text  # 768 bytes a cell, 4 * 1000 of them
    assert "ceiling: 12 sessions in flight, bound by the attention cells of each of 4 shards" in text


@pytest.mark.parametrize("bad", [{"floor_tokens": 2000}, {"num_sequences": 257}, {"floor_tokens": 0}])
def test_impossible_assumptions_cost_one_line(bad: dict) -> None:
    with pytest.raises(UsageError):
        assumed(**bad)


def test_boundaries_outside_the_model_cost_one_line() -> None:
    with pytest.raises(UsageError, match="--split"):
        model_components(read_facts(resolve_model("llama").path), assumed(), (3, 3))


@pytest.fixture
def recorded(tmp_path: Path) -> tuple[Path, Serving]:
    serving = Serving(cells=40, prefix_block_tokens=4)
    serving.submit(*[request(f"s{i}", 7, 6) for i in range(5)])
    serving.step(3)
    serving.scheduler.preempt("s0", serving.now_ms)
    serving.run()
    path = tmp_path / "steps.jsonl"
    path.write_text("".join(record.to_json() + "\n" for record in serving.records))
    return path, serving


def test_telemetry_read_back_gives_the_same_totals(recorded: tuple[Path, Serving]) -> None:
    path, serving = recorded
    totals = Totals(read_steps(path)).as_dict()
    assert totals == serving.totals.as_dict()
    assert totals["prefill_tokens"] + totals["decode_tokens"] == sum(
        r.num_rows for r in serving.requests.values()
    )
    assert totals["recompute_tokens"] > 0 and totals["cells_used"] <= 40
    assert json.loads(run(telemetry, str(path))) == totals


def test_cells_of_what_has_ended_are_counted_until_they_are_used_again() -> None:
    serving = Serving(cells=40)
    serving.submit(request("short", 7, 1), request("long", 7, 6))
    serving.step(2)
    record = serving.records[-1]
    assert (record.cells_retired, record.ids_retired) == (7, 1)
    serving.run()
    assert serving.scheduler.memory.counts().cells_retired == 0


def test_step_log_is_on_disk_after_each_step_and_a_full_disk_ends_it_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    serving = Serving(cells=40)
    serving.submit(request("s", 7, 6))
    serving.run()
    path = tmp_path / "steps.jsonl"
    with step_log(path) as write:
        for count, record in enumerate(serving.records, 1):
            write(record)
            assert len(read_steps(path)) == count
    with step_log(Path("/dev/full")) as write:
        write(serving.records[0])
        write(serving.records[1])
    assert capsys.readouterr().err.count("telemetry ends here") == 1


@pytest.mark.parametrize(("name", "magic"), [("a.png", b"\x89PNG"), ("a.svg", b"<?xml")])
def test_telemetry_is_plotted(name: str, magic: bytes, recorded: tuple[Path, Serving]) -> None:
    path, serving = recorded
    out = path.parent / name
    assert f"{len(serving.records)} steps" in run(telemetry, str(path), "--out", str(out))
    assert out.read_bytes().startswith(magic)


@pytest.mark.parametrize(
    ("text", "part"),
    [("", "no step record"), ("{}\n", "it lacks step"), ("x\n", ":1"), ("[]\n", "not a step record")],
)
def test_telemetry_that_is_none_costs_one_line(text: str, part: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(text)
    with pytest.raises(UsageError, match=part):
        read_steps(path)


def test_picture_of_an_unknown_kind_costs_one_line(recorded: tuple[Path, Serving]) -> None:
    with pytest.raises(UsageError, match=r"\.png or \.svg"):
        run(telemetry, str(recorded[0]), "--out", "a.gif")


CHURN = {"requests": 60, "num_cells": 1024, "rows": (8, 64)}


@pytest.mark.parametrize("share", [0.5, 0.8, 0.95])
def test_admission_that_reserves_rows_to_come_rebuilds_nothing(share: float) -> None:
    assert run_churn(share, reserving=True, **CHURN).rebuild_rate == 0


def test_cutting_the_last_rows_rebuilds_less_than_half_of_what_whole_rebuilds_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cut = run_churn(0.95, reserving=False, **CHURN)
    monkeypatch.setattr(Memory, "shorten", lambda self, view, available: 0)
    whole = run_churn(0.95, reserving=False, **CHURN)
    assert cut.rebuild_rate < whole.rebuild_rate / 2
    assert cut.occupancy > whole.occupancy


def test_churn_prints_one_object_a_line() -> None:
    text = run(churn, "--requests", "20", "--cells", "1024", "--occupancy", "0.5", "--json")
    line = json.loads(text.splitlines()[0])
    assert (line["admission"], line["rebuild_rate"]) == ("reserving", 0)


def test_long_run_leaves_nothing_behind() -> None:
    endured = run_endurance(3000, check_every=10)
    assert endured.requests == 3000 and endured.checked == 300
    assert endured.grown_blocks < 4000


def test_step_cost_is_that_of_its_steps_with_everything_still_running(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    records = []

    class Watched(scheduler_alone.Scheduler):
        def step(self, now_ms: float) -> Any:
            records.append(super().step(now_ms))
            return records[-1]

    monkeypatch.setattr(scheduler_alone, "Scheduler", Watched)
    step_microseconds(running=5, waiting=3, steps=20)
    first, *measured = records
    assert first.prefill_tokens == 5 * 4 and len(measured) == 20
    for record in measured:
        assert (record.running, record.waiting, record.decode_tokens, record.finished) == (5, 3, 5, 0)


def endurance_verdicts(*arguments: str) -> tuple[ExitCode, list[str]]:
    """Exit code, and the last word of every line that is judged."""
    result = CliRunner().invoke(endurance.command, arguments, standalone_mode=False, catch_exceptions=False)
    words = [line.rsplit(": ", 1)[-1] for line in result.output.splitlines()]
    return result.return_value, [word for word in words if word in ("pass", "fail")]


@pytest.mark.parametrize(
    ("figures", "verdicts"),
    [
        ({}, ["pass", "pass", "pass"]),
        ({"seconds": 0.61}, ["fail", "pass", "pass"]),
        ({"long": 121.0}, ["pass", "fail", "pass"]),
        ({"grown": 4001}, ["pass", "pass", "fail"]),
    ],
)
def test_endurance_judges_every_figure_and_fails_with_one(
    figures: dict[str, float], verdicts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    figures = {"seconds": 0.59, "long": 119.0, "grown": 4000, **figures}
    monkeypatch.setattr(endurance, "run_small_cases", lambda cases: figures["seconds"])
    monkeypatch.setattr(
        endurance,
        "step_microseconds",
        lambda running, waiting: figures["long"] if waiting > 1000 else 100.0,
    )
    run_of = scheduler_alone.Endurance(1000, 10, 1.0, 1, figures["grown"])
    monkeypatch.setattr(endurance, "run_endurance", lambda requests, report: run_of)
    code, found = endurance_verdicts("--cases", "100")
    assert found == verdicts
    assert code is (ExitCode.FAIL if "fail" in verdicts else ExitCode.PASS)


def test_endurance_really_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endurance, "LONG_QUEUE", 500)
    code, found = endurance_verdicts("--requests", "200", "--cases", "20")
    assert len(found) == 3 and code is (ExitCode.FAIL if "fail" in found else ExitCode.PASS)


def test_doctor_names_the_exact_profile_of_a_good_model() -> None:
    result = CliRunner().invoke(doctor, ["llama"], standalone_mode=False, catch_exceptions=False)
    assert result.return_value is ExitCode.PASS
    chosen = profile_of("llama").profile
    assert f"exact: {chosen.name}\n" in result.output and f"{chosen.name} (chosen)" in result.output


def test_small_cases_equal_their_solo_answers() -> None:
    assert run_small_cases(50) > 0
