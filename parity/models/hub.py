"""Files of the Hugging Face Hub: pinned, fetched once, verified, kept in the Hub's own cache."""

from __future__ import annotations

import difflib
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from huggingface_hub import HfApi, constants, get_hf_file_metadata, hf_hub_url
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    RemoteEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import httpx

from parity.errors import ExitCode
from parity.models.hub_cache import CachePlace
from parity.models.hub_file import SHA256, HubFile, HubSettings
from parity.models.transfer import (
    CutShort,
    ReportProgress,
    RetryPolicy,
    Transfer,
    asked_wait_s,
    run_transfer,
    run_with_patience,
)
from parity.models.unavailable import Unavailable
from parity.store import file_sha256


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetched:
    """A verified file. ``was_cached`` tells that no byte was transferred."""

    path: Path
    pinned: HubFile
    was_cached: bool


def describe_fault(error: Exception, target: HubFile, settings: HubSettings) -> Unavailable:
    """The one line that a reader needs, for everything the Hub or the network can answer."""
    name = f"{target.repo}/{target.file}"
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
        asked = asked_wait_s(error.response)
        return Unavailable(
            f"{name} was not served",
            why=f"HTTP {status}, and patience ended",
            todo=f"try again after {asked:.0f} s" if asked else "try again later",
        )
    if isinstance(error, httpx.ConnectError):
        return Unavailable(
            f"the Hub at {settings.endpoint} cannot be reached for {name}",
            why=str(error),
            todo="check the network and HF_ENDPOINT",
        )
    return Unavailable(
        f"{name} was not served",
        why=str(error) or type(error).__name__,
        todo="run parity fetch again, it resumes",
    )


FAULTS = (HfHubHTTPError, httpx.TransportError, CutShort)


def look_up(target: HubFile, *, settings: HubSettings, policy: RetryPolicy) -> HubFile:
    """``target`` with every pin that the Hub publishes; without a revision, at the default branch's head.

    A file that is not stored as a large file has no published SHA-256: those pins stay
    ``None``. Raises ``Unavailable``.
    """
    if settings.offline:
        raise Unavailable(
            f"{target.repo} cannot be looked up", why="HF_HUB_OFFLINE is set", todo="unset HF_HUB_OFFLINE"
        )
    api = HfApi(endpoint=settings.endpoint, token=settings.token or False, library_name="samebytes")
    try:
        info = run_with_patience(
            lambda: api.model_info(
                target.repo, revision=target.revision, files_metadata=True, timeout=settings.timeout_s
            ),
            policy,
        )
    except FAULTS as error:
        raise describe_fault(error, target, settings) from error
    by_name = {sibling.rfilename: sibling for sibling in info.siblings or []}
    entry = by_name.get(target.file)
    if entry is None:
        near = difflib.get_close_matches(target.file, list(by_name), n=2)
        raise Unavailable(
            f"file {target.file} is not in {target.repo}",
            why=f"revision {info.sha} does not have it",
            todo=f"did you mean {' or '.join(near)}?" if near else "correct the row's file",
        )
    large = entry.lfs
    return replace(
        target,
        revision=info.sha,
        sha256=large.sha256 if large else None,
        size_bytes=large.size if large else None,
    )


def place_of(target: HubFile, settings: HubSettings) -> CachePlace:
    """Where a locked file belongs in the cache."""
    return CachePlace(
        cache=settings.cache,
        repo=target.repo,
        file=target.file,
        revision=target.revision,
        sha256=target.sha256,
    )


def fetch_file(
    target: HubFile,
    *,
    settings: HubSettings,
    policy: RetryPolicy,
    report: ReportProgress,
    say: Callable[[str], None],
    free_bytes: Callable[[Path], int] | None = None,
) -> Fetched:
    """The locked file, verified, from the cache or the Hub; downloaded once however many processes ask.

    ``say`` gets one line about anything slow or odd (waiting for another process, replacing a damaged file).
    Raises ``Unavailable``: FAIL for a digest that contradicts the manifest, UNKNOWN for all else.
    """
    if target.unset:
        raise Unavailable(
            f"{target.repo}/{target.file} is unlocked",
            why=f"{', '.join(target.unset)} unset",
            todo="run parity lock",
        )
    place = place_of(target, settings)
    path = place.verified()
    if path is not None:
        return Fetched(path=path, pinned=target, was_cached=True)
    if settings.offline:
        if (damaged := place.found()) is not None:
            raise _contradiction(str(damaged), target, file_sha256(damaged))
        raise Unavailable(
            f"{target.repo}/{target.file} is not in the cache",
            why="HF_HUB_OFFLINE is set",
            todo="unset HF_HUB_OFFLINE or fill the cache first",
        )
    try:
        _check_served(target, settings, policy)
        with place.locked(say):
            if (path := place.verified()) is not None:
                return Fetched(path=path, pinned=target, was_cached=True)
            if (damaged := place.found()) is not None:
                say(f"{damaged} is damaged and is fetched again")
            _check_room(target, place, free_bytes or _free_bytes)
            return _download(target, place, settings, policy, report)
    except FAULTS as error:
        raise describe_fault(error, target, settings) from error


def _contradiction(what: str, target: HubFile, found: str) -> Unavailable:
    return Unavailable(
        f"{what} has digest {found}, the manifest says {target.sha256}",
        todo="run parity lock to compare the manifest with the Hub",
        code=ExitCode.FAIL,
    )


def _check_served(target: HubFile, settings: HubSettings, policy: RetryPolicy) -> None:
    """Compare what the Hub announces with the manifest before any byte is transferred."""
    url = hf_hub_url(target.repo, target.file, revision=target.revision, endpoint=settings.endpoint)
    served = run_with_patience(
        lambda: get_hf_file_metadata(url, headers=settings.headers, token=False, timeout=settings.timeout_s),
        policy,
    )
    name = f"{target.repo}/{target.file}"
    if served.commit_hash is None:
        raise Unavailable(
            f"{settings.endpoint} does not answer like a Hub",
            why="no X-Repo-Commit header",
            todo="check HF_ENDPOINT",
        )
    if served.commit_hash != target.revision:
        raise Unavailable(
            f"{name} was served from commit {served.commit_hash}, the manifest says {target.revision}",
            todo="run parity lock",
            code=ExitCode.FAIL,
        )
    if served.etag and SHA256.fullmatch(served.etag) and served.etag != target.sha256:
        raise _contradiction(f"{name} on the Hub", target, served.etag)
    if served.size is not None and served.size != target.size_bytes:
        raise Unavailable(
            f"{name} has {served.size} bytes on the Hub, the manifest says {target.size_bytes}",
            todo="run parity lock",
            code=ExitCode.FAIL,
        )
    if target.size_bytes > constants.MAX_HTTP_DOWNLOAD_SIZE:
        raise Unavailable(
            f"{name} has {target.size_bytes} bytes",
            why=f"the Hub serves no more than {constants.MAX_HTTP_DOWNLOAD_SIZE} in one transfer",
            todo="choose a smaller quantisation",
        )


def _check_room(target: HubFile, place: CachePlace, free_bytes: Callable[[Path], int]) -> None:
    missing = target.size_bytes - place.partial_bytes()
    if (free := free_bytes(place.partial.parent)) < missing:
        raise Unavailable(
            f"disk full: {target.repo}/{target.file} needs {missing} more bytes",
            why=f"{place.partial.parent} has {free} free",
            todo="free some space or point HF_HOME elsewhere",
        )


def _download(
    target: HubFile, place: CachePlace, settings: HubSettings, policy: RetryPolicy, report: ReportProgress
) -> Fetched:
    url = hf_hub_url(target.repo, target.file, revision=target.revision, endpoint=settings.endpoint)
    run_transfer(
        Transfer(
            url=url,
            partial=place.partial,
            size_bytes=target.size_bytes,
            headers=settings.headers,
            timeout_s=settings.timeout_s,
        ),
        policy=policy,
        report=report,
    )
    if (found := file_sha256(place.partial)) != target.sha256:
        place.partial.unlink()
        raise _contradiction(f"the download of {target.repo}/{target.file} was removed: it", target, found)
    return Fetched(path=place.accept_partial(), pinned=target, was_cached=False)


def _free_bytes(directory: Path) -> int:
    return shutil.disk_usage(directory).free
