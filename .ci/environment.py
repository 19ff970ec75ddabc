"""``make setup``: the virtual environment ``.venv`` with every locked package, checked by hash.

Run again it does only what is missing, so every other target of the Makefile starts with it.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))  # parity.errors and parity.store need nothing but the standard library

import llama_wheel  # noqa: E402
from llama_wheel import Recipe  # noqa: E402
from progress import CommandFailed, run_logged  # noqa: E402

from parity.errors import ExitCode, UsageError  # noqa: E402
from parity.store import cache_dir, save_text  # noqa: E402

LOCK = REPOSITORY / "requirements/lock.txt"
LLAMA_LOCK = REPOSITORY / "requirements/llama.txt"
BUILD_LOCK = REPOSITORY / "requirements/build.txt"
STAMP = "samebytes-setup.json"


def check_venv_possible() -> None:
    """Raises ``UsageError`` where this Python cannot make a virtual environment with pip in it."""
    if importlib.util.find_spec("venv") is None or importlib.util.find_spec("ensurepip") is None:
        raise UsageError(
            "no virtual environment can be created",
            where=sys.executable,
            why="its modules venv and ensurepip are not installed",
            todo="install them (Debian: apt-get install python3-venv), then: make setup",
        )


def digest_inputs() -> str:
    """SHA-256 over every file that decides what is installed, and this Python's version."""
    digest = hashlib.sha256(sys.version.encode())
    for path in (LOCK, LLAMA_LOCK, REPOSITORY / "pyproject.toml"):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def load_stamp(venv: Path) -> dict[str, str]:
    """What the last finished set-up of ``venv`` recorded; empty when none has finished."""
    try:
        stamp = json.loads((venv / STAMP).read_text())
        return stamp if isinstance(stamp, dict) and (venv / "bin/python").exists() else {}
    except (OSError, ValueError):
        return {}


def create_venv(venv: Path) -> None:
    """Make ``venv`` with pip, or keep it when it is whole and of this Python's version."""
    probe = "import sys, pip; print(*sys.version_info[:2])"
    python = venv / "bin/python"
    if python.exists():
        answer = subprocess.run([str(python), "-c", probe], capture_output=True, text=True, check=False)
        if answer.stdout.split() == [str(number) for number in sys.version_info[:2]]:
            return
    print(f"samebytes: creating {venv.name} with Python {sys.version.split()[0]}", flush=True)
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(venv)], check=True, stdin=subprocess.DEVNULL)


def install(venv: Path, *arguments: str, title: str, total: int) -> None:
    """``pip install`` into ``venv``; the output goes to a log in it."""
    run_logged(
        [str(venv / "bin/python"), "-m", "pip", "--disable-pip-version-check", "install", *arguments],
        title=title,
        log=venv / "samebytes-setup.log",
        step=r"^(Collecting |Processing |Obtaining )",
        total=total,
    )


def install_locked(venv: Path) -> None:
    """Install every locked package except llama-cpp-python."""
    total = len(re.findall(r"^[A-Za-z0-9]", LOCK.read_text(), re.MULTILINE))
    install(
        venv,
        "--require-hashes",
        "--only-binary",
        ":all:",
        "-r",
        str(LOCK),
        title="installing the locked packages",
        total=total,
    )


def install_wheel(venv: Path, recipe: Recipe, compilers: tuple[str, str]) -> None:
    """Install llama-cpp-python from the cache, where it is built first if it is missing."""
    wheel = llama_wheel.take_wheel(
        cache_dir("wheels"),
        recipe=recipe,
        build=lambda folder: llama_wheel.build_wheel(
            folder, recipe=recipe, compilers=compilers, lock_file=LLAMA_LOCK, tools_file=BUILD_LOCK
        ),
    )
    install(
        venv,
        "--no-deps",
        "--no-index",
        "--force-reinstall",
        str(wheel),
        title=f"installing {wheel.name}",
        total=1,
    )


def set_up(venv: Path) -> None:
    """Bring ``venv`` up to date; does nothing when it is. Raises ``UsageError`` and ``CommandFailed``."""
    stamp, inputs = load_stamp(venv), digest_inputs()
    try:
        compilers = llama_wheel.find_compilers()
    except UsageError:
        # A finished environment needs no compiler; everything else does.
        if stamp.get("inputs") == inputs and stamp.get("cpu") == llama_wheel.describe_cpu():
            return
        raise
    recipe = llama_wheel.plan_recipe(LLAMA_LOCK, compilers)
    current = {"inputs": inputs, "wheel": recipe.key, "cpu": recipe.cpu}
    if stamp == current:
        return
    check_venv_possible()
    create_venv(venv)
    stamp = load_stamp(venv)  # again: an unusable environment was made anew, without its stamp
    (venv / STAMP).unlink(missing_ok=True)
    if stamp.get("inputs") != inputs:
        install_locked(venv)
    if stamp.get("wheel") != recipe.key:
        install_wheel(venv, recipe, compilers)
    install(
        venv,
        "--no-deps",
        "--no-index",
        "--no-build-isolation",
        "--editable",
        str(REPOSITORY),
        title="installing samebytes itself",
        total=1,
    )
    save_text(venv / STAMP, json.dumps(current, indent=1) + "\n")


def main(arguments: list[str]) -> int:
    """Exit code of ``make setup``: 0 ready, 64 the machine lacks something, 70 download or build failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--venv", type=Path, default=REPOSITORY / ".venv")
    parser.add_argument(
        "--print-wheel-key", action="store_true", help="print the cache key of the wheel and stop"
    )
    options = parser.parse_args(arguments)
    try:
        if options.print_wheel_key:
            print(llama_wheel.plan_recipe(LLAMA_LOCK, llama_wheel.find_compilers()).key)
            return ExitCode.PASS
        with llama_wheel.hold_lock(options.venv.parent / f".{options.venv.name.lstrip('.')}.lock"):
            set_up(options.venv)
    except UsageError as error:
        print(f"samebytes: {error.line}", file=sys.stderr)
        return ExitCode.USAGE
    except (CommandFailed, subprocess.CalledProcessError) as error:
        print(
            *getattr(error, "tail", []),
            f"samebytes: set-up failed: {error}",
            sep=os.linesep,
            file=sys.stderr,
        )
        return ExitCode.INTERNAL
    except KeyboardInterrupt:
        print("samebytes: set-up interrupted; run it again to go on", file=sys.stderr)
        return 130
    return ExitCode.PASS
