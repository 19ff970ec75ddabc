"""SHA-256 of large files, computed once.

A note in the cache says for which size and modification time it holds.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from parity.store import cache_dir, file_sha256, save_text

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
