"""The README's commands, files and figures exist: what a newcomer types works."""

from __future__ import annotations

import importlib
import re
import shlex

import pytest

from parity.golden.cases import GoldenMode, golden_path
from parity.golden.record import Golden
from parity.models.families import KvClass, load_families
from parity.store import REPOSITORY

TEXT = (REPOSITORY / "README.md").read_text(encoding="utf-8")
LINES = [line.removeprefix("$ ").partition("  #")[0] for line in re.findall(r"^\$ .*", TEXT, re.MULTILINE)]
COMMANDS = [part.strip() for line in LINES for part in line.split("&&")]


@pytest.mark.parametrize("line", COMMANDS)
def test_command_of_the_readme_exists_with_its_options(line: str) -> None:
    program, *words = shlex.split(line)
    if program == "make":
        targets = re.findall(r"^([a-z-]+):", (REPOSITORY / "Makefile").read_text(), re.MULTILINE)
        assert words[0] in targets
    elif program == "parity":
        command = importlib.import_module(f"parity.commands.{words[0].replace('-', '_')}").command
        known = {
            option for parameter in command.params for option in parameter.opts + parameter.secondary_opts
        }
        assert {word for word in words if word.startswith("--")} <= known
    else:
        assert program == "pytest"
        assert all((REPOSITORY / word).exists() for word in words if word.startswith("tests/"))


def test_readme_has_commands() -> None:
    assert len(COMMANDS) >= 15


def test_files_that_the_readme_names_exist() -> None:
    named = re.findall(r"`((?:scheduler|parity|tests|manifests|splits|golden|\.github)/[\w./-]*)`", TEXT)
    assert len(named) >= 8
    assert [path for path in named if not (REPOSITORY / path).exists()] == []


def test_every_family_is_in_the_table() -> None:
    families = load_families()
    assert {family.kv_class for family in families.values()} == set(KvClass)
    for name, family in families.items():
        assert f"| {name} | `{family.marker}` |" in TEXT


def test_pinned_engine_is_the_one_that_the_readme_names() -> None:
    locked = re.search(r"llama-cpp-python==([\d.]+)", (REPOSITORY / "requirements/llama.txt").read_text())[1]
    assert f"llama-cpp-python {locked}" in TEXT


def test_smallest_golden_margin_is_the_one_that_the_readme_names() -> None:
    margins = [
        Golden.from_text(path.read_text(encoding="utf-8"), where=str(path)).margin
        for name in load_families()
        for path in (golden_path(name, mode) for mode in GoldenMode)
    ]
    assert f"margin of all\ngoldens is {min(margins):.2f}," in TEXT


def test_rows_are_as_locked_as_the_readme_says() -> None:
    locked = all(family.row("real").locked for family in load_families().values())
    assert ("are pinned by digests that others published" in TEXT) is locked


def test_readme_leaves_nothing_to_fill_in() -> None:
    assert not re.search(r"@@|TODO|FIXME|XXX", TEXT)
