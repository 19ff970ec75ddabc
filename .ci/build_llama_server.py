"""``make llama-server``: llama-server of the locked commit, compiled once per
machine and installed into the venv.

Its sources are in the source distribution that the wheel is built from. Only the server, llama.cpp's common
code and what they need are compiled; the program runs on the wheel's own libllama and libggml, so it and our
engine compute with the same kernels. ``--faults`` builds another program with faults planted in it
(``llama_server/faults.patch``). Web UI: none, it would have to be downloaded.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import zipfile
from dataclasses import asdict, dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))  # parity.errors and parity.store need nothing but the standard library

import environment  # noqa: E402
import llama_wheel  # noqa: E402
from progress import CommandFailed, run_logged  # noqa: E402

from parity.errors import ExitCode, UsageError  # noqa: E402
from parity.store import cache_dir, file_sha256  # noqa: E402

FOLDER = Path(__file__).resolve().parent / "llama_server"
CMAKE_FILE = FOLDER / "CMakeLists.txt"
FAULTS_PATCH = FOLDER / "faults.patch"
SOURCES = "vendor/llama.cpp"
LIBRARIES = "llama_cpp/lib"
PROGRAM, FAULTS_PROGRAM = "llama-server", "llama-server-faults"


@dataclass(frozen=True, slots=True)
class ServerRecipe:
    """Everything that decides the bytes of the program; ``wheel`` is the key of the wheel that it runs on,
    ``faults`` the digest of the patch, empty without faults.
    """

    wheel: str
    cmake_file: str
    rpath: str
    faults: str = ""

    @property
    def key(self) -> str:
        """20 hexadecimal digits of the SHA-256 of all fields."""
        text = json.dumps(asdict(self), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:20]


def find_libraries(venv: Path) -> Path:
    """Folder of the installed wheel's libraries. Raises ``UsageError`` where ``venv`` has none."""
    for folder in sorted(venv.glob(f"lib/python3.*/site-packages/{LIBRARIES}")):
        return folder
    raise UsageError("no llama-cpp-python", where=str(venv), todo="run: make setup")


def plan_server(wheel: llama_wheel.Recipe, *, venv: Path, faults: bool) -> ServerRecipe:
    """The recipe of the program for the wheel that ``venv`` has."""
    return ServerRecipe(
        wheel=wheel.key,
        cmake_file=file_sha256(CMAKE_FILE),
        rpath=f"$ORIGIN/{os.path.relpath(find_libraries(venv), venv / 'bin')}",
        faults=file_sha256(FAULTS_PATCH) if faults else "",
    )


def unpack_sources(sdist: Path, folder: Path) -> Path:
    """llama.cpp's sources from the source distribution, below ``folder``; returns their root."""
    with tarfile.open(sdist) as archive:
        root = archive.next().name.partition("/")[0]
        wanted = [each for each in archive if each.name.startswith(f"{root}/{SOURCES}/")]
        archive.extractall(folder, members=wanted, filter="data")
    return folder / root / SOURCES


def unpack_libraries(wheel: Path, folder: Path) -> Path:
    """The libraries in ``wheel``, in ``folder``."""
    folder.mkdir()
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if name.startswith(f"{LIBRARIES}/") and not name.endswith("/"):
                (folder / Path(name).name).write_bytes(archive.read(name))
    return folder


def find_patch() -> str:
    """Path of the command ``patch``. Raises ``UsageError``."""
    if path := shutil.which("patch"):
        return path
    raise UsageError(
        "no command patch in PATH",
        todo="install it (Debian: apt-get install patch), then run make llama-server again",
    )


def build_server(
    folder: Path, *, recipe: ServerRecipe, wheel: llama_wheel.Recipe, compilers: tuple[str, str]
) -> Path:
    """Compile the program in ``folder`` with locked tools; returns its path. Raises ``CommandFailed``."""
    log = folder.parent / f"{recipe.key}.log"
    log.unlink(missing_ok=True)
    tools = llama_wheel.install_tools(folder / "tools", environment.BUILD_LOCK, log)
    settings = llama_wheel.build_environment(wheel, compilers, tools / "bin")
    run_logged(
        [
            str(tools / "bin/python"),
            *("-m", "pip", "--disable-pip-version-check", "download", "--no-deps", "--no-build-isolation"),
            *("--require-hashes", "--no-binary", "llama-cpp-python", "--dest", str(folder / "sdist")),
            *("-r", str(environment.LLAMA_LOCK)),
        ],
        title="downloading the locked sources",
        log=log,
        step=r"^Collecting ",
        total=1,
        environment=settings,
    )
    sources = unpack_sources(next((folder / "sdist").glob("*.tar.gz")), folder / "sources")
    if recipe.faults:
        run_logged(
            [find_patch(), "-p1", "--fuzz=0", "-d", str(sources), "-i", str(FAULTS_PATCH)],
            title="planting faults",
            log=log,
            step=r"^patching ",
            total=len(re.findall(r"^\+\+\+ ", FAULTS_PATCH.read_text(), re.MULTILINE)),
        )
    found = llama_wheel.load_cached(cache_dir("wheels") / wheel.key)
    libraries = unpack_libraries(found, folder / "libraries")
    name = FAULTS_PROGRAM if recipe.faults else PROGRAM
    title = f"building {name} (once for this machine, about 3 minutes on 2 cores)"
    for command in (
        [
            *(
                "cmake",
                "-G",
                "Ninja",
                "-S",
                str(FOLDER),
                "-B",
                str(folder / "build"),
                "-DCMAKE_BUILD_TYPE=Release",
            ),
            *(f"-DLLAMA_SOURCE={sources}", f"-DLLAMA_LIBRARIES={libraries}"),
            *(f"-DCMAKE_INSTALL_RPATH={recipe.rpath}", "-DCMAKE_EXE_LINKER_FLAGS=-s"),
        ],
        ["cmake", "--build", str(folder / "build"), "--target", PROGRAM],
    ):
        run_logged(
            [shutil.which(command[0], path=settings["PATH"]), *command[1:]],
            title=title if "--build" in command else "configuring llama-server",
            log=log,
            step=r"^\[(?P<done>\d+)/(?P<total>\d+)\]",
            environment=settings,
        )
    return folder / "build/server" / PROGRAM


def install_program(built: Path, path: Path) -> None:
    """Put the program at ``path``, in one rename; nothing is written where it is there already."""
    if path.exists() and file_sha256(path) == file_sha256(built):
        return
    copy = path.with_name(f".{path.name}.new")
    shutil.copy2(built, copy)
    os.replace(copy, path)


def set_up(venv: Path, *, faults: bool) -> Path:
    """Take the program from the cache, built first if it is missing, and install
    it. Raises as ``build_server``.
    """
    if faults:
        find_patch()
    compilers = llama_wheel.find_compilers()
    wheel = llama_wheel.plan_recipe(environment.LLAMA_LOCK, compilers)
    recipe = plan_server(wheel, venv=venv, faults=faults)
    if llama_wheel.load_cached(cache_dir("wheels") / wheel.key) is None:
        raise UsageError("the wheel of llama.cpp is not in the cache", todo="run: make setup")
    built = llama_wheel.take_wheel(
        cache_dir("llama-server"),
        recipe=recipe,
        build=lambda folder: build_server(folder, recipe=recipe, wheel=wheel, compilers=compilers),
    )
    path = venv / "bin" / (FAULTS_PROGRAM if faults else PROGRAM)
    install_program(built, path)
    return path


def main(arguments: list[str]) -> int:
    """Exit code: 0 ready, 64 the machine lacks something, 70 download or build failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--venv", type=Path, default=REPOSITORY / ".venv")
    parser.add_argument("--faults", action="store_true", help="with faults planted in it")
    options = parser.parse_args(arguments)
    try:
        path = set_up(options.venv, faults=options.faults)
    except UsageError as error:
        print(f"samebytes: {error.line}", file=sys.stderr)
        return ExitCode.USAGE
    except (CommandFailed, subprocess.CalledProcessError) as error:
        tail = getattr(error, "tail", [])
        print(*tail, f"samebytes: llama-server was not built: {error}", sep=os.linesep, file=sys.stderr)
        return ExitCode.INTERNAL
    except KeyboardInterrupt:
        print("samebytes: interrupted; run it again to go on", file=sys.stderr)
        return 130
    print(f"samebytes: {path}")
    return ExitCode.PASS


if __name__ == "__main__":
    # A stopped build cleans up like an interrupted one.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(main(sys.argv[1:]))
