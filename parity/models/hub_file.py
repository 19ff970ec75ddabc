"""What is pinned of a Hub file, and where the Hub and its cache are."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from urllib.parse import urlsplit

from huggingface_hub import constants, get_token
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import build_hf_headers, validate_repo_id

from parity.errors import UsageError
from parity.models.families import ModelRow

REVISION = re.compile(r"[0-9a-f]{40}")
SHA256 = re.compile(r"[0-9a-f]{64}")
PINS = ("revision", "sha256", "size_bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class HubFile:
    """One file of one Hub repository; ``None`` means not looked up yet, never a guess.

    ``revision`` 40 hexadecimal digits (a commit, not a branch), ``sha256`` 64, ``size_bytes`` > 0.
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
        if self.revision is not None and not REVISION.fullmatch(self.revision):
            raise UsageError(
                f"revision {self.revision!r} is not 40 hexadecimal digits",
                where=self.repo,
                todo="pin a commit, not a branch: run parity lock",
            )
        if self.sha256 is not None and not SHA256.fullmatch(self.sha256):
            raise UsageError(f"sha256 {self.sha256!r} is not 64 hexadecimal digits", where=self.repo)
        if self.size_bytes is not None and self.size_bytes <= 0:
            raise UsageError(f"size_bytes {self.size_bytes} is not positive", where=self.repo)

    @property
    def unset(self) -> tuple[str, ...]:
        """Names of the pins that are missing; empty for a locked file."""
        return tuple(name for name in PINS if getattr(self, name) is None)


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

    @property
    def headers(self) -> dict[str, str]:
        return build_hf_headers(token=self.token or False, library_name="samebytes")
