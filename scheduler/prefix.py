"""Resident prefixes: which leading tokens of a prompt are already in the pool, under which reserved sequence.

Identity is a digest chain over (model digest, token ids), so that equal digests mean equal tokens from position 0 on. The
cache is a co-tenant of the pool: a bounded number of entries, least recently used out first, never one in use.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from dataclasses import dataclass

from scheduler.limits import Sharing


def digest_chain(model_digest: str, tokens: tuple[int, ...]) -> tuple[bytes, ...]:
    """``len(tokens)`` digests of 16 bytes; the i-th identifies the first i + 1 tokens under this model."""
    previous, chain = model_digest.encode(), []
    for token in tokens:
        previous = hashlib.blake2b(previous + token.to_bytes(8, "little", signed=True), digest_size=16).digest()
        chain.append(previous)
    return tuple(chain)


@dataclass(slots=True)
class PrefixEntry:
    """A resident prefix of ``count`` tokens on its own sequence per stage; ``users`` counts live sessions sharing it."""

    seq_ids: tuple[int, ...]
    digests: tuple[bytes, ...]
    users: int = 0

    @property
    def count(self) -> int:
        return len(self.digests)


class PrefixCache:
    """Index of resident entries. Holds no cells itself: the caller opens and retires the entries' sequences."""

    def __init__(self, *, sharing: Sharing, block_tokens: int, max_entries: int) -> None:
        self.sharing = sharing
        self.block_tokens = block_tokens
        self.max_entries = max_entries
        self.entries: OrderedDict[bytes, PrefixEntry] = OrderedDict()  # keyed by the whole prefix; oldest use first
        self._index: dict[bytes, dict[bytes, None]] = {}  # digest of a usable length -> keys of entries that hold it
        self._seen: OrderedDict[bytes, None] = OrderedDict()  # prefixes of recent prompts, to find branch points

    def lookup(self, chain: tuple[bytes, ...]) -> tuple[PrefixEntry | None, int]:
        """The entry with the longest usable prefix and its length; at least one token is left to compute."""
        longest = len(chain) - 1
        if not self._index or longest < 1:
            return None, 0
        if self.sharing is Sharing.WHOLE_STATE:
            count = next((n for n in range(longest, 0, -1) if chain[n - 1] in self._index), 0)
        else:  # an entry holds every shorter prefix too, so membership is monotone in the length
            low, high = 0, longest
            while low < high:
                middle = (low + high + 1) // 2
                low, high = (middle, high) if chain[middle - 1] in self._index else (low, middle - 1)
            count = low
        if count == 0:
            return None, 0
        key = next(reversed(self._index[chain[count - 1]]))
        return self.entries[key], count

    def touch(self, entry: PrefixEntry) -> None:
        self.entries.move_to_end(entry.digests[-1])

    def state_stops(self, chain: tuple[bytes, ...]) -> tuple[int, ...]:
        """Positions at which a whole state of this prompt is worth keeping, increasing.

        The last block boundary before the prompt's end, and the last one inside what an earlier prompt shared with it.
        """
        stops: dict[int, None] = {}
        block = self.block_tokens
        common = next((n for n in range(len(chain) - 1, 0, -1) if chain[n - 1] in self._seen), 0)
        for limit in (common, len(chain) - 1):
            if limit // block:
                stops[limit // block * block] = None
        for digest in chain:
            self._seen[digest] = None
            self._seen.move_to_end(digest)
        while len(self._seen) > 64 * self.max_entries + 4096:
            self._seen.popitem(last=False)
        return tuple(sorted(stops))

    def holds(self, digests: tuple[bytes, ...]) -> bool:
        return digests[-1] in self.entries or (self.sharing is Sharing.POSITIONAL and digests[-1] in self._index)

    def insert(self, digests: tuple[bytes, ...], seq_ids: tuple[int, ...]) -> PrefixEntry:
        key = digests[-1]
        entry = self.entries[key] = PrefixEntry(seq_ids, digests)
        for digest in digests if self.sharing is Sharing.POSITIONAL else (key,):
            self._index.setdefault(digest, {})[key] = None
        return entry

    def oldest_idle(self) -> PrefixEntry | None:
        return next((entry for entry in self.entries.values() if entry.users == 0), None)

    def remove(self, entry: PrefixEntry) -> None:
        key = entry.digests[-1]
        del self.entries[key]
        for digest in entry.digests if self.sharing is Sharing.POSITIONAL else (key,):
            holders = self._index[digest]
            del holders[key]
            if not holders:
                del self._index[digest]

    def forget_all(self) -> None:
        self.entries.clear()
        self._index.clear()
