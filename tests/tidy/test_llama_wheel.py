"""The cache of built wheels holds whole wheels of this very machine and build, or nothing."""

from __future__ import annotations

import dataclasses
import importlib
import os
import re
import sys
import threading
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

CI = Path(__file__).resolve().parent.parent.parent / ".ci"


@pytest.fixture
def llama_wheel(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(CI))
    return importlib.import_module("llama_wheel")


@pytest.fixture
def recipe(llama_wheel: ModuleType) -> Any:
    return llama_wheel.Recipe(
        lock_entry="a==1", cmake_flags="-DA=ON", cpu="x", abi="cp311", compilers="gcc 12"
    )


def build_small_wheel(folder: Path) -> Path:
    """A build that succeeds: one small file."""
    (folder / "out").mkdir()
    wheel = folder / "out/a-1-py3-none-any.whl"
    wheel.write_bytes(b"wheel")
    return wheel


def refuse_to_build(folder: Path) -> Path:
    raise AssertionError("built again")


def visible(wheels: Path) -> list[str]:
    """Names in the cache that are not hidden files."""
    return sorted(path.name for path in wheels.iterdir() if not path.name.startswith(".lock-"))


def test_wheel_is_built_once_and_then_taken_from_the_cache(
    llama_wheel: ModuleType, recipe: Any, tmp_path: Path
) -> None:
    built = llama_wheel.take_wheel(tmp_path, recipe=recipe, build=build_small_wheel)
    again = llama_wheel.take_wheel(tmp_path, recipe=recipe, build=refuse_to_build)
    assert built == again == tmp_path / recipe.key / "a-1-py3-none-any.whl"
    assert built.read_bytes() == b"wheel"
    assert visible(tmp_path) == [recipe.key]


def test_failed_build_leaves_nothing(llama_wheel: ModuleType, recipe: Any, tmp_path: Path) -> None:
    def fail_half_way(folder: Path) -> Path:
        build_small_wheel(folder).write_bytes(b"whe")
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        llama_wheel.take_wheel(tmp_path, recipe=recipe, build=fail_half_way)
    assert visible(tmp_path) == []


def test_remains_of_a_killed_build_are_swept_and_never_used(
    llama_wheel: ModuleType, recipe: Any, tmp_path: Path
) -> None:
    remains = tmp_path / f"{llama_wheel.UNFINISHED}{recipe.key}-x"
    remains.mkdir()
    build_small_wheel(remains).write_bytes(b"half")
    wheel = llama_wheel.take_wheel(tmp_path, recipe=recipe, build=build_small_wheel)
    assert wheel.read_bytes() == b"wheel"
    assert visible(tmp_path) == [recipe.key]


@pytest.mark.parametrize("damage", ["truncate", "remove", "receipt"])
def test_damaged_entry_is_built_again(
    damage: str, llama_wheel: ModuleType, recipe: Any, tmp_path: Path
) -> None:
    wheel = llama_wheel.take_wheel(tmp_path, recipe=recipe, build=build_small_wheel)
    if damage == "truncate":
        wheel.write_bytes(b"whe")
    elif damage == "remove":
        wheel.unlink()
    else:
        (wheel.parent / llama_wheel.RECEIPT).write_text("{")
    assert llama_wheel.take_wheel(tmp_path, recipe=recipe, build=build_small_wheel).read_bytes() == b"wheel"


def test_two_setups_at_once_build_once(llama_wheel: ModuleType, recipe: Any, tmp_path: Path) -> None:
    started, builds = threading.Barrier(2), []

    def build(folder: Path) -> Path:
        builds.append(folder)
        return build_small_wheel(folder)

    def take() -> None:
        started.wait()
        llama_wheel.take_wheel(tmp_path, recipe=recipe, build=build)

    threads = [threading.Thread(target=take) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(builds) == 1


def test_key_depends_on_every_field(llama_wheel: ModuleType, recipe: Any) -> None:
    fields = [field.name for field in dataclasses.fields(recipe)]
    keys = {recipe.key, *(dataclasses.replace(recipe, **{name: "other"}).key for name in fields)}
    assert len(keys) == 1 + len(fields)
    assert all(re.fullmatch(r"[0-9a-f]{20}", key) for key in keys)


def test_recipe_turns_llamafile_off_and_covers_the_users_flags(
    llama_wheel: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    lock = tmp_path / "llama.txt"
    lock.write_text("# a comment\nllama-cpp-python==0.3.36 \\\n    --hash=sha256:00\n")
    compilers = llama_wheel.find_compilers()
    monkeypatch.delenv("SAMEBYTES_CMAKE_ARGS", raising=False)
    plain = llama_wheel.plan_recipe(lock, compilers)
    assert plain.cmake_flags == "-DGGML_LLAMAFILE=OFF -DLLAVA_BUILD=OFF"
    assert plain.lock_entry == "llama-cpp-python==0.3.36 \\ --hash=sha256:00"
    assert plain.cpu and plain.abi and plain.compilers.count(" | ") == 1
    monkeypatch.setenv("SAMEBYTES_CMAKE_ARGS", "-DGGML_BLAS=ON")
    assert llama_wheel.plan_recipe(lock, compilers).cmake_flags.endswith("-DLLAVA_BUILD=OFF -DGGML_BLAS=ON")
    assert llama_wheel.plan_recipe(lock, compilers).key != plain.key


def test_build_sees_no_flags_that_the_key_does_not_cover(
    llama_wheel: Any, recipe: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("CFLAGS", "CXXFLAGS", "LDFLAGS", "CMAKE_ARGS", "CMAKE_BUILD_TYPE", "SKBUILD_CMAKE_DEFINE"):
        monkeypatch.setenv(name, "-O0")
    monkeypatch.setenv("CMAKE_BUILD_PARALLEL_LEVEL", "2")
    variables = llama_wheel.build_environment(recipe, ("/cc", "/c++"), Path("tools"))
    assert "-O0" not in variables.values()
    assert variables["CMAKE_ARGS"] == "-DA=ON"
    assert (variables["CC"], variables["CXX"]) == ("/cc", "/c++")
    assert variables["CMAKE_BUILD_PARALLEL_LEVEL"] == "2"
    assert variables["PATH"].split(os.pathsep)[0] == "tools"


def test_long_command_shows_progress_and_keeps_its_output_in_a_log(
    llama_wheel: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    progress = importlib.import_module("progress")
    program = "for i in range(1, 41): print(f'[{i}/40] cc x.c')"
    progress.run_logged(
        [sys.executable, "-c", program],
        title="building",
        log=tmp_path / "log",
        step=r"^\[(?P<done>\d+)/(?P<total>\d+)\]",
    )
    shown = capsys.readouterr().out.splitlines()
    assert shown[0] == "samebytes: building ..."
    assert [line.partition(",")[0] for line in shown[1:-1]] == [
        f"samebytes: building: {done}/40" for done in (1, *range(4, 41, 4))
    ]
    assert shown[-1].startswith("samebytes: building: done, ")
    assert len((tmp_path / "log").read_text().splitlines()) == 40


def test_failed_command_keeps_the_end_of_its_output(llama_wheel: Any, tmp_path: Path) -> None:
    progress = importlib.import_module("progress")
    program = "import sys; [print(i) for i in range(100)]; sys.exit(3)"
    with pytest.raises(progress.CommandFailed, match="building: exit status 3") as failure:
        progress.run_logged(
            [sys.executable, "-c", program], title="building", log=tmp_path / "log", step="^$"
        )
    assert failure.value.tail == [str(i) for i in range(100 - progress.LINES_OF_LOG_SHOWN, 100)]
