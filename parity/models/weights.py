"""Seeded weights that are the same bytes on every machine.

Only the raw 64-bit stream of PCG64 is used (NumPy keeps bit generators' streams stable, not those of
the distributions), and only operations that IEEE 754 rounds correctly: integer sums, one
multiplication, one conversion to float32. No ``exp``, no ``log``, no matrix product: those differ
between C libraries and BLAS builds.
"""

from __future__ import annotations

import hashlib
import math

import numpy as np


def raw_stream(seed: int, name: str) -> np.random.PCG64:
    """The bit generator of one tensor.

    Keyed by name, so that adding a tensor moves no other tensor's values.
    """
    key = hashlib.sha256(f"samebytes weights v1\n{seed}\n{name}".encode()).digest()
    return np.random.PCG64(int.from_bytes(key[:16], "little"))


def bell_weights(stream: np.random.PCG64, shape: tuple[int, ...], *, deviation: float) -> np.ndarray:
    """float32 of ``shape``, bell-shaped around 0.

    The sum of four 16-bit uniforms (Irwin-Hall), scaled to ``deviation``.
    """
    words = np.asarray(stream.random_raw(math.prod(shape)), dtype="<u8")
    sums = words.view("<u2").reshape(-1, 4).sum(axis=1, dtype=np.int64) - 2 * 65535
    unit = math.sqrt((65536.0 * 65536.0 - 1.0) / 3.0)  # deviation of a sum of four uniforms on 0..65535
    return (sums.astype(np.float64) * (deviation / unit)).astype(np.float32).reshape(shape)


def even_weights(stream: np.random.PCG64, shape: tuple[int, ...], *, low: float, high: float) -> np.ndarray:
    """float32 of ``shape``, uniform on [low, high)."""
    words = np.asarray(stream.random_raw(math.prod(shape)), dtype=np.uint64) >> np.uint64(11)
    unit = words.astype(np.float64) * 2.0**-53
    return (unit * (high - low) + low).astype(np.float32).reshape(shape)
