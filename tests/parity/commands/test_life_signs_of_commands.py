"""Long work speaks every few seconds, also while one item of it takes long, and keeps what it has."""

from __future__ import annotations

import io
import threading

import pytest
from click.testing import CliRunner
from rich.console import Console

import parity.campaign.hunt
import parity.life_signs
from parity.commands.hunt import command
from parity.errors import ExitCode
from parity.life_signs import LifeSigns


class Log(io.StringIO):
    """A log that says when a line was written to it."""

    def __init__(self) -> None:
        super().__init__()
        self.spoken = threading.Event()

    def write(self, text: str) -> int:
        count = super().write(text)
        if "\n" in text:
            self.spoken.set()
        return count


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Log:
    monkeypatch.setattr(parity.life_signs, "LINE_EVERY_S", 0.01)
    return Log()


def test_a_line_comes_while_one_item_takes_long(log: Log) -> None:
    with LifeSigns("cases", total=20, console=Console(file=log)) as signs:
        signs.update(3, "1 failure")
        log.spoken.clear()
        assert log.spoken.wait(60)
    assert log.getvalue().splitlines()[-1] == "0 s, cases 3 of 20: 1 failure"


def test_items_are_counted_as_they_are_taken(log: Log) -> None:
    with LifeSigns("models", console=Console(file=log)) as signs:
        lines = [signs.line for _ in signs.each(["llama", "gemma2"])]
    assert lines == ["0 s, models 0 of 2: llama", "0 s, models 1 of 2: gemma2"]


def test_nothing_is_said_when_the_work_is_over(log: Log) -> None:
    with LifeSigns("models", console=Console(file=log)):
        assert log.spoken.wait(60)
    said = log.getvalue()
    assert not [thread for thread in threading.enumerate() if thread.name == "life signs"]
    assert log.getvalue() == said


def test_a_terminal_gets_a_bar_and_no_lines() -> None:
    text = io.StringIO()
    with LifeSigns("cases", total=4, console=Console(file=text, force_terminal=True, width=80)) as signs:
        signs.advance("first")
        assert not [thread for thread in threading.enumerate() if thread.name == "life signs"]
    assert "first" in text.getvalue()


def test_an_interrupted_hunt_says_what_it_has_and_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    judge, judged = parity.campaign.hunt.judge_hunted, []

    def interrupted(*arguments: object, **options: object) -> object:
        if len(judged) == 3:
            raise KeyboardInterrupt
        judged.append(arguments)
        return judge(*arguments, **options)

    monkeypatch.setattr(parity.campaign.hunt, "judge_hunted", interrupted)
    result = CliRunner().invoke(command, ["--cases", "9"], standalone_mode=False)
    assert result.return_value is ExitCode.UNKNOWN
    assert "3 cases, 0 failures" in result.output
    assert "not finished: interrupted after 3 of 9 cases" in result.output
