"""The picture of a run holds what the run's history holds, in one page that asks nobody for anything."""

from __future__ import annotations

import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner

from parity.cases.strategies import landmark
from parity.cli import main
from parity.commands.trace import command
from parity.errors import ExitCode, UsageError
from parity.history import Run
from parity.mutants.in_shards import in_two_shards
from parity.records import Fault, FaultKind
from parity.report.history import TraceView, trace_of, view_of_exact_run
from parity.report.timeline import draw_trace
from parity.run.runner import drive_exact, exact_engine, replay
from parity.suites.policies import busy_case
from scheduler.limits import Layout

FAULTS = (
    Fault(kind=FaultKind.DECODE_ERROR, step=17),
    Fault(kind=FaultKind.CANCEL, step=15, session=4),
    Fault(kind=FaultKind.PREEMPT, step=8, session=1),
)


@pytest.fixture(scope="module")
def busy() -> tuple[Run, TraceView]:
    """A run with shares, preemptions, a cancel and a failed step, and its picture's data."""
    run = replay(busy_case("vllm_priority", faults=FAULTS)).run
    return run, trace_of(run, engine="exact")


def test_every_planned_chunk_is_one_bar_of_its_phase(busy: tuple[Run, TraceView]) -> None:
    run, view = busy
    planned = [
        (traced.step, chunk.request_id, chunk.start, chunk.stop)
        for traced in run.trace
        for chunk in traced.flight.plan.chunks
    ]
    assert [(bar.step, f"s{bar.session}", bar.start, bar.stop) for bar in view.bars] == planned
    assert {bar.phase for bar in view.bars} == {"prefill", "decode", "rebuild"}


def test_bars_of_the_failed_step_are_drawn_as_not_completed(busy: tuple[Run, TraceView]) -> None:
    run, view = busy
    assert {bar.step for bar in view.bars if not bar.completed} == {17}
    assert [gauge.step for gauge in view.gauges if gauge.failed] == [17]


def test_emissions_of_the_picture_are_the_outputs(busy: tuple[Run, TraceView]) -> None:
    run, view = busy
    for lane in view.lanes:
        assert lane.outputs == len(run.completions[lane.session].tokens)
        assert sum(bar.emitted for bar in view.bars if bar.session == lane.session) == lane.outputs


def test_a_lost_session_is_suspended_until_it_computes_its_rows_again(busy: tuple[Run, TraceView]) -> None:
    run, view = busy
    lost = [lane for lane in view.lanes if lane.suspensions]
    assert lost
    for lane in lost:
        for start, stop in lane.suspensions:
            assert not [bar for bar in view.bars if bar.session == lane.session and start <= bar.step < stop]
            assert [bar for bar in view.bars if bar.session == lane.session and bar.step == stop]
    assert {mark.session for mark in view.marks if mark.kind == "preempt"} == {lane.session for lane in lost}


def test_a_share_mark_says_how_many_tokens_came_from_a_prefix(busy: tuple[Run, TraceView]) -> None:
    run, view = busy
    resumed = [(mark.step, mark.session) for mark in view.marks if mark.kind == "resume"]
    shared = [mark for mark in view.marks if mark.kind == "share"]
    first = sum(mark.amount for mark in shared if (mark.step, mark.session) not in resumed)
    assert first == sum(record.prefix_tokens_saved for record in run.records) > 0


def test_gauges_are_the_telemetry(busy: tuple[Run, TraceView]) -> None:
    run, view = busy
    assert [(g.running, g.waiting, g.suspended, g.prefill, g.decode, g.rebuild) for g in view.gauges] == [
        (r.running, r.waiting, r.suspended, r.prefill_tokens, r.decode_tokens, r.recompute_tokens)
        for r in run.records
    ]


def test_data_of_a_picture_survives_json(busy: tuple[Run, TraceView]) -> None:
    _, view = busy
    assert TraceView.from_data(json.loads(json.dumps(view.to_data()))) == view


def test_the_page_is_self_contained_and_its_drawing_is_well_formed(busy: tuple[Run, TraceView]) -> None:
    page = draw_trace(busy[1])
    assert not re.search(r"(?:src|href)\s*=|url\((?!#)|@import|<script|https?:", page)
    svg = re.search(r"<svg.*</svg>", page, re.S).group()
    root = ElementTree.fromstring(svg)
    titles = [title.text for title in root.iter("title")]
    assert sum(bool(re.match(r"step \d+: s\d+ ", title)) for title in titles) == len(busy[1].bars)


def test_names_in_a_case_cannot_break_the_page() -> None:
    case = busy_case("fcfs")
    evil = type(case.sessions[0])(prompt=(1, 2), max_tokens=2, client_id="<script>alert(1)</script>")
    page = draw_trace(view_of_exact_run(type(case)(family="llama", model="llama", sessions=(evil,))))
    assert "<script>" not in page and "&lt;script&gt;" in page


@pytest.mark.parametrize("engine", ["exact", "real"])
def test_command_draws_a_case_on_either_engine(engine: str, tmp_path: Path) -> None:
    file, out = tmp_path / "case.json", tmp_path / "trace.html"
    file.write_text(landmark("qwen3next", Layout.UNIFIED, policy="sarathi_serve").to_json())
    result = CliRunner().invoke(
        command, [str(file), "--html", str(out), "--engine", engine], standalone_mode=False
    )
    assert result.exception is None and result.return_value is ExitCode.PASS
    assert "9 sessions under sarathi_serve" in result.output
    assert ("llama.cpp" if engine == "real" else "exact engine") in out.read_text()


def test_command_runs_a_case_under_another_policy(tmp_path: Path) -> None:
    file, out = tmp_path / "case.json", tmp_path / "trace.html"
    file.write_text(busy_case("fcfs").to_json())
    result = CliRunner().invoke(
        command,
        [str(file), "--html", str(out), "--engine", "exact", "--policy", "orca"],
        standalone_mode=False,
    )
    assert result.return_value is ExitCode.PASS
    assert "<h1>orca</h1>" in out.read_text()


@pytest.mark.parametrize(
    ("text", "options", "said"),
    [
        ("{}", [], "'format' is a required property"),
        (None, [], "case file cannot be read"),
        ("case", ["--policy", "fastest"], "unknown policy .fastest."),
    ],
)
def test_command_says_in_one_line_what_is_wrong(
    text: str | None, options: list[str], said: str, tmp_path: Path
) -> None:
    file = tmp_path / "case.json"
    if text is not None:
        file.write_text(busy_case("fcfs").to_json() if text == "case" else text)
    with pytest.raises(UsageError, match=said):
        CliRunner().invoke(
            command,
            [str(file), "--html", str(tmp_path / "x.html"), "--engine", "exact", *options],
            standalone_mode=False,
            catch_exceptions=False,
        )
    assert callable(main) and not (tmp_path / "x.html").exists()


def test_cells_of_shards_lie_one_above_the_other() -> None:
    """Pools of 60 cells and one for padding: what shard 1 holds is drawn from cell 61 on."""
    case = in_two_shards("llama")
    view = trace_of(drive_exact(case, exact_engine(case)), engine="exact")
    assert view.title.endswith("6 sessions, 2 shards")
    cells = {cell for bar in view.bars for cell in bar.cells}
    assert min(cells) == 1 and 61 <= min(cell for cell in cells if cell > 60) <= 62 and max(cells) <= 121
