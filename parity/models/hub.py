"""Files of the Hugging Face Hub: what is pinned of them, and the one line that says why one cannot be had.

huggingface_hub transfers, resumes after a cut, waits, locks and keeps; its cache is the cache. What is ours
is the pin: a file is what its SHA-256 says, whoever served it.
"""

from __future__ import annotations

import difflib
import errno
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from urllib.parse import urlsplit

from filelock import FileLock
from huggingface_hub import (
    HfApi,
    HfFileMetadata,
    constants,
    get_hf_file_metadata,
    get_token,
    hf_hub_download,
    hf_hub_url,
    try_to_load_from_cache,
)
from huggingface_hub.errors import (
    FileMetadataError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RemoteEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.file_download import http_get, repo_folder_name
from huggingface_hub.utils import build_hf_headers, httpx, tqdm, validate_repo_id

from parity.errors import ExitCode, UsageError
from parity.models.builder import replaced_file
from parity.models.families import ModelRow
from parity.models.lock_file import PINS, REVISION, SHA256
from parity.models.unavailable import Unavailable
from parity.store import file_sha256

FAULTS = (HfHubHTTPError, httpx.TransportError, FileMetadataError, LocalEntryNotFoundError)
LOG_INTERVAL_S = 10
NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True, slots=True, kw_only=True)
class HubFile:
    """One file of one Hub repository; ``None`` means not looked up yet, never a guess.

    ``sha256`` (64 hexadecimal digits) is what pins it. ``revision`` (40, a commit, not a branch) and
    ``size_bytes`` (> 0) are checked where known; without a revision the default branch's head is asked.
    """

    repo: str
    file: str
    revision: str | None = None
    sha256: str | None = None
    size_bytes: int | None = None

    def __post_init__(self) -> None:
        try:
            validate_repo_id(self.repo)
        except HFValidationError as error:
            raise UsageError(f"repo {self.repo!r} is not a Hub repository", why=str(error)) from error
        path = PurePosixPath(self.file)
        if not self.file or path.is_absolute() or ".." in path.parts or "\\" in self.file:
            raise UsageError(f"file {self.file!r} is not a path inside the repository", where=self.repo)
        if self.revision is not None and not re.fullmatch(REVISION, self.revision):
            raise UsageError(
                f"revision {self.revision!r} is not 40 hexadecimal digits",
                where=self.repo,
                todo="pin a commit, not a branch: run parity lock",
            )
        if self.sha256 is not None and not re.fullmatch(SHA256, self.sha256):
            raise UsageError(f"sha256 {self.sha256!r} is not 64 hexadecimal digits", where=self.repo)
        if self.size_bytes is not None and self.size_bytes <= 0:
            raise UsageError(f"size_bytes {self.size_bytes} is not positive", where=self.repo)

    @property
    def name(self) -> str:
        return f"{self.repo}/{self.file}"


def hub_file(row: ModelRow) -> HubFile:
    """The Hub file of a manifest row whose source is the Hub."""
    return HubFile(repo=row.repo, file=row.file, **{pin: getattr(row, pin) for pin in PINS})


@dataclass(frozen=True, slots=True, kw_only=True)
class HubSettings:
    """Where the Hub and its cache are; ``from_environment`` follows the HF_* variables."""

    endpoint: str
    cache: Path
    token: str | None = field(default=None, repr=False)
    offline: bool = False
    timeout_s: float = 10.0

    def __post_init__(self) -> None:
        if urlsplit(self.endpoint).scheme not in ("http", "https"):
            raise UsageError(
                f"endpoint {self.endpoint!r} is not an http or https address", where="HF_ENDPOINT"
            )

    @classmethod
    def from_environment(cls) -> HubSettings:
        """What huggingface_hub itself read from the environment when it was imported (and its token file)."""
        offline = constants.is_offline_mode()
        return cls(
            endpoint=constants.ENDPOINT,
            cache=Path(constants.HF_HUB_CACHE),
            offline=offline,
            token=None if offline else get_token(),
            timeout_s=constants.HF_HUB_DOWNLOAD_TIMEOUT,
        )

    def address(self, target: HubFile) -> str:
        """The URL of ``target``, at its revision or at the default branch's head."""
        return hf_hub_url(target.repo, target.file, revision=target.revision, endpoint=self.endpoint)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetched:
    """A verified file. ``was_cached`` tells that no byte was transferred."""

    path: Path
    was_cached: bool


def look_up(target: HubFile, settings: HubSettings) -> HubFile:
    """``target`` with every pin that the Hub publishes; without a revision, at the default branch's head.

    A file that is not stored as a large file has no published SHA-256: those pins stay
    ``None``. Raises ``Unavailable``.
    """
    if settings.offline:
        raise Unavailable(
            f"{target.repo} cannot be looked up", why="HF_HUB_OFFLINE is set", todo="unset HF_HUB_OFFLINE"
        )
    api = HfApi(endpoint=settings.endpoint, token=settings.token or False, library_name="samebytes")
    with faults_told(target, settings):
        info = api.model_info(
            target.repo, revision=target.revision, files_metadata=True, timeout=settings.timeout_s
        )
    by_name = {sibling.rfilename: sibling for sibling in info.siblings or []}
    if target.file not in by_name:
        near = difflib.get_close_matches(target.file, list(by_name), n=2)
        raise Unavailable(
            f"file {target.file} is not in {target.repo}",
            why=f"revision {info.sha} does not have it",
            todo=f"did you mean {' or '.join(near)}?" if near else "correct the row's file",
        )
    large = by_name[target.file].lfs
    return replace(
        target,
        revision=info.sha,
        sha256=large.sha256 if large else None,
        size_bytes=large.size if large else None,
    )


def cached_files(target: HubFile, cache: Path) -> list[Path]:
    """Where the Hub's cache may hold the file: its revision's snapshot, and the blob named by its digest.

    What exists of both, not verified. A blob serves when another revision with the same content was fetched.
    """
    found = try_to_load_from_cache(target.repo, target.file, cache_dir=cache, revision=target.revision)
    snapshot = [Path(found)] if isinstance(found, str) else []
    blob = _blob(target, cache)
    return [*snapshot, *([blob] if blob.is_file() else [])]


def fetch_file(
    target: HubFile,
    settings: HubSettings,
    *,
    say: Callable[[str], None],
    free_bytes: Callable[[Path], int] = lambda folder: shutil.disk_usage(folder).free,
) -> Fetched:
    """The pinned file, verified, from the cache or the Hub; downloaded once however many processes ask.

    ``say`` gets one line about anything odd. Raises ``Unavailable``: FAIL for a digest, size or revision that
    contradicts the pins, UNKNOWN for all else.
    """
    if target.sha256 is None:
        raise Unavailable(f"{target.name} is unlocked", why="its sha256 is unset", todo="run parity lock")
    cached = cached_files(target, settings.cache)
    for path in cached:
        if file_sha256(path) == target.sha256:
            return Fetched(path=path, was_cached=True)
    if settings.offline:
        if cached:
            raise _contradiction(str(cached[0]), target, file_sha256(cached[0]))
        raise Unavailable(
            f"{target.name} is not in the cache",
            why="HF_HUB_OFFLINE is set",
            todo="unset HF_HUB_OFFLINE or fetch it first",
        )
    with faults_told(target, settings):
        served = ask_hub(target, settings)
        _check_room(served, target, settings, free_bytes)
        if served.commit_hash is None:
            path = _download_by_digest(target, settings, served)
        else:
            path = _download(target, settings, served, say)
    if (found := file_sha256(path)) != target.sha256:
        path.resolve().unlink()
        path.unlink(missing_ok=True)
        raise _contradiction(f"the download of {target.name} was removed: it", target, found)
    return Fetched(path=path, was_cached=False)


def ask_hub(target: HubFile, settings: HubSettings) -> HfFileMetadata:
    """What the Hub announces, compared with the pins before any byte is transferred.

    A mirror need not name commits; then its ETag means nothing either, and the digest of what comes decides.
    """
    served = get_hf_file_metadata(
        settings.address(target),
        token=settings.token or False,
        timeout=settings.timeout_s,
        library_name="samebytes",
        endpoint=settings.endpoint,
        retry_on_errors=True,
    )
    if served.commit_hash is not None:
        if target.revision not in (None, served.commit_hash):
            raise Unavailable(
                f"{target.name} was served from commit {served.commit_hash}, pinned is {target.revision}",
                todo="run parity lock",
                code=ExitCode.FAIL,
            )
        digest = served.etag if re.fullmatch(SHA256, served.etag or "") else None
        if None not in (digest, target.sha256) and digest != target.sha256:
            raise _contradiction(f"{target.name} on the Hub", target, digest)
    if None not in (served.size, target.size_bytes) and served.size != target.size_bytes:
        raise Unavailable(
            f"{target.name} has {served.size} bytes on the Hub, pinned are {target.size_bytes}",
            todo="run parity lock",
            code=ExitCode.FAIL,
        )
    return served


def _check_room(
    served: HfFileMetadata, target: HubFile, settings: HubSettings, free_bytes: Callable[[Path], int]
) -> None:
    """huggingface_hub only warns; hours of transfer that end in a full disk help nobody."""
    needed = target.size_bytes or served.size or 0
    settings.cache.mkdir(parents=True, exist_ok=True)
    if (free := free_bytes(settings.cache)) < needed:
        raise Unavailable(
            f"disk full: {target.name} needs {needed} bytes",
            why=f"{settings.cache} has {free} free",
            todo="free some space or point HF_HOME elsewhere",
        )


def _download(
    target: HubFile, settings: HubSettings, served: HfFileMetadata, say: Callable[[str], None]
) -> Path:
    there = try_to_load_from_cache(
        target.repo, target.file, cache_dir=settings.cache, revision=served.commit_hash
    )
    damaged = isinstance(there, str) and file_sha256(Path(there)) != target.sha256
    if damaged:
        say(f"{there} is damaged and is fetched again")
        if not Path(there).is_symlink():  # huggingface_hub replaces the blob behind a link, not a plain file
            Path(there).unlink(missing_ok=True)
    return Path(
        hf_hub_download(
            target.repo,
            target.file,
            revision=target.revision,
            library_name="samebytes",
            cache_dir=settings.cache,
            force_download=damaged,
            etag_timeout=settings.timeout_s,
            token=settings.token or False,
            endpoint=settings.endpoint,
            tqdm_class=Progress,
        )
    )


def _download_by_digest(target: HubFile, settings: HubSettings, served: HfFileMetadata) -> Path:
    """From a server that names no commit, which huggingface_hub's cache needs: the digest is the name."""
    blob = _blob(target, settings.cache)
    blob.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{blob}.lock"):
        if not blob.is_file() or file_sha256(blob) != target.sha256:
            with replaced_file(blob) as partial, open(partial, "wb") as file:
                http_get(
                    settings.address(target),
                    file,
                    headers=build_hf_headers(token=settings.token or False, library_name="samebytes"),
                    expected_size=target.size_bytes or served.size,
                    displayed_filename=target.file,
                    tqdm_class=Progress,
                )
    return blob


def _blob(target: HubFile, cache: Path) -> Path:
    return cache / repo_folder_name(repo_id=target.repo, repo_type="model") / "blobs" / str(target.sha256)


class Progress(tqdm):
    """huggingface_hub's bar on a terminal; elsewhere (a CI log), otherwise silent, a line now and then."""

    def __init__(self, *arguments: object, **options: object) -> None:
        self.on_terminal = sys.stderr.isatty()
        if not self.on_terminal:
            options |= {"disable": bool(options.get("disable")), "mininterval": LOG_INTERVAL_S}
        super().__init__(*arguments, **options)

    def display(self, msg: str | None = None, pos: int | None = None) -> None:
        if self.on_terminal:
            super().display(msg, pos)
        else:
            print(str(self) if msg is None else msg, file=sys.stderr, flush=True)


@contextmanager
def faults_told(target: HubFile, settings: HubSettings) -> Iterator[None]:
    """Turns what huggingface_hub, the network or the disk raises into one line."""
    try:
        yield
    except FAULTS as error:
        # A LocalEntryNotFoundError says that the Hub failed and the cache has nothing; its cause says how.
        cause = error.__cause__ if isinstance(error, LocalEntryNotFoundError) else None
        raise describe_fault(cause or error, target, settings) from error
    except OSError as error:
        raise _disk_fault(error, target, settings) from error


def describe_fault(error: BaseException, target: HubFile, settings: HubSettings) -> Unavailable:
    """The one line that a reader needs, for everything the Hub or the network can answer."""
    status = error.response.status_code if isinstance(error, HfHubHTTPError) else None
    if isinstance(error, GatedRepoError) or status in (401, 403):
        had = "the token was refused" if settings.token else "no token was sent"
        return Unavailable(
            f"{target.repo} is gated or private",
            why=f"HTTP {status}, {had}",
            todo="accept its licence on the Hub and set HF_TOKEN to a token of that account",
        )
    if isinstance(error, RevisionNotFoundError):
        return Unavailable(
            f"revision {target.revision} is not in {target.repo}",
            why="HTTP 404, the Hub's history moved",
            todo="run parity lock --update and read the diff",
        )
    if isinstance(error, RemoteEntryNotFoundError):
        return Unavailable(
            f"file {target.file} is not in {target.repo}", why="HTTP 404", todo="correct the row's file"
        )
    if isinstance(error, RepositoryNotFoundError) or status == 404:
        return Unavailable(
            f"{target.repo} is not on the Hub", why=f"HTTP {status}", todo="correct the row's repo"
        )
    if status is not None:
        return Unavailable(
            f"{target.name} was not served", why=f"HTTP {status}, and patience ended", todo="try again later"
        )
    if isinstance(error, httpx.ConnectError):
        return Unavailable(
            f"the Hub at {settings.endpoint} cannot be reached for {target.name}",
            why=str(error),
            todo="check the network and HF_ENDPOINT",
        )
    return Unavailable(
        f"{target.name} was not served",
        why=str(error) or type(error).__name__,
        todo="run parity fetch again",
    )


def _disk_fault(error: OSError, target: HubFile, settings: HubSettings) -> Exception:
    if error.errno in NO_ROOM:
        return Unavailable(
            f"disk full while {target.name} was written",
            why=str(settings.cache),
            todo="free some space or point HF_HOME elsewhere, then run parity fetch again",
        )
    if error.errno is not None:
        return UsageError(
            "the Hub cache cannot be written",
            where=str(settings.cache),
            why=error.strerror or str(error),
            todo="point HF_HOME at a writable directory",
        )
    return Unavailable(  # huggingface_hub's complaint that other than the announced number of bytes came
        f"{target.name} was not served whole",
        why=str(error).split("\n", maxsplit=1)[0],
        todo="run parity fetch again",
    )


def _contradiction(what: str, target: HubFile, found: str) -> Unavailable:
    return Unavailable(
        f"{what} has digest {found}, pinned is {target.sha256}",
        todo="run parity lock to compare the pins with the Hub",
        code=ExitCode.FAIL,
    )
