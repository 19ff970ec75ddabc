"""``.ci/run`` runs the test command on a bare machine, and its exit code says what happened."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent.parent
FOUND = ("bash", "dirname")


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """A search path whose programs write their name and arguments to ``tmp_path/calls``; python3 is real."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("make", "cc", "c++"):
        record(programs / name)
    for name in FOUND:
        (programs / name).symlink_to(shutil.which(name))
    (programs / "python3").symlink_to(sys.executable)
    return tmp_path


def record(path: Path, *, status: int = 0) -> None:
    """Write a program that records its call and its standard input, then exits with ``status``."""
    calls = path.parent.parent / "calls"
    path.write_text(
        f'#!{shutil.which("bash")}\nread -r line\necho "{path.name} $*" "$line" >> "{calls}"\nexit {status}\n'
    )
    path.chmod(0o755)


def run_ci(machine: Path, *, ci: str = "true") -> tuple[int, list[str]]:
    """Exit code of ``.ci/run`` and its calls, run from another folder and with text on standard input."""
    done = subprocess.run(
        [str(REPOSITORY / ".ci/run")],
        cwd=machine,
        input="not for the tests\n",
        text=True,
        check=False,
        env={"PATH": str(machine / "bin"), "CI": ci, "HOME": str(machine)},
        capture_output=True,
    )
    calls = machine / "calls"
    return done.returncode, calls.read_text().splitlines() if calls.exists() else []


def test_ci_runs_the_test_command_without_input(machine: Path) -> None:
    assert run_ci(machine) == (0, ["make test "])


@pytest.mark.parametrize("status", [1, 2, 5, 64])
def test_ci_is_red_when_the_test_command_is(machine: Path, status: int) -> None:
    record(machine / "bin/make", status=status)
    assert run_ci(machine)[0] == status


def test_ci_installs_a_missing_compiler(machine: Path) -> None:
    (machine / "bin/cc").unlink()
    record(machine / "bin/apt-get")
    assert run_ci(machine) == (
        0,
        [
            "apt-get update -qq ",
            "apt-get install -y -qq --no-install-recommends build-essential ",
            "make test ",
        ],
    )


def test_ci_installs_venv_where_python_cannot_make_one(machine: Path) -> None:
    (machine / "bin/python3").unlink()
    record(machine / "bin/python3", status=1)
    record(machine / "bin/apt-get")
    calls = run_ci(machine)[1]
    assert "apt-get install -y -qq --no-install-recommends python3 python3-venv " in calls
    assert calls[-1] == "make test "


def test_ci_run_by_hand_installs_nothing(machine: Path) -> None:
    (machine / "bin/cc").unlink()
    record(machine / "bin/apt-get")
    assert run_ci(machine, ci="") == (0, ["make test "])


def test_a_run_that_collects_no_test_is_red(tmp_path: Path) -> None:
    (tmp_path / "test_nothing.py").write_text("")
    inherited = {
        name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "MAKE"))
    }
    done = subprocess.run(
        ["make", "--old-file=setup", "test", f"BIN={Path(sys.executable).parent}", f"PYTEST_ARGS={tmp_path}"],
        cwd=REPOSITORY,
        env=inherited,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    assert "no tests ran" in done.stdout and "Error 5" in done.stderr
