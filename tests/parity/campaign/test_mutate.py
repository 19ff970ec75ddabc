"""Mutation testing: the same list for the same seed, killed by what notices, survivors with their patch."""

from __future__ import annotations

import json
import shlex
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from parity.campaign import mutate
from parity.campaign.mutations import Mutation, find_mutations, sample_mutations
from parity.commands.mutate import command
from parity.errors import ExitCode, UsageError

SOURCE = '''\
"""Text with 1 < 2 in it."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import os


def admits(rows: int = 3, free: int = 4) -> bool:
    if rows < free:
        return True
    rows += 1
    raise ValueError(f"{rows + 1} rows")


def key(view):
    views.append(view)
    return (view.priority, view.index)
'''


def changes(source: str) -> list[str]:
    """The added line of every mutation."""
    return [m.patch.splitlines()[-1].removeprefix("+").strip() for m in find_mutations("a.py", source)]


def test_every_operator_applies_where_it_should_and_nowhere_else() -> None:
    assert changes(SOURCE) == [
        "def admits(rows: int = 4, free: int = 4) -> bool:",
        "def admits(rows: int = 2, free: int = 4) -> bool:",
        "def admits(rows: int = 3, free: int = 5) -> bool:",
        "def admits(rows: int = 3, free: int = 3) -> bool:",
        "if not (rows < free):",
        "if rows <= free:",
        "if rows > free:",
        "return False",
        "rows -= 1",
        "rows += 2",
        "rows += 0",
        "pass",
        "return (view.index,)",
        "return (view.priority,)",
    ]


def test_a_change_stays_within_its_lines_whatever_stands_around_it() -> None:
    source = "if (\n    not ä  # why\n    and (b or c)\n):\n    f(\n        1,\n        x[0] < 2,\n    )\n"
    changed = [mutation.source for mutation in find_mutations("a.py", source)]
    assert changed[0] == source.replace("(\n    not ä", "not (not ä").replace("c)\n)", "c))")
    assert changed[1:3] == [source.replace("  # why\n    and", " or"), source.replace("not ä", "(ä)")]
    assert source.replace("x[0] < 2", "x[0] > 2") in changed


def test_equal_lines_at_different_places_are_different_mutations() -> None:
    found = list(find_mutations("a.py", "x = 0\nx += y\nx += y\n"))
    swapped = [m for m in found if m.operator == "arithmetic"]
    assert [m.line for m in swapped] == [2, 3]
    assert len({m.key for m in found}) == len(found)
    moved = [
        m for m in find_mutations("a.py", "z = y\nx = 0\nx += y\nx += y\n") if m.operator == "arithmetic"
    ]
    assert [m.key for m in moved] == [m.key for m in swapped]


def test_a_seed_draws_the_same_list() -> None:
    found = list(find_mutations("a.py", SOURCE))
    first = sample_mutations(found, count=5, seed=1)
    assert first == sample_mutations(found, count=5, seed=1)
    assert len(first) == 5
    assert first != sample_mutations(found, count=5, seed=2)


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small checkout in place of ours: one function and a test that knows half of it."""
    (tmp_path / "small.py").write_text("def admits(rows, free):\n    return rows < free\n")
    (tmp_path / "check.py").write_text(
        "from small import admits\nassert admits(1, 2)\nassert not admits(3, 2)\n"
    )
    monkeypatch.setattr(mutate, "REPOSITORY", tmp_path)
    monkeypatch.setattr(mutate, "tracked_files", lambda: ["small.py", "check.py"])
    return tmp_path


CHECK = f"{shlex.quote(sys.executable)} check.py"


def run(checkout: Path, state: Path, commands: list[str], timeout_s: float = 60.0) -> list[mutate.Judged]:
    mutations = list(find_mutations("small.py", (checkout / "small.py").read_text()))
    seen: list[mutate.Judged] = []
    with ThreadPoolExecutor(1) as pool:
        judged = mutate.run_mutations(
            mutations,
            pool,
            commands=commands,
            jobs=1,
            timeout_s=timeout_s,
            state=state,
            on_judged=seen.append,
        )
    assert {item.key for item in seen} == {item.key for item in judged}
    return judged


def test_what_is_noticed_is_killed_and_the_boundary_survives(checkout: Path, tmp_path: Path) -> None:
    fates = {item.patch.splitlines()[-1]: item for item in run(checkout, tmp_path / "s.jsonl", [CHECK])}
    assert fates["+    return rows > free"].fate is mutate.Fate.KILLED
    assert "AssertionError" in fates["+    return rows > free"].said
    assert fates["+    return rows <= free"].fate is mutate.Fate.SURVIVED
    assert (checkout / "small.py").read_text() == "def admits(rows, free):\n    return rows < free\n"


def test_an_interrupted_run_goes_on_and_tries_survivors_again(checkout: Path, tmp_path: Path) -> None:
    state = tmp_path / "state.jsonl"
    run(checkout, state, [CHECK])
    lines = state.read_text().splitlines()
    state.write_text("\n".join(lines) + '\n{"key": "cut sh')
    (checkout / "check.py").write_text((checkout / "check.py").read_text() + "assert not admits(2, 2)\n")
    judged = run(checkout, state, [CHECK])
    assert {item.fate for item in judged} == {mutate.Fate.KILLED}
    again = [json.loads(line) for line in state.read_text().splitlines()[len(lines) :]]
    assert [item["patch"].splitlines()[-1] for item in again] == ["+    return rows <= free"]


def test_a_hang_is_noticed_and_ended_with_all_that_it_started(checkout: Path, tmp_path: Path) -> None:
    fate, killer, said = mutate.run_commands(checkout, ["cat /dev/zero > /dev/null & wait"], timeout_s=0.2)
    assert (fate, killer, said) == (
        mutate.Fate.TIMEOUT,
        "cat /dev/zero > /dev/null & wait",
        "longer than 0 s",
    )


def test_a_survivor_with_a_reason_is_equivalent(
    checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    survivor = next(
        m for m in find_mutations("small.py", (checkout / "small.py").read_text()) if "<=" in m.patch
    )
    monkeypatch.setattr(mutate, "load_equivalent", lambda: {survivor.key: "nobody asks with equal numbers"})
    judged = {item.key: item for item in run(checkout, tmp_path / "s.jsonl", [CHECK])}
    assert judged[survivor.key].fate is mutate.Fate.EQUIVALENT
    assert judged[survivor.key].said == "nobody asks with equal numbers"


def test_red_without_a_mutation_is_bad_input(checkout: Path) -> None:
    with pytest.raises(UsageError, match="does not pass without a mutation"):
        mutate.measure_baseline(["false"], timeout_s=10.0)


def test_every_equivalent_on_record_has_its_patch_and_reason(tmp_path: Path) -> None:
    mutate.load_equivalent()
    (tmp_path / "e.yaml").write_text("abc: {reason: because}\n")
    with pytest.raises(UsageError, match="no patch or no reason"):
        mutate.load_equivalent(tmp_path / "e.yaml")


def test_the_command_lists_and_refuses(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["scheduler/cells.py", "--tests", "true", "--count", "3", "--list"]
    assert command.main(arguments, standalone_mode=False) is ExitCode.PASS
    first = capsys.readouterr().out
    assert len(first.splitlines()) == 3
    assert command.main(arguments, standalone_mode=False) is ExitCode.PASS
    assert capsys.readouterr().out == first
    with pytest.raises(UsageError, match="no Python file at '../elsewhere'"):
        command.main(["../elsewhere", "--tests", "true"], standalone_mode=False)


def test_the_patch_of_a_mutation_is_what_its_source_says() -> None:
    mutation: Mutation = next(iter(find_mutations("a.py", "x = a < b\n")))
    assert mutation.source == "x = a <= b\n"
    assert mutation.patch.splitlines()[-2:] == ["-x = a < b", "+x = a <= b"]
