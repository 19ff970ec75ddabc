"""Names, and what must not be written down. Sizes are nobody's business but the reader's."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import PurePosixPath

from tests.tidy.source import Source

EMPTY_WORDS = {"common", "helper", "helpers", "manager", "managers", "misc", "util", "utils"}

# Written in pieces, so that this file does not hold what it looks for.
REGISTRY_HOSTS = re.compile(
    r"pypi\." r"org|pythonhosted\." r"org|registry\.npmjs|deb\.debian\." r"org|crates\.io"
)
MACHINE_PATHS = re.compile(r"(?<![\w.~-])/(?:work|root|home|Users|opt|mnt)" r"/[\w.]")


def python(sources: list[Source]) -> Iterator[Source]:
    """The Python files among ``sources``."""
    return (source for source in sources if source.is_python)


def check_names_say_something(sources: list[Source]) -> Iterator[str]:
    """No file, folder or class is named for nothing in particular."""
    for source in python(sources):
        for part in PurePosixPath(source.path).with_suffix("").parts:
            words = {part} | set(part.split("_")) - {"common"}  # "longest_common_prefix" is a term
            if words & EMPTY_WORDS:
                yield f"{source.path}: {part} says nothing about what is in it"
        for node in source.nodes:
            if isinstance(node, ast.ClassDef):
                words = re.findall(r"[A-Z][a-z0-9]*", node.name)
                if words and words[-1].lower() in EMPTY_WORDS:
                    yield f"{source.path}:{node.lineno}: class {node.name} says nothing about what it does"


def check_no_place_of_one_machine_is_written_down(sources: list[Source]) -> Iterator[str]:
    """No registry host and no absolute path of somebody's machine, in any file."""
    for source in sources:
        for number, line in enumerate(source.lines, 1):
            for pattern, what in ((REGISTRY_HOSTS, "a registry host"), (MACHINE_PATHS, "a machine's path")):
                if match := pattern.search(line):
                    yield f"{source.path}:{number}: {what}: {match.group()}"
