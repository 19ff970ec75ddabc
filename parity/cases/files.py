"""Case files: what a failing run writes, and ``parity replay`` and its like read."""

from __future__ import annotations

import hashlib
from pathlib import Path

from parity.errors import UsageError
from parity.records import Case
from parity.store import save_text


def load_case(path: Path) -> Case:
    """The case in a file (UTF-8). Raises ``UsageError`` that names the file and what is wrong."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            "case file cannot be read", where=str(path), why=str(error), todo="name a case file"
        ) from error
    return Case.from_json(text, where=str(path))


def save_failing_case(case: Case, folder: Path, *, stderr: str = "") -> Path:
    """Write a failing case under a name that says what it is, and beside it what its worker said.

    Returns the path of the case.
    """
    text = case.to_json()
    digest = hashlib.blake2b(text.encode(), digest_size=4).hexdigest()
    path = folder / f"{case.family}-{case.layout.value}-{digest}.json"
    save_text(path, text)
    if stderr:
        save_text(path.with_suffix(".stderr.txt"), stderr)
    return path
