"""JSON schemas of the project's own files, and the reader that checks a YAML file against one of them."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import jsonschema
import yaml

from parity.errors import UsageError


class StrictLoader(yaml.SafeLoader):
    """``yaml.SafeLoader`` that refuses a key given twice: the first value would be lost without a word."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        seen = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"key {key!r} is given twice", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)


@functools.cache
def load_schema(name: str) -> dict[str, Any]:
    """The JSON schema ``parity/schemas/<name>.schema.json``."""
    return json.loads((Path(__file__).parent / f"{name}.schema.json").read_text())


def load_checked_yaml(path: Path, *, schema: str) -> dict[str, Any]:
    """The content of a YAML file that satisfies a schema.

    ``UsageError`` names the file and the key path of the fault that matters most.
    """
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), StrictLoader)  # noqa: S506 (a SafeLoader)
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


def key_path(fault: jsonschema.ValidationError) -> str:
    """``rows.tiny.sha256`` for a fault in that value, ``top level`` for one in the whole file."""
    return ".".join(str(key) for key in fault.absolute_path) or "top level"
