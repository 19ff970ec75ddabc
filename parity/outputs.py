"""Files that a user names for a result: looked at before the work, written through links and devices."""

from __future__ import annotations

import errno
import os
import stat
import tempfile
from pathlib import Path
from typing import Any

import click

from parity.errors import OutputError, UsageError
from parity.store import save_bytes

# What a full, read-only or vanished place for output says; anything else that the system refuses is a bug.
OUTPUT_ERRNOS = frozenset(
    {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EPIPE, errno.EFBIG, errno.EIO, errno.ENXIO}
)


def check_output(path: Path) -> None:
    """Find out before the work whether a result can be written to ``path``. Raises ``UsageError``."""
    try:
        if is_stream(path):
            if not os.access(path, os.W_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
            return
        target = path.resolve()
        if target.exists() and not target.is_file():
            raise UsageError(
                "the output is no file",
                where=str(path),
                why="it is a folder" if target.is_dir() else "it is neither a file nor a stream",
                todo="name a file",
            )
        if target.exists():
            os.close(os.open(target, os.O_WRONLY))
        check_output_folder(target.parent)
    except (OSError, RuntimeError) as error:  # the second: a link to itself
        raise UsageError("output cannot be written", where=str(path), why=_reason(error)) from error


def check_output_folder(path: Path) -> None:
    """Find out whether files can be made in the folder, or it can itself be made. Raises ``UsageError``."""
    try:
        path = path.resolve()
        while not path.exists():
            path = path.parent
        handle, name = tempfile.mkstemp(dir=path, prefix=".probe.")
        os.close(handle)
        os.unlink(name)
    except (OSError, RuntimeError) as error:
        raise UsageError("output folder cannot be used", where=str(path), why=_reason(error)) from error


def save_output(path: Path, content: str | bytes) -> None:
    """Write a result where a user wants it. Raises ``OutputError``.

    A file is replaced whole or not at all; a link stays and its target is written;
    a device or pipe is written to.
    """
    data = content.encode() if isinstance(content, str) else content
    try:
        if is_stream(path):
            _write(path, data, os.O_APPEND | os.O_NONBLOCK)
        elif path.exists() and path.stat().st_nlink > 1:  # another name of the file must see it too
            _write(path, data, os.O_TRUNC)
        else:
            save_bytes(path.resolve(), data)
    except (OSError, RuntimeError) as error:
        raise OutputError("output cannot be written", where=str(path), why=_reason(error)) from error


def is_stream(path: Path) -> bool:
    """Whether there is a device or a pipe, or the name of one of this process's own open files."""
    if str(path).startswith(("/dev/", "/proc/")):
        return path.exists()
    try:
        mode = path.stat().st_mode
    except OSError:  # nothing there, or no name that a file could have
        return False
    return stat.S_ISCHR(mode) or stat.S_ISFIFO(mode)


def _write(path: Path, data: bytes, flags: int) -> None:
    handle = os.open(path, os.O_WRONLY | flags)  # not blocking: a pipe that nobody reads is an error
    os.set_blocking(handle, True)
    with os.fdopen(handle, "wb") as file:
        file.write(data)


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)


class OutputPath(click.Path):
    """A file for a result, or with ``folder`` a folder for several: found out to be writable when the command
    line is read, before any work. ``seekable`` refuses devices and pipes.
    """

    def __init__(self, *, folder: bool = False, seekable: bool = False) -> None:
        super().__init__(path_type=Path)
        self.folder, self.seekable = folder, seekable

    def convert(self, value: Any, parameter: click.Parameter | None, context: click.Context | None) -> Path:
        path = Path(os.fsdecode(super().convert(value, parameter, context)))
        if not context or not context.resilient_parsing:
            if self.seekable and is_stream(path):
                raise UsageError("the output is no file", where=str(path), why="it is a device or a pipe")
            (check_output_folder if self.folder else check_output)(path)
        return path


OUTPUT_FILE = OutputPath()
OUTPUT_FOLDER = OutputPath(folder=True)
SEEKABLE_FILE = OutputPath(seekable=True)
