"""From logits to a token, the same in every engine and in the oracle: a pure
function of (logits, sampling, key).
"""

from __future__ import annotations

import hashlib

import numpy as np

from scheduler.records import SamplingParams


def uniform(seed: int, request_id: str, position: int) -> float:
    """A number in [0, 1) keyed by (seed, session, position): the same whatever
    the batch and the order of steps.
    """
    digest = hashlib.blake2b(f"{seed}/{request_id}/{position}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) / (1 << 53)


def sample_token(logits: np.ndarray, sampling: SamplingParams, *, request_id: str, position: int) -> int:
    """The token for one row of ``logits`` (shape [n_vocab], float32).

    Greedy takes the lowest index among equal maxima. Otherwise the inverse of the cumulative
    distribution of softmax(logits / temperature), restricted to ``top_k`` (0: all) and then to the
    smallest set of mass ``top_p``.
    """
    if sampling.temperature == 0:
        return int(logits.argmax())
    order = np.argsort(-logits, kind="stable")
    if sampling.top_k:
        order = order[: sampling.top_k]
    scaled = logits[order].astype(np.float64) / sampling.temperature
    cumulative = np.cumsum(np.exp(scaled - scaled[0]))
    if sampling.top_p < 1:
        kept = int(np.searchsorted(cumulative, sampling.top_p * cumulative[-1])) + 1
        order, cumulative = order[:kept], cumulative[:kept]
    draw = uniform(sampling.seed, sampling.key or request_id, position) * cumulative[-1]
    return int(order[min(int(np.searchsorted(cumulative, draw, side="right")), len(order) - 1)])


def logits_digest(logits: np.ndarray) -> str:
    """Hexadecimal digest of one row's bytes: equal digests mean bit-identical logits."""
    return hashlib.blake2b(
        np.ascontiguousarray(logits, dtype=np.float32).tobytes(), digest_size=16
    ).hexdigest()


def top_margin(logits: np.ndarray) -> float:
    """Top-1 minus top-2 logit of one row: how far another kernel's rounding is
    from changing the greedy token.
    """
    best, second = np.partition(logits, -2)[-1:-3:-1]
    return float(best) - float(second)
