"""Hostile case files: a good one with one value, key or byte changed, drawn by Hypothesis."""

from __future__ import annotations

import copy
import json
from typing import Any

from hypothesis import strategies as st

from parity.records import Case, Fault, FaultKind, Session

GOOD = Case(
    family="llama",
    model="llama",
    sessions=(Session(prompt=(5, 6, 7), max_tokens=3), Session(prompt=(9,), max_tokens=2, arrival_step=1)),
    faults=(Fault(kind=FaultKind.CANCEL, step=2, session=1),),
)
ODD: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1.5, "", "x", "\ud800", [], {}, [[]], {"a": 1}),
    *(10**9, 2 * 10**9, 2**63, 10**400, -(2**31), 1e308, float("nan"), float("inf"), -float("inf")),
    *("x" * 100_000, [0] * 1000, "gemma2", "mid", "nobody", "\x00", "../../etc/passwd", "streams", "1"),
)


def places(data: Any, path: tuple = ()) -> list[tuple]:
    """Paths of all values below ``data``."""
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    return [place for key, value in items for place in ((*path, key), *places(value, (*path, key)))]


def changed(path: tuple, value: Any) -> str:
    """The good case's text with one value changed."""
    data = copy.deepcopy(json.loads(GOOD.to_json()))
    *outer, last = path
    inner = data
    for key in outer:
        inner = inner[key]
    inner[last] = value
    return json.dumps(data)


@st.composite
def hostile_texts(draw: st.DrawFn) -> str:
    """One change of the good case: a value, a key left out or added, or some bytes."""
    text = GOOD.to_json()
    kind = draw(st.sampled_from(["value", "value", "value", "cut", "splice", "key"]))
    if kind == "value":
        return changed(draw(st.sampled_from(places(json.loads(text)))), draw(st.sampled_from(ODD)))
    if kind == "key":
        data = json.loads(text)
        data[draw(st.sampled_from(["extra", "format ", "Layout", ""]))] = draw(st.sampled_from(ODD))
        return json.dumps(data)
    begin = draw(st.integers(0, len(text) - 1))
    end = len(text) if kind == "cut" else draw(st.integers(begin, min(len(text), begin + 20)))
    return (
        text[:begin]
        + draw(st.sampled_from(["", "{", "]", '"', "[" * 5000, "NaN", "\x00", "9" * 5000]))
        + text[end:]
    )
