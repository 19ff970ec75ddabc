"""Resident prefixes: which leading tokens of a prompt are already in the pool, under which reserved sequence.

Identity is a digest chain over (model digest, token ids), so that equal digests mean equal
tokens from position 0 on. The cache is a co-tenant of the pool: few entries, least recently
used out first, never one in use.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections import OrderedDict
from dataclasses import dataclass
from functools import lru_cache

from scheduler.limits import Sharing


@lru_cache(maxsize=256)
def digest_chain(model_digest: str, tokens: tuple[int, ...]) -> tuple[bytes, ...]:
    """``len(tokens)`` digests of 16 bytes; the i-th identifies the first i + 1 tokens under this model."""
    previous, chain = model_digest.encode(), []
    for token in tokens:
        previous = hashlib.blake2b(
            previous + token.to_bytes(8, "little", signed=True), digest_size=16
        ).digest()
        chain.append(previous)
    return tuple(chain)


@dataclass(slots=True)
class PrefixEntry:
    """A resident prefix on its own sequence per stage; ``users`` counts live sessions that share it."""

    seq_ids: tuple[int, ...]
    digests: tuple[bytes, ...]
    users: int = 0

    @property
    def count(self) -> int:
        """Tokens of the prefix."""
        return len(self.digests)


class PrefixCache:
    """Index of resident entries. Holds no cells: the memory opens and retires the entries' sequences."""

    def __init__(self, *, sharing: Sharing, block_tokens: int, max_entries: int) -> None:
        self.sharing, self.block_tokens, self.max_entries = sharing, block_tokens, max_entries
        self.entries: OrderedDict[bytes, PrefixEntry] = OrderedDict()  # by whole prefix; oldest use first
        # digest of a usable length -> keys of entries that hold it
        self._index: dict[bytes, dict[bytes, None]] = {}
        # prefixes of recent prompts, to find branch points
        self._seen: OrderedDict[bytes, None] = OrderedDict()

    def lookup(self, chain: tuple[bytes, ...]) -> tuple[PrefixEntry | None, int]:
        """The entry with the longest usable prefix and its length; at least one token is left to compute."""
        if self.sharing is Sharing.POSITIONAL:  # an entry holds every shorter prefix too
            count = bisect_left(range(1, len(chain)), True, key=lambda n: chain[n - 1] not in self._index)
        else:
            count = next((n for n in range(len(chain) - 1, 0, -1) if chain[n - 1] in self._index), 0)
        if count == 0:
            return None, 0
        return self.entries[next(reversed(self._index[chain[count - 1]]))], count

    def keep_stops(self, chain: tuple[bytes, ...]) -> tuple[int, ...]:
        """Positions at which this prompt's prefix is worth keeping, increasing. Positional: its end.
        A whole state: the last block boundary before the end, and the last one inside what an
        earlier prompt had in common with it.
        """
        if self.sharing is Sharing.POSITIONAL:
            return (len(chain),) if len(chain) >= self.block_tokens else ()
        common = next((n for n in range(len(chain) - 1, 0, -1) if chain[n - 1] in self._seen), 0)
        stops = dict.fromkeys(
            limit // self.block_tokens * self.block_tokens for limit in (common, len(chain) - 1)
        )
        return tuple(stop for stop in stops if stop > 0)

    def note_prompt(self, chain: tuple[bytes, ...]) -> None:
        """Remember a prompt, so that later ones can be seen to part from it."""
        for digest in chain:
            self._seen[digest] = None
            self._seen.move_to_end(digest)
        while len(self._seen) > 64 * self.max_entries + 4096:
            self._seen.popitem(last=False)

    def holds(self, digests: tuple[bytes, ...]) -> bool:
        """Whether keeping this prefix would add nothing."""
        return digests[-1] in self._index

    def insert(self, digests: tuple[bytes, ...], seq_ids: tuple[int, ...]) -> None:
        self.entries[digests[-1]] = PrefixEntry(seq_ids, digests)
        for digest in self._usable(digests):
            self._index.setdefault(digest, {})[digests[-1]] = None

    def remove(self, entry: PrefixEntry) -> None:
        del self.entries[entry.digests[-1]]
        for digest in self._usable(entry.digests):
            holders = self._index[digest]
            del holders[entry.digests[-1]]
            if not holders:
                del self._index[digest]

    def oldest_idle(self) -> PrefixEntry | None:
        return next((entry for entry in self.entries.values() if entry.users == 0), None)

    def _usable(self, digests: tuple[bytes, ...]) -> tuple[bytes, ...]:
        """Every length of a positional prefix can be shared, of a whole state only its own."""
        return digests if self.sharing is Sharing.POSITIONAL else digests[-1:]
