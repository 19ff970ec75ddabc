"""A machine that lacks something is told so in one line with exit code 64, and nothing is left half made."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent.parent
# Compilers are found, not named; a make that runs the tests is not the make under test.
HIDDEN = ("CC", "CXX", "MAKEFLAGS", "MAKELEVEL", "MFLAGS")
SETUP = REPOSITORY / ".ci/setup.py"
NEEDED = (
    "Makefile",
    "pyproject.toml",
    ".ci",
    "requirements",
    "parity/__init__.py",
    "parity/errors.py",
    "parity/store.py",
)


@pytest.fixture
def bare_path(tmp_path: Path) -> Path:
    """A search path with Python and make and no compiler."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "python3").symlink_to(sys.executable)
    (folder / "make").symlink_to(shutil.which("make"))
    return folder


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of what ``make setup`` reads, without an environment."""
    folder = tmp_path / "checkout"
    for name in NEEDED:
        source, target = REPOSITORY / name, folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, target)
    return folder


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module behind ``make setup``."""
    monkeypatch.syspath_prepend(str(REPOSITORY / ".ci"))
    return importlib.import_module("environment")


def run(*command: str, variables: Mapping[str, str] | None = None, cwd: Path = REPOSITORY) -> Any:
    """Run a command with some variables replaced; compilers are never named by the environment."""
    inherited = {name: value for name, value in os.environ.items() if name not in HIDDEN}
    return subprocess.run(
        command,
        cwd=cwd,
        env=inherited | dict(variables or {}),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )


def only_line(text: str) -> str:
    """The single line of ``text``."""
    assert len(text.splitlines()) == 1, text
    return text.strip()


def test_missing_compiler_costs_one_line_and_makes_nothing(bare_path: Path, tmp_path: Path) -> None:
    venv, cache = tmp_path / "venv", tmp_path / "cache"
    done = run(
        sys.executable,
        str(SETUP),
        "--venv",
        str(venv),
        variables={"PATH": str(bare_path), "SAMEBYTES_CACHE": str(cache)},
    )
    assert done.returncode == 64
    assert only_line(done.stderr) == (
        "samebytes: no C compiler in PATH: none of cc, gcc, clang is a command; "
        "install one (Debian: apt-get install build-essential) or set CC and CXX, then: make setup"
    )
    assert done.stdout == ""
    assert not venv.exists() and not cache.exists()


def test_missing_cpp_compiler_is_named(bare_path: Path, tmp_path: Path) -> None:
    (bare_path / "cc").symlink_to(shutil.which("true"))
    done = run(
        sys.executable, str(SETUP), "--venv", str(tmp_path / "venv"), variables={"PATH": str(bare_path)}
    )
    assert done.returncode == 64
    assert "no C++ compiler in PATH: none of c++, g++, clang++" in only_line(done.stderr)


def test_compiler_variable_that_names_nothing_is_named(tmp_path: Path) -> None:
    done = run(sys.executable, str(SETUP), "--venv", str(tmp_path / "venv"), variables={"CC": "no-such-cc"})
    assert done.returncode == 64
    assert "no C compiler in CC: no-such-cc is not a command" in only_line(done.stderr)


def test_make_setup_passes_the_line_and_the_code_on(checkout: Path, bare_path: Path) -> None:
    done = run("make", "setup", variables={"PATH": str(bare_path)}, cwd=checkout)
    line, of_make = done.stderr.splitlines()
    assert line.startswith("samebytes: no C compiler in PATH: ")
    assert of_make.startswith("make: *** ") and of_make.endswith(" Error 64")
    assert not (checkout / ".venv").exists()


def test_make_setup_without_python_says_which_command_is_missing(checkout: Path) -> None:
    done = run("make", "setup", "PYTHON=no-such-python", cwd=checkout)
    line, of_make = done.stderr.splitlines()
    assert line.startswith("samebytes: no Python in PATH: no-such-python is not a command; ")
    assert of_make.endswith(" Error 64")


@pytest.mark.parametrize("version", ["(3, 10, 14)", "(3, 6, 0)", "(2, 7, 18)"])
def test_old_python_costs_one_line(version: str, tmp_path: Path) -> None:
    program = (
        f"import runpy, sys; sys.version_info = {version}; "
        f"sys.argv = ['setup.py', '--venv', {str(tmp_path / 'venv')!r}]; "
        f"runpy.run_path({str(SETUP)!r}, run_name='__main__')"
    )
    done = run(sys.executable, "-c", program)
    assert done.returncode == 64
    shown = ".".join(re.findall(r"\d+", version)[:2])
    assert only_line(done.stderr).startswith(
        f"samebytes: Python {shown} is too old in {sys.executable}: 3.11 or newer"
    )
    assert not (tmp_path / "venv").exists()


def test_entry_point_is_readable_by_old_pythons() -> None:
    tree = ast.parse(SETUP.read_text(), feature_version=(3, 7))
    assert not [node for node in ast.walk(tree) if isinstance(node, ast.JoinedStr | ast.AnnAssign)]
    assert not [node for node in ast.walk(tree) if getattr(node, "module", "") == "__future__"]


@pytest.mark.parametrize("missing", ["venv", "ensurepip"])
def test_python_without_venv_costs_one_line(
    missing: str,
    environment: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == missing else find_spec(name)
    )
    assert environment.main(["--venv", str(tmp_path / "venv")]) == 64
    line = only_line(capsys.readouterr().err)
    assert line.startswith("samebytes: no virtual environment can be created in ") and "python3-venv" in line
    assert not (tmp_path / "venv").exists()


def write_stamp(environment: Any, venv: Path) -> dict[str, str]:
    """Make ``venv`` look like a finished environment of this machine."""
    recipe = environment.llama_wheel.plan_recipe(
        environment.LLAMA_LOCK, environment.llama_wheel.find_compilers()
    )
    stamp = {"inputs": environment.digest_inputs(), "wheel": recipe.key, "cpu": recipe.cpu}
    (venv / "bin").mkdir(parents=True)
    (venv / "bin/python").symlink_to(sys.executable)
    (venv / environment.STAMP).write_text(json.dumps(stamp))
    return stamp


def refuse(*arguments: object, **options: object) -> None:
    """Stands in for a step that must not run."""
    raise AssertionError(f"ran with {arguments} {options}")


def test_finished_environment_is_left_alone(
    environment: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    write_stamp(environment, tmp_path / "venv")
    monkeypatch.setattr(environment, "create_venv", refuse)
    monkeypatch.setattr(environment, "install", refuse)
    assert environment.main(["--venv", str(tmp_path / "venv")]) == 0


def test_finished_environment_needs_no_compiler(
    environment: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, bare_path: Path
) -> None:
    write_stamp(environment, tmp_path / "venv")
    monkeypatch.setattr(environment, "install", refuse)
    monkeypatch.setenv("PATH", str(bare_path))
    assert environment.main(["--venv", str(tmp_path / "venv")]) == 0


@pytest.mark.parametrize("stale", ["inputs", "wheel", "cpu"])
def test_stale_environment_is_brought_up_to_date(
    stale: str, environment: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    stamp = write_stamp(environment, tmp_path / "venv")
    (tmp_path / "venv" / environment.STAMP).write_text(json.dumps(stamp | {stale: "other"}))
    steps = []
    monkeypatch.setattr(environment, "create_venv", lambda venv: steps.append("venv"))
    monkeypatch.setattr(environment, "install_locked", lambda venv: steps.append("locked"))
    monkeypatch.setattr(environment, "install_wheel", lambda *arguments: steps.append("wheel"))
    monkeypatch.setattr(environment, "install", lambda *arguments, **options: steps.append("project"))
    assert environment.main(["--venv", str(tmp_path / "venv")]) == 0
    assert steps == ["venv", *{"inputs": ["locked"], "wheel": ["wheel"], "cpu": []}[stale], "project"]
    assert json.loads((tmp_path / "venv" / environment.STAMP).read_text()) == stamp


def test_failed_installation_is_never_taken_for_a_finished_one(
    environment: Any, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    stamp = write_stamp(environment, tmp_path / "venv")
    (tmp_path / "venv" / environment.STAMP).write_text(json.dumps(stamp | {"inputs": "other"}))
    monkeypatch.setattr(environment, "create_venv", lambda venv: None)
    monkeypatch.setattr(environment, "LOCK", tmp_path / "lock.txt")
    (tmp_path / "lock.txt").write_text("-r no-such-file.txt\n")
    assert environment.main(["--venv", str(tmp_path / "venv")]) == 70
    assert not (tmp_path / "venv" / environment.STAMP).exists()
    errors = capfd.readouterr().err
    assert "no-such-file.txt" in errors
    assert errors.splitlines()[-1].startswith(
        "samebytes: set-up failed: installing the locked packages: exit status 1"
    )


def test_missing_llama_cpp_costs_one_line(tmp_path: Path) -> None:
    (tmp_path / "llama_cpp.py").write_text(
        "raise ModuleNotFoundError('No module named llama_cpp', name='llama_cpp')\n"
    )
    done = run(
        sys.executable,
        "-c",
        "from parity.cli import main; main(['check', '--family', 'llama'])",
        variables={"PYTHONPATH": str(tmp_path), "SAMEBYTES_CACHE": str(tmp_path / "cache")},
    )
    assert done.returncode == 64, done.stderr
    line = only_line(done.stderr)
    assert line.startswith("parity: llama_cpp cannot be imported") and "make setup" in line
