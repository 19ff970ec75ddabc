"""Where samebytes keeps what it can make again, and how it writes a file: whole or not at all."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from pathlib import Path

from parity.errors import UsageError

REPOSITORY = Path(__file__).resolve().parent.parent
"""Where the packages lie: the checkout, or the site-packages that the wheel was installed into."""

INSTALLED = REPOSITORY / "samebytes"
SHIPPED = INSTALLED if (INSTALLED / "manifests").is_dir() else REPOSITORY
"""Where ``manifests/``, ``splits/``, ``golden/`` and ``requirements/`` of the project itself lie."""

PROJECT_VARIABLE = "SAMEBYTES_PROJECT"


def project_dir() -> Path:
    """The caller's own project: ``SAMEBYTES_PROJECT``, else the current folder."""
    return Path(os.environ.get(PROJECT_VARIABLE) or Path.cwd())


def own_folder(name: str) -> Path | None:
    """The folder ``name`` of the caller's own project; None where it has none or where it is ours."""
    folder = project_dir() / name
    return folder if folder.is_dir() and folder.resolve() != (SHIPPED / name).resolve() else None


def is_named_project() -> bool:
    """Whether the caller said which project is meant: then everything in its folders is for us."""
    return bool(os.environ.get(PROJECT_VARIABLE))


def cache_dir(*parts: str) -> Path:
    """A directory below the cache root, created on demand.

    The root is ``SAMEBYTES_CACHE``, else ``$XDG_CACHE_HOME/samebytes``, else ``~/.cache/samebytes``.
    """
    root = os.environ.get("SAMEBYTES_CACHE")
    if root is None:
        root = str(Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "samebytes")
    path = Path(root, *parts)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            "cache directory cannot be created",
            where=str(path),
            why=str(error.strerror),
            todo="point SAMEBYTES_CACHE at a writable directory",
        ) from error
    return path


def save_bytes(path: Path, data: bytes, *, durable: bool = True) -> None:
    """Write ``data`` to ``path`` atomically: readers see the old file or the new one, never a part.

    ``durable`` waits for the disk; what can be made again and is checked when read need not.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def save_text(path: Path, text: str, *, durable: bool = True) -> None:
    """``save_bytes`` of UTF-8 text."""
    save_bytes(path, text.encode(), durable=durable)


def file_sha256(path: Path) -> str:
    """Hexadecimal SHA-256 of a file's content, read in 1 MiB blocks."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# -- SHA-256 of large files, computed once.
#
# A note in the cache says for which size and modification time it holds.

ALWAYS_HASHED_BYTES = (
    16 << 20
)  # smaller files are hashed every time, which costs less than a tenth of a second


def verified_sha256(path: Path) -> str:
    """SHA-256 of ``path``. A large file is read only if it changed (size, time, inode)."""
    path = path.resolve()
    state = path.stat()
    if state.st_size <= ALWAYS_HASHED_BYTES:
        return file_sha256(path)
    stamp = [state.st_size, state.st_mtime_ns, state.st_ino]
    note = cache_dir("digests") / f"{hashlib.sha256(str(path).encode()).hexdigest()[:32]}.json"
    try:
        known = json.loads(note.read_text())
        if known["stamp"] == stamp:
            return known["sha256"]
    except (OSError, ValueError, KeyError, TypeError):
        pass  # no note, or an unreadable one: hash and write a new one
    digest = file_sha256(path)
    save_text(note, json.dumps({"path": str(path), "stamp": stamp, "sha256": digest}))
    return digest


def sidecar(path: Path) -> Path:
    """The JSON file beside a model that was made here and whose digest can't be pinned in a manifest."""
    return path.with_name(f"{path.name}.json")
