"""A Hub and a cache, ready for a test."""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from parity.errors import ExitCode
from parity.models.hub import Fetched, HubFile, HubSettings, fetch_file
from parity.models.unavailable import Unavailable
from tests.parity.models.hub.server import HubServer

REPO, FILE = "maker/tiny-gguf", "tiny-q8_0.gguf"
FIRST, SECOND = "1" * 40, "2" * 40


def weights(seed: int, size_bytes: int = 300_000) -> bytes:
    """Bytes that no compression and no accident can make equal to others."""
    return b"GGUF" + random.Random(seed).randbytes(size_bytes - 4)


def pinned(body: bytes, *, revision: str | None = FIRST, file: str = FILE, repo: str = REPO) -> HubFile:
    return HubFile(
        repo=repo, file=file, revision=revision, sha256=hashlib.sha256(body).hexdigest(), size_bytes=len(body)
    )


@dataclass
class Desk:
    """A server, a cache and what was said; ``fetch`` is ``fetch_file`` with these."""

    hub: HubServer
    settings: HubSettings
    said: list[str] = field(default_factory=list)

    def fetch(self, target: HubFile, **options: object) -> Fetched:
        return fetch_file(target, options.pop("settings", self.settings), say=self.said.append, **options)


def leftovers(desk: Desk) -> list[Path]:
    """What of a transfer is still in the cache although it never became a file."""
    return sorted(
        path
        for path in desk.settings.cache.rglob("*")
        if path.name.endswith(".incomplete") or path.is_symlink() and not path.exists()
    )


def refused(desk: Desk, target: HubFile, code: ExitCode, *words: str, **options: object) -> str:
    """The one line of the refusal, which has this verdict and these words."""
    with pytest.raises(Unavailable) as caught:
        desk.fetch(target, **options)
    line = caught.value.line
    assert caught.value.code is code
    assert "\n" not in line
    for word in words:
        assert word in line, line
    return line
