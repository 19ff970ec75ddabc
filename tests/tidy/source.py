"""The repository's files as the tidy rules see them."""

from __future__ import annotations

import ast
import fnmatch
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath

REPOSITORY = Path(__file__).resolve().parent.parent.parent


@dataclass(frozen=True)
class Source:
    """One text file: ``path`` relative to the repository, with forward slashes."""

    path: str
    text: str

    @property
    def is_python(self) -> bool:
        return self.path.endswith(".py")

    @property
    def lines(self) -> list[str]:
        return self.text.splitlines()

    @property
    def folder(self) -> str:
        """First component of the path, empty for a file at the top level."""
        return self.path.partition("/")[0] if "/" in self.path else ""

    @property
    def module(self) -> str:
        """Dotted name of the module, of its package for an ``__init__.py``."""
        parts = PurePosixPath(self.path).with_suffix("").parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    @cached_property
    def nodes(self) -> list[ast.AST]:
        """Every node of the syntax tree."""
        return list(ast.walk(ast.parse(self.text, filename=self.path)))

    def imports(self) -> Iterator[tuple[int, str]]:
        """Line and absolute name of everything imported, wherever the statement stands.

        ``from a import b`` gives ``a.b``, which may be a module or a name in one; a literal argument of
        ``import_module`` or ``__import__`` counts as well.
        """
        for node in self.nodes:
            if isinstance(node, ast.Import):
                yield from ((node.lineno, alias.name) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                base = self._resolve(node)
                yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)
            elif isinstance(node, ast.Call) and called_name(node).rpartition(".")[2] in (
                "import_module",
                "__import__",
            ):
                yield from (
                    (node.lineno, argument.value)
                    for argument in node.args[:1]
                    if isinstance(argument, ast.Constant) and isinstance(argument.value, str)
                )

    def _resolve(self, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        package = PurePosixPath(self.path).parent.parts
        base = package[: len(package) - node.level + 1]
        return ".".join([*base, *([node.module] if node.module else [])])

    def calls(self) -> Iterator[ast.Call]:
        """Every call."""
        return (node for node in self.nodes if isinstance(node, ast.Call))


def called_name(call: ast.Call) -> str:
    """Dotted name of what is called, as written; empty when it is not a plain name."""
    return dotted_name(call.func)


def dotted_name(node: ast.AST) -> str:
    """``a.b.c`` of nested attributes on a name; empty for anything else."""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else ""


def load_sources() -> list[Source]:
    """Every text file of the checkout that .gitignore does not name; works without git."""
    ignored = [line.strip("/") for line in (REPOSITORY / ".gitignore").read_text().split()] + [".git"]

    def is_kept(name: str) -> bool:
        return not any(fnmatch.fnmatch(name, pattern) for pattern in ignored)

    sources = []
    for folder, folders, names in os.walk(REPOSITORY):
        folders[:] = sorted(filter(is_kept, folders))
        for name in sorted(filter(is_kept, names)):
            path = Path(folder, name)
            try:
                sources.append(
                    Source(path.relative_to(REPOSITORY).as_posix(), path.read_text(encoding="utf-8"))
                )
            except UnicodeDecodeError:
                continue  # binary
    return sources
