"""The wheel is whole: what a user in an empty folder needs is in it, and works there."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from parity.store import REPOSITORY
from tests.tidy.source import load_sources

PARTS = ("scheduler", "parity", "manifests", "splits", "golden", "requirements", "tests/families")
PARTS += ("tests/regressions", "setup.py", "pyproject.toml", "README.md", "LICENSE")
MADE = ("samebytes/__init__.py", "samebytes/suites/__init__.py", "samebytes/suites/regressions/__init__.py")
LIES_AT = {
    "tests/families": "samebytes/suites",
    "tests/regressions": "samebytes/suites/regressions",
    **{name: f"samebytes/{name}" for name in ("manifests", "splits", "golden", "requirements")},
}
OWN_TEST = """
import pytest

@pytest.mark.nightly
def test_own_that_is_slow(): pass

def test_own(): pass
"""
OWN_SCHEDULER = """
from scheduler.loop import Scheduler
from scheduler.policies import make_policy

def make(engine, policy, steps, *, model_digest=""):
    return Scheduler(engine, make_policy("sarathi"), steps, model_digest=model_digest)
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy: a build leaves folders behind."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for part in PARTS:
        path = REPOSITORY / part
        copy: Callable[..., object] = shutil.copytree if path.is_dir() else shutil.copy2
        copy(
            path,
            source / part,
            **({"ignore": shutil.ignore_patterns("__pycache__")} if path.is_dir() else {}),
        )
    build = "import sys; from setuptools import build_meta; print(build_meta.build_wheel(sys.argv[1]))"
    subprocess.run(
        [sys.executable, "-c", build, str(target)], cwd=source, check=True, capture_output=True, text=True
    )
    (built,) = target.glob("*.whl")
    return built


def name_in_wheel(path: str) -> str:
    """Where a file of the checkout lies in the wheel."""
    for folder, name in LIES_AT.items():
        if path.startswith(f"{folder}/"):
            return name + path.removeprefix(folder)
    return path


def test_every_file_of_the_shipped_folders_is_in_the_wheel(wheel: Path) -> None:
    folders = [REPOSITORY / part for part in PARTS if (REPOSITORY / part).is_dir()]
    files = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
    wanted = {
        name_in_wheel(path.relative_to(REPOSITORY).as_posix()): None
        for path in files
        if "__pycache__" not in path.parts
    }
    with zipfile.ZipFile(wheel) as archive:
        held = [name for name in archive.namelist() if ".dist-info/" not in name]
        points = next(name for name in archive.namelist() if name.endswith("entry_points.txt"))
        plugin = archive.read(points).decode()

    assert len(wanted) > 200
    assert sorted(held) == sorted([*wanted, *MADE])
    assert re.search(r"\[pytest11\]\nparity\.plugin = parity\.plugin\n", plugin)


def test_shipped_suites_need_nothing_of_the_other_tests() -> None:
    shipped = [
        source
        for source in load_sources()
        if source.path.startswith(("tests/families/", "tests/regressions/"))
    ]
    found = [
        (s.path, name) for s in shipped if s.is_python for _, name in s.imports() if name.startswith("tests")
    ]
    assert len(shipped) > 5 and found == []


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``bin`` of a fresh environment with the wheel; what it depends on, the locked llama.cpp among it, is
    that of this interpreter.
    """
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False)
    site = next(folder.glob("lib/python*/site-packages"))
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    (site / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    return folder / "bin"


def run_outside(
    environment: Path, folder: Path, module: str, *arguments: str
) -> subprocess.CompletedProcess[str]:
    """Run a module in a folder that knows nothing of the checkout."""
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        [str(environment / "python"), "-m", module, *arguments],
        cwd=folder, env=variables, capture_output=True, text=True, check=False,
    )  # fmt: skip


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A stranger's repository: a test, a scheduler, and a ``manifests`` folder of another tool."""
    (tmp_path / "test_mine.py").write_text(OWN_TEST)
    (tmp_path / "mypkg.py").write_text(OWN_SCHEDULER)
    (tmp_path / "manifests").mkdir()
    (tmp_path / "manifests" / "deployment.yaml").write_text("kind: Deployment\n")
    return tmp_path


@pytest.mark.nightly
def test_check_runs_from_the_wheel(environment: Path, own: Path) -> None:
    done = run_outside(
        environment, own, "parity.cli", "check", "--family", "llama", "--sessions", "9", "--jobs", "1",
        "--scheduler", "mypkg:make",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "verdict: pass" in done.stdout and "commit samebytes-" in done.stdout


@pytest.mark.nightly
def test_suites_run_from_the_wheel_beside_the_users_own_tests(environment: Path, own: Path) -> None:
    done = run_outside(
        environment, own, "pytest", "-n", "2", "-v", "-p", "no:cacheprovider", "--pyargs", "samebytes.suites",
        "test_mine.py", "-k", "test_own or test_concurrent_parity and unified-qwen3next or qwen3next-short",
        "--scheduler", "mypkg:make",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    suite = "test_concurrent_parity.py::test_concurrent_parity[unified-qwen3next]"
    passed = [line for line in done.stdout.splitlines() if "PASSED" in line]
    for name in (suite, "test_mine.py::test_own_that_is_slow", "test_mine.py::test_own", "qwen3next-short]"):
        assert any(name in line for line in passed), done.stdout


@pytest.mark.nightly
def test_marker_selects_a_family_and_a_wrong_scheduler_is_red(environment: Path, own: Path) -> None:
    broken = "\n    def begin(self, now_ms): raise ValueError('broken on purpose')\n\nmake = Broken\n"
    (own / "mypkg.py").write_text(f"from scheduler.loop import Scheduler\n\nclass Broken(Scheduler):{broken}")
    done = run_outside(
        environment, own, "pytest", "-q", "-p", "no:cacheprovider", "--pyargs", "samebytes.suites",
        "-m", "family_qwen3next", "-k", "unified-qwen3next", "--scheduler", "mypkg:make",
    )  # fmt: skip
    assert done.returncode == 1 and "broken on purpose" in done.stdout, done.stdout + done.stderr


@pytest.mark.nightly
def test_a_strangers_run_is_left_alone(environment: Path, own: Path) -> None:
    done = run_outside(
        environment, own, "pytest", "-p", "no:cacheprovider", "test_mine.py", "--strict-markers"
    )
    assert done.returncode == 0 and "2 passed" in done.stdout, done.stdout + done.stderr
    assert "samebytes" not in done.stdout.partition("plugins:")[0]


@pytest.mark.nightly
def test_own_folders_add_a_family_and_replace_ours(environment: Path, own: Path) -> None:
    site = next((environment.parent / "lib").glob("python*/site-packages")) / "samebytes"
    text = (site / "manifests/llama.yaml").read_text()
    (own / "manifests/mine.yaml").write_text(
        re.sub("^family: llama", "family: mine", text, flags=re.MULTILINE)
    )
    done = run_outside(environment, own, "parity.cli", "check", "--family", "nobody")
    assert done.returncode == 64 and "qwen3next, mine" in done.stderr, done.stdout + done.stderr

    (own / "manifests/llama.yaml").write_text(text.replace("family: llama", "family: other"))
    done = run_outside(environment, own, "parity.cli", "check", "--family", "llama")
    assert done.returncode == 64 and "'other' is not the file's name 'llama'" in done.stderr

    done = run_outside(
        environment, own, "parity.cli", "--project", str(site.parent), "check", "--family", "mine"
    )
    assert done.returncode == 64 and "unknown family 'mine'" in done.stderr
