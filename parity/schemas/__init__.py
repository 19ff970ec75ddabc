"""JSON schemas of the project's own files, and the reader that checks a YAML file against one of them."""

from __future__ import annotations

import functools
import json
import math
from pathlib import Path
from typing import Any

import jsonschema
import yaml

from parity.errors import UsageError


@functools.cache
def load_schema(name: str) -> dict[str, Any]:
    """The JSON schema ``parity/schemas/<name>.schema.json``."""
    return json.loads((Path(__file__).parent / f"{name}.schema.json").read_text())


MAX_YAML_BYTES = 256 << 10  # a hundred times the largest of ours
MAX_YAML_DEPTH = 32
MAX_WHY_CHARS = 300  # a fault quotes what it found, which may be the whole file


class PlainLoader(yaml.SafeLoader):
    """YAML as people write it: trees of scalars, keys given once, nothing that refers to another place.

    An alias lets ten lines stand for a billion values, or a list hold itself; so there are none.
    """

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self._depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node:
        event = self.peek_event()
        if isinstance(event, yaml.AliasEvent):
            raise yaml.MarkedYAMLError(
                problem="anchors and aliases are not allowed", problem_mark=event.start_mark
            )
        if self._depth == MAX_YAML_DEPTH:
            raise yaml.MarkedYAMLError(
                problem=f"more than {MAX_YAML_DEPTH} levels", problem_mark=event.start_mark
            )
        self._depth += 1
        try:
            return super().compose_node(parent, index)
        finally:
            self._depth -= 1

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Without SafeLoader's merge keys, which would be ``<<``, and where a key given twice is a fault."""
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.MarkedYAMLError(problem="a key must be a word", problem_mark=key.start_mark)
            if key.value in seen:  # the first value would be lost without a word
                raise yaml.MarkedYAMLError(
                    problem=f"key {key.value!r} is given twice", problem_mark=key.start_mark
                )
            seen.add(key.value)
        return yaml.constructor.BaseConstructor.construct_mapping(self, node, deep=deep)


def load_checked_yaml(path: Path, *, schema: str) -> dict[str, Any]:
    """The content of a YAML file that satisfies a schema.

    ``UsageError`` names the file and the key path of the fault that matters most. Time and memory are
    bounded whatever the file holds.
    """
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_YAML_BYTES + 1)
        if len(data) > MAX_YAML_BYTES:
            raise UsageError("file is too large", where=str(path), why=f"more than {MAX_YAML_BYTES} bytes")
        content = PlainLoader(data.decode("utf-8")).get_single_data()
    except OSError as error:
        raise UsageError("file cannot be read", where=str(path), why=error.strerror or str(error)) from error
    except UnicodeDecodeError as error:
        raise UsageError("file is not UTF-8 text", where=str(path), why=error.reason) from error
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a date or a number that is none
        mark = getattr(error, "problem_mark", None)
        line = f" line {mark.line + 1}" if mark else ""
        why = getattr(error, "problem", None) or str(error)
        raise UsageError("file is not valid YAML", where=f"{path}{line}", why=why[:MAX_WHY_CHARS]) from error
    check_against(content, schema=schema, where=str(path))
    return content


def check_against(content: Any, *, schema: str, where: str) -> None:
    """Check data against a schema. Raises ``UsageError`` with the key path of the fault that matters most."""
    validator = STRICT_VALIDATOR(load_schema(schema))
    fault = jsonschema.exceptions.best_match(validator.iter_errors(content))
    if fault is not None:
        why = fault.message
        if len(why) > MAX_WHY_CHARS:  # it quotes the value, which may be a megabyte
            why = f"{why[:MAX_WHY_CHARS]}... must satisfy {fault.validator}"
        raise UsageError(
            f"{schema} is not valid", where=f"{where} at {key_path(fault)[:MAX_WHY_CHARS]}", why=why
        )


def load_checked_json(text: str, *, schema: str, where: str) -> Any:
    """The data of a JSON text that satisfies a schema, without NaN and double keys. Raises ``UsageError``."""
    try:
        content = json.loads(text, parse_constant=_no_number, object_pairs_hook=_unique_keys)
    except (ValueError, RecursionError) as error:
        why = str(error)[:MAX_WHY_CHARS]
        raise UsageError(f"{schema} is not JSON", where=where, why=why) from error
    check_against(content, schema=schema, where=where)
    return content


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"key {twice!r} is given twice")
    return content


def _is_finite(checker: Any, value: Any) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    return isinstance(value, int) and not isinstance(value, bool)


def _is_integer(checker: Any, value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


# 1.0 is no integer here, though it is in JSON Schema, and no number is infinite.
STRICT_TYPES = jsonschema.Draft202012Validator.TYPE_CHECKER.redefine_many(
    {"number": _is_finite, "integer": _is_integer}
)
STRICT_VALIDATOR = jsonschema.validators.extend(jsonschema.Draft202012Validator, type_checker=STRICT_TYPES)


def key_path(fault: jsonschema.ValidationError) -> str:
    """``rows.tiny.sha256`` for a fault in that value, ``top level`` for one in the whole file."""
    return ".".join(str(key) for key in fault.absolute_path) or "top level"
