"""What a measured number holds for. Two results may be compared only where every coordinate is equal (M5.2,
F66 and F67); what was under test, its version and where it was written down are no coordinates.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from parity.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class Coordinates:
    """Of one row of results. Every value is JSON-able; ``metric`` holds the columns with unit, denominator
    and percentile in their names, and the objectives that goodput counts by.
    """

    model: Any
    hardware: Any
    workload: Any
    baseline: Any
    metric: Any
    slo: Any
    load: Any
    evidence: Any

    @classmethod
    def from_data(cls, data: object, *, where: str) -> Coordinates:
        """Raises ``UsageError`` unless ``data`` has every coordinate and no other."""
        names = [item.name for item in fields(cls)]
        if not isinstance(data, dict) or sorted(data) != sorted(names):
            raise UsageError(
                "a result without its coordinates",
                where=where,
                why=f"they are {', '.join(names)}",
                todo="measure it again with parity bench --save-result",
            )
        return cls(**data)


def differences(first: Coordinates, second: Coordinates) -> Iterator[str]:
    """A sentence for every coordinate that differs; of one with parts, for the parts that do."""
    for name, one in asdict(first).items():
        other = asdict(second)[name]
        if one != other:
            if isinstance(one, dict) and isinstance(other, dict):
                parts = [key for key in {**one, **other} if one.get(key) != other.get(key)]
                said = ", ".join(f"{key} {one.get(key)!r} and {other.get(key)!r}" for key in parts)
                yield f"{name} differs: {said}"
            else:
                yield f"{name} differs: {one!r} and {other!r}"


def are_comparable(first: Coordinates, second: Coordinates) -> bool:
    """F67: the conjunction over all coordinates."""
    return next(differences(first, second), None) is None


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One row with what it holds for (F66)."""

    source: str
    coordinates: Coordinates
    values: Mapping[str, float]


def load_results(path: Path) -> list[Result]:
    """The rows of a file that ``parity bench --save-result`` wrote. Raises ``UsageError``."""
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
        if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            raise ValueError("its rows are no list of objects")
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise UsageError("results cannot be read", where=str(path), why=str(error)) from error
    return [
        Result(
            source=f"{path}, row {number}",
            coordinates=Coordinates.from_data(row.get("coordinates"), where=f"{path}, row {number}"),
            values={
                name: value
                for name, value in row.items()
                if isinstance(value, int | float) and not isinstance(value, bool)
            },
        )
        for number, row in enumerate(rows, 1)
    ]


def pair_results(first: list[Result], second: list[Result]) -> list[tuple[Result, Result]]:
    """Each result of ``first`` with the one of ``second`` that it may be compared with. Raises ``UsageError``
    for one that has none, with the coordinates in which it differs from the nearest.
    """
    if not first or not second:
        raise UsageError("nothing to compare", why="a file has no rows")
    pairs = []
    for one in first:
        nearest = min(second, key=lambda other: len([*differences(one.coordinates, other.coordinates)]))
        found = [*differences(one.coordinates, nearest.coordinates)]
        if found:
            raise UsageError(
                "results are not comparable",
                where=f"{one.source} and {nearest.source}",
                why="; ".join(found),
                todo="measure both at equal coordinates",
            )
        pairs.append((one, nearest))
    return pairs
