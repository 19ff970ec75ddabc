"""Some layers of a large file on the Hub, brought by range requests: real weights for a small machine.

Only the header and the chosen layers' tensors (with embeddings, last norm and output head) are transferred.
What comes of them is a model of its own, pinned by its own SHA-256: that of the whole file is never seen.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path

from filelock import FileLock
from huggingface_hub.utils import build_hf_headers, hf_raise_for_status, http_backoff, http_stream_backoff

from parity.errors import ExitCode, UsageError
from parity.models.builder import replaced_file
from parity.models.facts import derive_facts
from parity.models.families import ModelRow
from parity.models.gguf import read_open_header
from parity.models.hub import Fetched, HubFile, HubSettings, Progress, ask_hub, faults_told
from parity.models.slice import LayerRange, slice_open_model
from parity.models.splits import explain_stage_fault
from parity.models.unavailable import Unavailable
from parity.store import cache_dir, file_sha256

HEADER_BLOCK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class HubCut:
    """Layers of a Hub file; ``source`` has no digest. ``sha256`` is the cut's, None while nobody made it."""

    source: HubFile
    layers: LayerRange
    sha256: str | None = None

    @property
    def name(self) -> str:
        return f"layers {self.layers.start}:{self.layers.stop} of {self.source.name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class MadeCut:
    """A cut in the cache, with what pins it."""

    path: Path
    revision: str | None
    sha256: str
    size_bytes: int


def hub_cut(row: ModelRow) -> HubCut:
    """The cut of a manifest row that has ``layers``."""
    source = HubFile(repo=row.repo, file=row.file, revision=row.revision)
    return HubCut(source=source, layers=LayerRange.parse(row.layers), sha256=row.sha256)


def cut_path(sha256: str) -> Path:
    """Where a cut is kept: under its digest."""
    return cache_dir("cuts") / f"{sha256}.gguf"


def fetch_cut(cut: HubCut, settings: HubSettings) -> Fetched:
    """The pinned cut, verified, from the cache or made from the Hub's file.

    Raises ``Unavailable``: FAIL for another digest than the pinned one, UNKNOWN for all else, and
    ``UsageError`` for layers that are not in the file or that llama.cpp cannot run alone.
    """
    if cut.sha256 is None:
        raise Unavailable(f"{cut.name} is unlocked", why="its sha256 is unset", todo="run parity lock")
    path = cut_path(cut.sha256)
    if path.is_file() and file_sha256(path) == cut.sha256:
        return Fetched(path=path, was_cached=True)
    made = make_cut(cut, settings)
    if made.sha256 != cut.sha256:
        made.path.unlink()
        raise Unavailable(
            f"{cut.name} were removed: they have digest {made.sha256}, pinned is {cut.sha256}",
            todo="pin the revision that the digest was made of, or run parity lock --update",
            code=ExitCode.FAIL,
        )
    return Fetched(path=made.path, was_cached=False)


def make_cut(cut: HubCut, settings: HubSettings) -> MadeCut:
    """Transfer the header and the layers, write the model that they are, keep it under its digest."""
    if settings.offline:
        raise Unavailable(
            f"{cut.name} are not in the cache", why="HF_HUB_OFFLINE is set", todo="unset HF_HUB_OFFLINE"
        )
    with faults_told(cut.source, settings), FileLock(cache_dir("cuts") / ".lock"):
        served = ask_hub(cut.source, settings)
        with io.BufferedReader(RemoteFile(cut.source, settings), HEADER_BLOCK_BYTES) as data:
            header = read_open_header(data, Path(cut.source.name), data.raw.n_bytes)
            facts = derive_facts(header)
            if reason := explain_stage_fault(facts, cut.layers):
                raise UsageError(f"{cut.name} make no model", why=f"that part {reason}", todo="cut elsewhere")
            with replaced_file(cache_dir("cuts") / "fresh.gguf") as partial:
                with Progress(desc=cut.source.file, unit="B", unit_scale=True) as bar:
                    slice_open_model(header, data, cut.layers, partial, report=advance(bar))
        fresh = cache_dir("cuts") / "fresh.gguf"
        sha256, size_bytes = file_sha256(fresh), fresh.stat().st_size
        return MadeCut(
            path=fresh.replace(cut_path(sha256)),
            revision=served.commit_hash or cut.source.revision,
            sha256=sha256,
            size_bytes=size_bytes,
        )


def advance(bar: Progress) -> Callable[[int, int], None]:
    """``report(done, total)`` for a bar that learns its total from the first call."""

    def report(done: int, total: int) -> None:
        bar.total = total
        bar.update(done - bar.n)

    return report


class RemoteFile(io.RawIOBase):
    """A file behind a URL, ``n_bytes`` long, read by ranges. Wrap it in ``io.BufferedReader``.

    huggingface_hub's ``HfFileSystem`` reads by ranges as well, but takes whatever comes: from a server that
    ignores ranges, the whole file in memory for each block.
    """

    def __init__(self, target: HubFile, settings: HubSettings) -> None:
        self._name, self._url, self._timeout_s = target.name, settings.address(target), settings.timeout_s
        self._headers = build_hf_headers(token=settings.token or False, library_name="samebytes")
        self._place = 0
        with http_stream_backoff(
            "GET", self._url, headers=self._range(0, 1), timeout=self._timeout_s
        ) as response:
            hf_raise_for_status(response)
            whole = re.fullmatch(r"bytes 0-0/(\d+)", response.headers.get("Content-Range", ""))
            if response.status_code != HTTPStatus.PARTIAL_CONTENT or whole is None:
                raise Unavailable(f"{target.name} cannot be cut", why="the server does not serve ranges")
        self.n_bytes = int(whole[1])

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._place, io.SEEK_END: self.n_bytes}[whence]
        self._place = base + offset
        return self._place

    def readinto(self, buffer: memoryview) -> int:
        count = min(len(buffer), self.n_bytes - self._place)
        if count <= 0:
            return 0
        response = http_backoff(
            "GET", self._url, headers=self._range(self._place, self._place + count), timeout=self._timeout_s
        )
        hf_raise_for_status(response)
        if response.status_code != HTTPStatus.PARTIAL_CONTENT or len(response.content) != count:
            raise Unavailable(
                f"{self._name} was not served whole",
                why=f"{len(response.content)} bytes for {count}",
                todo="run parity fetch again",
            )
        buffer[:count] = response.content
        self._place += count
        return count

    def _range(self, start: int, stop: int) -> dict[str, str]:
        return {**self._headers, "Accept-Encoding": "identity", "Range": f"bytes={start}-{stop - 1}"}
