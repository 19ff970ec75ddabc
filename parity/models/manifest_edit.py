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
        key, node = _entry_at(root, path, where)
        start, stop = node.start_mark.index, node.end_mark.index
        if start == stop:  # nothing is written there: the value goes right behind the colon
            start = stop = text.index(":", key.end_mark.index) + 1
            edits.append((start, stop, f" {_spelled(value, '')}"))
        else:
            edits.append((start, stop, _spelled(value, text[start:stop])))
    edited = text
    for start, stop, new in sorted(edits, reverse=True):
        edited = edited[:start] + new + edited[stop:]
    _check_only_these_changed(text, edited, changes, where)
    return edited


def _entry_at(root: Node, path: KeyPath, where: str) -> tuple[Node, ScalarNode]:
    """The key and the scalar at ``path``."""
    key, node = root, root
    for name in path:
        entries = node.value if isinstance(node, MappingNode) else []
        key, node = next(((key, value) for key, value in entries if key.value == name), (None, None))
        if node is None:
            raise UsageError(
                f"key {'.'.join(path)} is missing", where=where, todo="add it with the value null"
            )
    if not isinstance(node, ScalarNode):
        raise UsageError(f"key {'.'.join(path)} does not hold one value", where=where)
    return key, node


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
    try:
        found = yaml.safe_load(after)
    except yaml.YAMLError:
        found = None
    if found != expected:
        raise UsageError(
            "the file cannot be edited in place",
            where=where,
            why="a value that would change is used elsewhere in it",
            todo="replace YAML anchors and aliases by plain values",
        )
