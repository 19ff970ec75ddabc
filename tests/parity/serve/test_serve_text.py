"""Text that is shown: whole characters, nothing of a stop string, the same however the bytes were cut."""

from __future__ import annotations

from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st

from parity.serve.text import StopMatcher, TextStream, token_text

STOPS = st.lists(st.text("ab", min_size=1, max_size=4), max_size=3)


def cut(data: bytes, places: list[int]) -> list[bytes]:
    edges = [0, *sorted(place % (len(data) + 1) for place in places), len(data)]
    return [data[a:b] for a, b in zip(edges, edges[1:], strict=False)]


def shown(parts: list[bytes], stops: list[str]) -> tuple[str, str | None]:
    stream = TextStream(stops)
    text = "".join(stream.feed(part) for part in parts) + stream.finish()
    return text, stream.stopped


def by_definition(text: str, stops: list[str]) -> tuple[str, str | None]:
    """Character by character: the first end at which a stop string is complete, the longest one there."""
    for end in range(len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            longest = max(complete, key=len)
            return text[: end - len(longest)], longest
    return text, None


@given(st.text("abé€", max_size=24), STOPS, st.lists(st.integers(0, 99), max_size=6))
@example("abab", ["abb", "ba"], [1, 2, 3])
def test_text_stops_where_the_definition_says_however_it_was_cut(text: Any, stops: Any, places: Any) -> None:
    assert shown(cut(text.encode(), places), stops) == by_definition(text, stops)


@given(st.binary(max_size=24), st.lists(st.integers(0, 99), max_size=6))
def test_bytes_that_are_no_text_give_the_same_characters_however_they_were_cut(
    data: Any, places: Any
) -> None:
    assert shown(cut(data, places), []) == (data.decode(errors="replace"), None)


def test_matcher_holds_back_only_what_may_become_a_stop_string() -> None:
    matcher = StopMatcher(["END"])
    assert matcher.feed("xE") == "x"
    assert matcher.feed("N") == ""
    assert matcher.feed("y") == "ENy"
    assert (matcher.feed("EN"), matcher.flush()) == ("", "EN")


def test_matcher_shows_nothing_after_a_stop_string() -> None:
    matcher = StopMatcher(["b"])
    assert (matcher.feed("abc"), matcher.matched, matcher.feed("d"), matcher.flush()) == ("a", "b", "", "")


def test_token_text_is_unique_for_bytes_that_are_no_text() -> None:
    assert token_text(b"a") == "a"
    assert token_text(b"\xe2\x82") == "bytes:\\xe2\\x82" != token_text(b"\xe2\x83")
