"""``make llama-server`` builds one program a recipe, from the locked sources and
the very wheel that is installed.
"""

from __future__ import annotations

import dataclasses
import importlib
import io
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest

from parity.errors import UsageError
from parity.store import REPOSITORY

CI = REPOSITORY / ".ci"


@pytest.fixture
def build(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(CI))
    return importlib.import_module("build_llama_server")


@pytest.fixture
def wheel(build: Any) -> Any:
    return build.llama_wheel.Recipe(
        lock_entry="a==1", cmake_flags="-DA=ON", cpu="x", abi="cp311", compilers="gcc 12"
    )


@pytest.fixture
def venv(tmp_path: Path) -> Path:
    """A virtual environment with the folder that the libraries are in."""
    path = tmp_path / "venv"
    (path / "lib/python3.11/site-packages/llama_cpp/lib").mkdir(parents=True)
    (path / "bin").mkdir()
    return path


def test_key_changes_with_all_that_decides_the_program(build: Any, wheel: Any, venv: Path) -> None:
    stock = build.plan_server(wheel, venv=venv, faults=False)
    faulty = build.plan_server(wheel, venv=venv, faults=True)
    other_wheel = build.plan_server(dataclasses.replace(wheel, cpu="y"), venv=venv, faults=False)
    edited = dataclasses.replace(stock, cmake_file="edited")
    elsewhere = dataclasses.replace(stock, rpath="$ORIGIN/lib")
    keys = {recipe.key for recipe in (stock, faulty, other_wheel, edited, elsewhere)}
    assert len(keys) == 5
    assert build.plan_server(wheel, venv=venv, faults=False).key == stock.key
    assert stock.rpath == "$ORIGIN/../lib/python3.11/site-packages/llama_cpp/lib"


def test_venv_without_the_wheel_says_what_to_run(build: Any, wheel: Any, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no llama-cpp-python in .*; run: make setup"):
        build.plan_server(wheel, venv=tmp_path, faults=False)


def test_wheel_that_is_not_in_the_cache_says_what_to_run(
    build: Any,
    venv: Path,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("SAMEBYTES_CACHE", str(tmp_path / "cache"))
    assert build.main(["--venv", str(venv)]) == 64
    assert "the wheel of llama.cpp is not in the cache; run: make setup" in capsys.readouterr().err


def test_only_llama_cpp_is_unpacked_from_the_sources(build: Any, tmp_path: Path) -> None:
    sdist = tmp_path / "a-1.tar.gz"
    with tarfile.open(sdist, "w:gz") as archive:
        for name in ("a-1/vendor/llama.cpp/common/a.cpp", "a-1/setup.py", "a-1/vendor/llama.cpp-other/b.cpp"):
            info = tarfile.TarInfo(name)
            info.size = 1
            archive.addfile(info, io.BytesIO(b"x"))
    root = build.unpack_sources(sdist, tmp_path / "sources")
    assert root == tmp_path / "sources/a-1/vendor/llama.cpp"
    files = [
        path.relative_to(tmp_path / "sources") for path in (tmp_path / "sources").rglob("*") if path.is_file()
    ]
    assert files == [Path("a-1/vendor/llama.cpp/common/a.cpp")]


def test_libraries_come_from_the_wheel(build: Any, tmp_path: Path) -> None:
    wheel = tmp_path / "a.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("llama_cpp/lib/libllama.so", b"llama")
        archive.writestr("llama_cpp/llama.py", b"")
    folder = build.unpack_libraries(wheel, tmp_path / "libraries")
    assert [(path.name, path.read_bytes()) for path in folder.iterdir()] == [("libllama.so", b"llama")]


def test_program_is_installed_once_and_replaced_when_it_differs(build: Any, tmp_path: Path) -> None:
    built, path = tmp_path / "built", tmp_path / "program"
    built.write_bytes(b"one")
    build.install_program(built, path)
    first = path.stat().st_ino
    build.install_program(built, path)
    assert (path.read_bytes(), path.stat().st_ino) == (b"one", first)
    built.write_bytes(b"two")
    build.install_program(built, path)
    assert path.read_bytes() == b"two"
    assert sorted(each.name for each in tmp_path.iterdir()) == ["built", "program"]


def test_faults_touch_the_server_alone(build: Any) -> None:
    """libllama is the wheel's: a patch of anything else would not be in the program."""
    lines = build.FAULTS_PATCH.read_text().splitlines()
    paths = [line.removeprefix("+++ b/") for line in lines if line.startswith("+++ ")]
    assert paths
    assert all(path.startswith("tools/server/") for path in paths)
