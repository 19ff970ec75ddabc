"""Change scalars of a YAML file where they stand: every other byte of the file stays as it is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml
from ruamel.yaml import YAML, MappingNode, Node, ScalarNode
from ruamel.yaml.error import MarkedYAMLError

from parity.errors import UsageError

KeyPath = tuple[str, ...]
Scalar = str | int


def replace_scalars(text: str, changes: Mapping[KeyPath, Scalar], *, where: str) -> str:
    """``text`` with the scalar at each key path replaced; comments, order, quotes and layout are untouched.

    A dump of the parsed file would reflow it; so ruamel.yaml only tells where each scalar begins and ends.
    Raises ``UsageError`` if a key is missing, holds no scalar, or is an alias of another place in the file.
    """
    try:
        root = YAML().compose(text)
    except MarkedYAMLError as error:
        raise UsageError("file is not valid YAML", where=where, why=str(error.problem)) from error
    edits = []
    for path, value in changes.items():
        node = _scalar_at(root, path, where)
        start, stop = node.start_mark.index, node.end_mark.index
        old = text[start:stop]
        new = _spelled(value, old)
        edits.append((start, stop, new if old else f" {new}"))
    edited = text
    for start, stop, new in sorted(edits, reverse=True):
        edited = edited[:start] + new + edited[stop:]
    _check_only_these_changed(text, edited, changes, where)
    return edited


def _scalar_at(root: Node, path: KeyPath, where: str) -> ScalarNode:
    node = root
    for key in path:
        entries = node.value if isinstance(node, MappingNode) else []
        node = next((value for name, value in entries if name.value == key), None)
        if node is None:
            raise UsageError(
                f"key {'.'.join(path)} is missing", where=where, todo="add it with the value null"
            )
    if not isinstance(node, ScalarNode):
        raise UsageError(f"key {'.'.join(path)} does not hold one value", where=where)
    return node


def _spelled(value: Scalar, old: str) -> str:
    """``value`` as YAML: in the quotes of ``old``, else plain if that reads back the same, else quoted."""
    if isinstance(value, int):
        return str(value)
    if old[:1] in ("'", '"'):
        return f"{old[0]}{value}{old[0]}"
    # Hexadecimal digits may all be decimal, or look like 12e34: plain YAML would make a number of them.
    return value if yaml.safe_load(value) == value else f'"{value}"'


def _check_only_these_changed(before: str, after: str, changes: Mapping[KeyPath, Scalar], where: str) -> None:
    expected: Any = yaml.safe_load(before)
    for path, value in changes.items():
        level = expected
        for key in path[:-1]:
            level = level[key]
        level[path[-1]] = value
    if yaml.safe_load(after) != expected:
        raise UsageError(
            "the file cannot be edited in place",
            where=where,
            why="a changed value is used twice in it",
            todo="replace YAML anchors and aliases by plain values",
        )
