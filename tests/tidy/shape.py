"""Sizes, names, and what must not be written down."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import PurePosixPath

from tests.tidy.source import Source

MAX_FILE_LINES = 300
MAX_FUNCTION_LINES = 60
MAX_LINE_CHARACTERS = 110
# Lines of code of scheduler/ without policies/ (blank lines, comments and docstrings are not counted): under
# 1,200, readable in one sitting.
MAX_SCHEDULER_LINES = 1200

# Paths that may be longer, each with the reason. Empty is the goal.
LONGER_FILES: dict[str, str] = {
    "parity/engines/exact_memory.py": "llama.cpp's memory semantics are checked against it side by side",
    "scheduler/loop.py": "the step is told in order, from the door to the record",
}

EMPTY_WORDS = {"common", "helper", "helpers", "manager", "managers", "misc", "util", "utils"}

# Written in pieces, so that this file does not hold what it looks for.
REGISTRY_HOSTS = re.compile(
    r"pypi\." r"org|pythonhosted\." r"org|registry\.npmjs|deb\.debian\." r"org|crates\.io"
)
MACHINE_PATHS = re.compile(r"(?<![\w.~-])/(?:work|root|home|Users|opt|mnt)" r"/[\w.]")


def python(sources: list[Source]) -> Iterator[Source]:
    """The Python files among ``sources``."""
    return (source for source in sources if source.is_python)


def check_files_are_short(sources: list[Source]) -> Iterator[str]:
    """A Python file has at most 300 lines."""
    for source in python(sources):
        if len(source.lines) > MAX_FILE_LINES and source.path not in LONGER_FILES:
            yield f"{source.path}: {len(source.lines)} lines, {MAX_FILE_LINES} allowed"


def check_functions_are_short(sources: list[Source]) -> Iterator[str]:
    """A function has at most 60 lines, its docstring included."""
    for source in python(sources):
        for node in source.nodes:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = node.end_lineno - node.lineno + 1
                if length > MAX_FUNCTION_LINES:
                    where = f"{source.path}:{node.lineno}: {node.name}"
                    yield f"{where}: {length} lines, {MAX_FUNCTION_LINES} allowed"


def check_lines_are_short(sources: list[Source]) -> Iterator[str]:
    """A line of Python has at most 110 characters."""
    for source in python(sources):
        for number, line in enumerate(source.lines, 1):
            if len(line) > MAX_LINE_CHARACTERS:
                yield f"{source.path}:{number}: {len(line)} characters, {MAX_LINE_CHARACTERS} allowed"


def count_code_lines(source: Source) -> int:
    """Lines that are neither blank, nor a comment, nor part of a docstring."""
    documented = set()
    for node in source.nodes:
        has_doc = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node)
        if has_doc:
            documented |= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    return sum(
        bool(line.strip()) and not line.strip().startswith("#") and number not in documented
        for number, line in enumerate(source.lines, 1)
    )


def check_scheduler_is_small(sources: list[Source]) -> Iterator[str]:
    """scheduler/ without its policies has fewer lines of code than the ratchet allows."""
    core = [
        s for s in python(sources) if s.folder == "scheduler" and not s.path.startswith("scheduler/policies/")
    ]
    total = sum(map(count_code_lines, core))
    if total >= MAX_SCHEDULER_LINES:
        yield f"scheduler/ without policies: {total} lines of code, fewer than {MAX_SCHEDULER_LINES} allowed"


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
