"""Hostile command lines: one line and a code of the table, never a traceback."""

from __future__ import annotations

from pathlib import Path

import click
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from parity.cli import commands, main
from parity.errors import ExitCode, OneLine

ODD = (
    *("", " ", "-", "--", "-1", "0", "1e999", "nan", "9" * 400, "x" * 5000, "\udcff", "\u2603"),
    *("nobody", "llama:nobody", "gemma2:", ":", "/", "/dev/null", "/dev/zero", "/proc/self/mem", "."),
    *("a=b", "=", "1/0", "http://", "dask://", "..", "no.gguf", "/etc/passwd", "0:1", "5:2", "--help"),
)


@st.composite
def command_lines(draw: st.DrawFn) -> list[str]:
    """A command and up to four options or arguments with odd values."""
    name = draw(st.sampled_from(commands.list_commands(None)))
    parameters = commands.get_command(None, name).params
    line = [name]
    for _ in range(draw(st.integers(0, 4))):
        parameter = draw(st.sampled_from(parameters))
        if isinstance(parameter, click.Option):
            line.append(draw(st.sampled_from(parameter.opts)))
        line.append(draw(st.sampled_from(ODD)))
    return line


@settings(max_examples=500, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(command_lines())
def test_hostile_command_line_is_read_or_refused(line: list[str]) -> None:
    try:
        commands.get_command(None, line[0]).make_context(line[0], line[1:])
    except (click.ClickException, click.exceptions.Exit, OneLine):
        pass


@pytest.mark.parametrize("value", ODD)
@pytest.mark.parametrize("name", ["replay", "bisect", "trace", "telemetry", "slice", "explain-memory"])
def test_hostile_argument_costs_one_line(
    name: str, value: str, capsys: pytest.CaptureFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    more = {"trace": ["--html", "o.html"], "slice": ["--layers", "0:1", "--out", "o.gguf"]}.get(name, [])
    with pytest.raises(SystemExit) as end:
        main([name, *more, "--", value])
    complaint = capsys.readouterr().err

    assert "Traceback" not in complaint and complaint.count("\n") <= 1
    assert end.value.code in (ExitCode.USAGE, ExitCode.PASS)
