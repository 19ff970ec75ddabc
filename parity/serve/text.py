"""From tokens to text as it may be shown: whole characters only, nothing of a stop string, nothing twice.

What comes out in all depends only on the sequence of bytes, never on how they were cut into tokens or events.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence


class StopMatcher:
    """Finds the stop string that is complete first (of two that end together the longer one).

    Text that may be the beginning of a stop string is held back until it cannot be one any more.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._longest = max(map(len, stops), default=0)
        self._held = ""
        self.matched: str | None = None

    def feed(self, text: str) -> str:
        """Text that can be shown now. After a match, ``matched`` is set and nothing more comes out."""
        if self.matched is not None:
            return ""
        held = self._held + text
        ends = [(held.index(stop) + len(stop), -len(stop), stop) for stop in self._stops if stop in held]
        if ends:
            end, minus_length, self.matched = min(ends)
            self._held = ""
            return held[: end + minus_length]
        keep = next(
            (
                n
                for n in range(min(self._longest - 1, len(held)), 0, -1)
                if any(stop.startswith(held[-n:]) for stop in self._stops)
            ),
            0,
        )
        self._held = held[len(held) - keep :]
        return held[: len(held) - keep]

    def flush(self) -> str:
        """At the end: what was held back and became no stop string."""
        held, self._held = self._held, ""
        return held


class TextStream:
    """Bytes of tokens in, text out: UTF-8 across token boundaries, invalid bytes
    as U+FFFD, stop strings cut off.
    """

    def __init__(self, stops: Sequence[str] = ()) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._matcher = StopMatcher(stops)

    @property
    def stopped(self) -> str | None:
        """The stop string that ended the text, if one did."""
        return self._matcher.matched

    def feed(self, data: bytes) -> str:
        """Text that the next token's bytes make showable."""
        return self._matcher.feed(self._decoder.decode(data))

    def finish(self) -> str:
        """The rest at the end of the output; an unfinished character becomes U+FFFD
        and may complete a stop string.
        """
        rest = self._matcher.feed(self._decoder.decode(b"", True))
        return rest if self.stopped is not None else rest + self._matcher.flush()


def token_text(data: bytes) -> str:
    """A token's bytes as a unique text for logprobs; bytes that are no UTF-8 alone are spelled
    ``bytes:\\xe2\\x80``."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
