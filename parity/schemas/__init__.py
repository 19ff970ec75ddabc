"""JSON schemas of the project's own files, and the reader that checks a YAML file against one of them."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import jsonschema
import yaml

from parity.errors import UsageError


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
    validator = jsonschema.Draft202012Validator(load_schema(schema))
    fault = jsonschema.exceptions.best_match(validator.iter_errors(content))
    if fault is not None:
        raise UsageError(f"{schema} is not valid", where=f"{path} at {key_path(fault)}", why=fault.message)
    return content


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
