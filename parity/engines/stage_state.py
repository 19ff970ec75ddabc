"""Saved sequences with a seal: llama.cpp's own format says neither which model it
came from nor whether it is whole.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from parity.engines.stage import Stage
from parity.errors import UsageError
from parity.store import verified_sha256

MAGIC = b"samebytes state 1\n"
DIGEST_BYTES = 16


class StateRefused(UsageError):
    """A saved state that is not whole, was changed, or belongs to another model, stage or cache type."""


def identity_of(stage: Stage) -> bytes:
    """What a state must agree on to be restored here: the stage's file, cache type, and ids per row."""
    settings = stage.settings
    parts = (verified_sha256(Path(settings.path)), settings.kv_type, str(stage.pool.ids_per_row))
    return _digest(" ".join(parts).encode())


def seal_state(blob: bytes, identity: bytes) -> bytes:
    """Magic, identity, digest of identity and blob, blob."""
    return MAGIC + identity + _digest(identity + blob) + blob


def unseal_state(sealed: bytes, identity: bytes) -> bytes:
    """The blob in a seal. Raises ``StateRefused`` unless it is whole, unchanged and of this identity."""
    start = len(MAGIC)
    blob = sealed[start + 2 * DIGEST_BYTES :]
    own, digest = (
        sealed[start : start + DIGEST_BYTES],
        sealed[start + DIGEST_BYTES : start + 2 * DIGEST_BYTES],
    )
    if not sealed.startswith(MAGIC) or digest != _digest(own + blob):
        raise StateRefused("saved state", why=f"its {len(sealed)} bytes are not the whole of what was saved")
    if own != identity:
        raise StateRefused("saved state", why="it was saved from another model, stage or cache type")
    return blob


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=DIGEST_BYTES).digest()
