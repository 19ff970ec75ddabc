"""One locked file's place in the Hub cache.

The layout is the one that huggingface_hub uses where it cannot make symbolic links: a regular file below
``snapshots/<revision>/``. Other programs find it there, and no link can dangle. The lock file is
huggingface_hub's own, so its downloads and ours exclude each other.
"""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout
from huggingface_hub import try_to_load_from_cache
from huggingface_hub.file_download import repo_folder_name

from parity.errors import UsageError
from parity.store import file_sha256


@dataclass(frozen=True, slots=True, kw_only=True)
class CachePlace:
    """Paths of a file that is pinned by ``revision`` (40 hexadecimal digits) and ``sha256`` (64)."""

    cache: Path
    repo: str
    file: str
    revision: str
    sha256: str

    @property
    def folder(self) -> Path:
        return self.cache / repo_folder_name(repo_id=self.repo, repo_type="model")

    @property
    def final(self) -> Path:
        return self.folder / "snapshots" / self.revision / self.file

    @property
    def partial(self) -> Path:
        return self.folder / "blobs" / f"{self.sha256}.incomplete"

    def found(self) -> Path | None:
        """The file of this revision, whoever put it there; not verified."""
        found = try_to_load_from_cache(self.repo, self.file, cache_dir=self.cache, revision=self.revision)
        return Path(found) if isinstance(found, str) else None

    def verified(self) -> Path | None:
        """This revision's file if its digest is right, else its content from another revision, else None.

        A new commit of a repository rarely changes the weights; the link saves a download of gigabytes.
        """
        path = self.found()
        if path is not None and file_sha256(path) == self.sha256:
            return path
        others = [
            self.folder / "blobs" / self.sha256,
            *sorted(self.folder.glob(f"snapshots/*/{_literal(self.file)}")),
        ]
        for other in others:
            if other.is_file() and other != path and file_sha256(other) == self.sha256:
                return self._adopt(other.resolve())
        return None

    def partial_bytes(self) -> int:
        return self.partial.stat().st_size if self.partial.exists() else 0

    def accept_partial(self) -> Path:
        """Move the finished partial file into place: readers see all of it or nothing."""
        self.final.parent.mkdir(parents=True, exist_ok=True)
        os.replace(self.partial, self.final)
        return self.final

    def _adopt(self, other: Path) -> Path:
        self.final.parent.mkdir(parents=True, exist_ok=True)
        fresh = self.final.with_name(f".{self.final.name}.{uuid.uuid4().hex}")
        try:
            try:
                os.link(other, fresh)
            except OSError:  # no hard links on this file system
                shutil.copyfile(other, fresh)
            os.replace(fresh, self.final)
        finally:
            fresh.unlink(missing_ok=True)
        return self.final

    @contextmanager
    def locked(self, say: Callable[[str], None]) -> Iterator[None]:
        """Hold this file's lock; directories exist inside. ``say`` is told when another process holds it."""
        path = self.cache / ".locks" / self.folder.name / f"{self.sha256}.lock"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self.partial.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(
                "the Hub cache cannot be written",
                where=str(self.cache),
                why=str(error.strerror),
                todo="point HF_HOME at a writable directory",
            ) from error
        lock = FileLock(path)
        try:
            lock.acquire(timeout=0)
        except Timeout:
            say(f"{self.repo}/{self.file} is being fetched by another process; waiting for it")
            lock.acquire()
        try:
            yield
        finally:
            lock.release()


def _literal(name: str) -> str:
    """``name`` as a glob pattern that matches only itself."""
    return "".join(f"[{letter}]" if letter in "*?[" else letter for letter in name)
