"""``manifests/lock.yaml``: what the Hub said of each row; ``parity lock`` writes it, people the manifests."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from parity.schemas import load_checked_yaml
from parity.store import save_text

LOCK_FILE = "lock.yaml"
REVISION = r"[0-9a-f]{40}"
SHA256 = r"[0-9a-f]{64}"
NAMED = ("repo", "file", "layers")
PINS = ("revision", "sha256", "size_bytes")
HEAD = (
    "# Written by `parity lock`: what the Hub said of each row. A pin by hand stands in the row's manifest.\n"
)

Lock = dict[str, dict[str, dict[str, Any]]]
"""Family -> row -> ``repo``, ``file``, ``layers`` where it is a cut, and the three pins."""


def load_lock(directory: Path) -> Lock:
    """The lock beside the manifests in ``directory``, empty if there is none; ``UsageError`` if not valid."""
    path = directory / LOCK_FILE
    return load_checked_yaml(path, schema="lock") if path.exists() else {}


def save_lock(directory: Path, lock: Lock) -> None:
    save_text(directory / LOCK_FILE, HEAD + yaml.safe_dump(lock, sort_keys=True))


def pins_of(lock: Lock, family: str, name: str, row: Mapping[str, Any]) -> dict[str, Any]:
    """The locked pins of a manifest's row; empty where the manifest names another file or pin by now."""
    entry = lock.get(family, {}).get(name, {})
    asked = {key: row.get(key) for key in (*NAMED, *PINS)}
    if entry.get("layers") != row.get("layers"):  # a cut is no whole file
        return {}
    if any(value is not None and entry.get(key) != value for key, value in asked.items()):
        return {}
    return {pin: entry[pin] for pin in PINS if pin in entry}
