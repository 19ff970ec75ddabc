"""``parity --help``: every command stands under exactly one heading."""

from __future__ import annotations

import click
from click.testing import CliRunner

from parity.cli import HEADINGS, commands


def test_every_command_stands_under_one_heading() -> None:
    listed = [name for names in HEADINGS.values() for name in names]
    assert sorted(listed) == commands.list_commands(click.Context(commands))


def test_help_shows_the_headings_and_what_each_command_is_for() -> None:
    said = CliRunner().invoke(commands, ["--help"]).output
    for heading, names in HEADINGS.items():
        section = said.split(f"\n{heading}:\n")[1].split("\n\n")[0]
        assert [line.split()[0] for line in section.splitlines()] == list(names)
        assert all(len(line.split()) > 1 for line in section.splitlines())
