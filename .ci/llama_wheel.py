"""Builds llama-cpp-python's wheel from its locked source once per machine, and keeps it.

The wheel is compiled for this machine's processor (``-march=native``) and without llamafile's SGEMM, which
rounds one-row and many-row products differently, so a wheel made elsewhere or by default is not the same
engine. The cache key covers everything that decides the bytes of the library: lock entry, flags,
processor, Python ABI, compilers.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from progress import run_logged

from parity.errors import UsageError
from parity.store import file_sha256, save_text

CMAKE_FLAGS = "-DGGML_LLAMAFILE=OFF -DLLAVA_BUILD=OFF"
UNFINISHED = ".building-"
RECEIPT = "build.json"
# Variables that would change the library behind the key's back.
DROPPED_VARIABLES = re.compile(
    r"^(CFLAGS|CXXFLAGS|CPPFLAGS|LDFLAGS|CMAKE_(?!BUILD_PARALLEL_LEVEL).*|SKBUILD_.*)$"
)


@dataclass(frozen=True, slots=True)
class Recipe:
    """Everything that decides the bytes of the built library."""

    lock_entry: str
    cmake_flags: str
    cpu: str
    abi: str
    compilers: str

    @property
    def key(self) -> str:
        """20 hexadecimal digits of the SHA-256 of all fields."""
        text = json.dumps(asdict(self), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:20]


def find_compiler(variable: str, candidates: tuple[str, ...], language: str) -> str:
    """Absolute path of the compiler that ``variable``, else the search path, names. Raises ``UsageError``."""
    named = os.environ.get(variable)
    for candidate in (named,) if named else candidates:
        if path := shutil.which(candidate):
            return path
    raise UsageError(
        f"no {language} compiler",
        where=variable if named else "PATH",
        why=f"{named} is not a command" if named else f"none of {', '.join(candidates)} is a command",
        todo="install one (Debian: apt-get install build-essential) or set CC and CXX, then: make setup",
    )


def find_compilers() -> tuple[str, str]:
    """Paths of the C and the C++ compiler."""
    return (
        find_compiler("CC", ("cc", "gcc", "clang"), "C"),
        find_compiler("CXX", ("c++", "g++", "clang++"), "C++"),
    )


def describe_cpu() -> str:
    """Model and instruction sets of this machine's processor, as the operating system reports them."""
    wanted = ("model name", "flags", "Features", "CPU implementer", "CPU part")
    try:
        first = Path("/proc/cpuinfo").read_text(encoding="utf-8").split("\n\n")[0]
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    fields = [line.partition(":") for line in first.splitlines()]
    facts = [
        f"{name.strip()}={' '.join(sorted(value.split()))}"
        for name, _, value in fields
        if name.strip() in wanted
    ]
    return "; ".join([platform.machine(), *facts])


def plan_recipe(lock_file: Path, compilers: tuple[str, str]) -> Recipe:
    """The recipe for this machine and the lock entry in ``lock_file``."""
    versions = [
        subprocess.run([path, "--version"], capture_output=True, text=True, check=False).stdout.partition(
            "\n"
        )[0]
        for path in compilers
    ]
    entry = [line.strip() for line in lock_file.read_text().splitlines() if not line.strip().startswith("#")]
    extra = os.environ.get("SAMEBYTES_CMAKE_ARGS", "").strip()
    return Recipe(
        lock_entry=" ".join(entry),
        cmake_flags=f"{CMAKE_FLAGS} {extra}".strip(),
        cpu=describe_cpu(),
        abi=f"{sysconfig.get_config_var('SOABI')} {sysconfig.get_platform()}",
        compilers=" | ".join(versions),
    )


def build_environment(recipe: Recipe, compilers: tuple[str, str], programs: Path) -> Mapping[str, str]:
    """Environment of the build: the recipe's flags, its compilers, and cmake and ninja from ``programs``."""
    kept = {name: value for name, value in os.environ.items() if not DROPPED_VARIABLES.match(name)}
    return kept | {
        "CMAKE_ARGS": recipe.cmake_flags,
        "CC": compilers[0],
        "CXX": compilers[1],
        "PATH": f"{programs}{os.pathsep}{os.environ.get('PATH', '')}",
    }


def install_tools(tools: Path, tools_file: Path, log: Path) -> Path:
    """A virtual environment in ``tools`` with cmake, ninja and the build backend as locked; returns it."""
    subprocess.run([sys.executable, "-m", "venv", str(tools)], check=True, stdin=subprocess.DEVNULL)
    python, pip = str(tools / "bin/python"), ["-m", "pip", "--disable-pip-version-check"]
    count = len(re.findall(r"^[A-Za-z0-9]", tools_file.read_text(), re.MULTILINE))
    run_logged(
        [python, *pip, "install", "--require-hashes", "--only-binary", ":all:", "-r", str(tools_file)],
        title="installing cmake, ninja and the build backend",
        log=log,
        step=r"^Collecting ",
        total=count,
    )
    return tools


def build_wheel(
    folder: Path, *, recipe: Recipe, compilers: tuple[str, str], lock_file: Path, tools_file: Path
) -> Path:
    """Compile the wheel in ``folder`` with locked tools; returns its path. Raises ``CommandFailed``."""
    log = folder.parent / f"{recipe.key}.log"
    log.unlink(missing_ok=True)
    tools = install_tools(folder / "tools", tools_file, log)
    python, pip = str(tools / "bin/python"), ["-m", "pip", "--disable-pip-version-check"]
    # No pip cache: it would hand out a wheel that was built with other flags or on another processor.
    run_logged(
        [
            python,
            *pip,
            "wheel",
            "--verbose",
            "--no-cache-dir",
            "--no-deps",
            "--no-build-isolation",
            "--require-hashes",
            "--no-binary",
            "llama-cpp-python",
            "--wheel-dir",
            str(folder / "out"),
            "-r",
            str(lock_file),
        ],
        title="building llama.cpp (once for this machine, about 9 minutes on 2 cores)",
        log=log,
        step=r"^\s*\[(?P<done>\d+)/(?P<total>\d+)\]",
        environment=build_environment(recipe, compilers, tools / "bin"),
    )
    return next((folder / "out").glob("*.whl"))


def load_cached(entry: Path) -> Path | None:
    """The wheel of a cache entry, or None where there is none or its bytes are not those that were built."""
    try:
        receipt = json.loads((entry / RECEIPT).read_text())
        wheel = entry / receipt["wheel"]
        return wheel if file_sha256(wheel) == receipt["sha256"] else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


@contextmanager
def hold_lock(path: Path) -> Iterator[None]:
    """One process at a time: others wait, and a killed holder lets go."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def take_wheel(wheels: Path, *, recipe: Recipe, build: Callable[[Path], Path]) -> Path:
    """The cached wheel of ``recipe``, built first where it is missing or damaged.

    ``build`` gets an empty folder and returns the path of the wheel that it left there. An entry appears in
    ``wheels`` in one rename, complete, or not at all.
    """
    entry = wheels / recipe.key
    with hold_lock(wheels / f".lock-{recipe.key}"):
        if wheel := load_cached(entry):
            return wheel
        for leftover in [*wheels.glob(f"{UNFINISHED}{recipe.key}-*"), entry]:
            shutil.rmtree(leftover, ignore_errors=True)
        workshop = Path(tempfile.mkdtemp(dir=wheels, prefix=f"{UNFINISHED}{recipe.key}-"))
        try:
            start_s = time.monotonic()
            built = build(workshop)
            finished = workshop / "entry"
            finished.mkdir()
            wheel = Path(shutil.move(str(built), str(finished / built.name)))
            receipt = {
                "wheel": wheel.name,
                "sha256": file_sha256(wheel),
                "recipe": asdict(recipe),
                "build_seconds": round(time.monotonic() - start_s, 1),
            }
            save_text(finished / RECEIPT, json.dumps(receipt, indent=1) + "\n")
            os.rename(finished, entry)
        finally:
            shutil.rmtree(workshop, ignore_errors=True)
        return entry / wheel.name
