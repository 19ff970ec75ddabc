"""JSON schemas of the project's own files, and the readers that check a file against one of them."""

from __future__ import annotations

import functools
import json
import math
from pathlib import Path
from typing import Any

import jsonschema
import yaml

from parity.errors import UsageError

SHOWN_CHARACTERS = 200


@functools.cache
def load_schema(name: str) -> dict[str, Any]:
    """The JSON schema ``parity/schemas/<name>.schema.json``."""
    return json.loads((Path(__file__).parent / f"{name}.schema.json").read_text())


def load_checked_yaml(path: Path, *, schema: str) -> dict[str, Any]:
    """The content of a YAML file that satisfies a schema.

    ``UsageError`` names the file and the key path of the fault that matters most.
    """
    try:
        text = path.read_text(encoding="utf-8")
        check_unique_keys(yaml.compose(text, Loader=yaml.SafeLoader))
        content = yaml.safe_load(text)
    except OSError as error:
        raise UsageError("file cannot be read", where=str(path), why=error.strerror or str(error)) from error
    except UnicodeDecodeError as error:
        raise UsageError("file is not UTF-8 text", where=str(path), why=str(error)) from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f" line {mark.line + 1}" if mark else ""
        why = getattr(error, "problem", None) or str(error)
        raise UsageError("file is not valid YAML", where=f"{path}{line}", why=why) from error
    check_against(content, schema=schema, where=str(path))
    return content


def check_against(content: Any, *, schema: str, where: str) -> None:
    """Check data against a schema. Raises ``UsageError`` with the key path of the fault that matters most."""
    validator = STRICT_VALIDATOR(load_schema(schema))
    fault = jsonschema.exceptions.best_match(validator.iter_errors(content))
    if fault is not None:
        why = fault.message
        if len(why) > SHOWN_CHARACTERS:  # it quotes the value, which may be a megabyte
            why = f"{why[:SHOWN_CHARACTERS]}... must satisfy {fault.validator}"
        raise UsageError(f"{schema} is not valid", where=f"{where} at {key_path(fault)}", why=why)


def load_checked_json(text: str, *, schema: str, where: str) -> Any:
    """The data of a JSON text that satisfies a schema, without NaN and double keys. Raises ``UsageError``."""
    try:
        content = json.loads(text, parse_constant=_no_number, object_pairs_hook=_unique_keys)
    except (ValueError, RecursionError) as error:
        why = str(error)[:SHOWN_CHARACTERS]
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


def check_unique_keys(node: yaml.Node | None) -> None:
    """Raise ``yaml.YAMLError`` for a key given twice: the first value would be lost without a word."""
    if isinstance(node, yaml.SequenceNode):
        for item in node.value:
            check_unique_keys(item)
    if isinstance(node, yaml.MappingNode):
        seen = set()
        for key, value in node.value:
            if key.value in seen:
                raise yaml.MarkedYAMLError(
                    problem=f"key {key.value!r} is given twice", problem_mark=key.start_mark
                )
            seen.add(key.value)
            check_unique_keys(value)


def key_path(fault: jsonschema.ValidationError) -> str:
    """``rows.tiny.sha256`` for a fault in that value, ``top level`` for one in the whole file."""
    return ".".join(str(key) for key in fault.absolute_path) or "top level"
