"""Who may import whom: the order of folders, downwards; and no circle, between files too."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping

from tests.tidy.source import Source

# Each engine's package and the one file that knows it.
ENGINE_FILES = {"llama_cpp": "parity/engines/llama.py", "xllamacpp": "parity/systems/xllama.py"}

# The house from the ground up: a module may import from its own room and from lower floors. Files that lie in
# parity/ itself are the ground floor, but for the command line and pytest's plugin on top.
FLOORS = (
    ("scheduler",),
    ("parity",),
    ("parity.engines", "parity.systems", "parity.protocol"),
    ("parity.models",),
    ("parity.reference", "parity.checkers"),
    ("parity.cases",),
    ("parity.run",),
    ("parity.suites", "parity.golden"),
    ("parity.mutants",),
    ("parity.campaign",),
    ("parity.gate", "parity.serve", "parity.endpoint"),
    ("parity.bench",),
    ("parity.report",),
    ("parity.commands", "parity.plugin", "parity.cli"),
)
FLOOR = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}

# Pairs that the order of folders alone would allow.
FORBIDDEN_PAIRS = (
    ("parity.checkers", "parity.engines", "checkers read histories, they never drive an engine"),
    ("parity.reference", "parity.engines", "the reference shares nothing with what it judges"),
    ("parity.run.oracle", "scheduler.loop", "the oracle shares nothing with the scheduler"),
    ("parity.run.oracle", "scheduler.cells", "the oracle shares nothing with the scheduler"),
    ("parity.run.oracle", "scheduler.prefix", "the oracle shares nothing with the scheduler"),
    ("parity.run.oracle", "scheduler.policies", "the oracle shares nothing with the scheduler"),
    ("parity.run.oracle", "scheduler.policy", "the oracle shares nothing with the scheduler"),
)


def is_inside(module: str, package: str) -> bool:
    """True for the package itself and everything below it."""
    return module == package or module.startswith(f"{package}.")


def room_of(module: str) -> str:
    """The room of a module: its folder below ``parity``, or the longest listed name that it lies in."""
    return max((room for room in FLOOR if is_inside(module, room)), key=len)


def is_ours(module: str) -> bool:
    return is_inside(module, "scheduler") or is_inside(module, "parity")


def product(sources: list[Source]) -> list[Source]:
    """The Python files of the two packages."""
    return [source for source in sources if source.is_python and source.folder in ("scheduler", "parity")]


def check_dependency_direction(sources: list[Source]) -> Iterator[str]:
    """Imports go down the house: no file imports from a floor above its own."""
    for source in product(sources):
        for line, name in source.imports():
            if not is_ours(name):
                continue
            here, there = room_of(source.module), room_of(name)
            if FLOOR[there] > FLOOR[here]:
                yield f"{source.path}:{line}: {here} imports {name}, which stands above it"
            elif (
                FLOOR[there] == FLOOR[here] and there != here and here not in ("parity.cli", "parity.plugin")
            ):
                yield f"{source.path}:{line}: {here} imports {name}, its neighbour on the same floor"
            for importer, imported, why in FORBIDDEN_PAIRS:
                if is_inside(source.module, importer) and is_inside(name, imported):
                    yield f"{source.path}:{line}: imports {name}: {why}"


def check_every_folder_has_a_floor(sources: list[Source]) -> Iterator[str]:
    """A new folder of parity/ is given its place in the order."""
    for source in product(sources):
        parts = source.module.split(".")
        is_folder = len(source.path.split("/")) > 2
        if parts[0] == "parity" and is_folder and parts[1] != "schemas" and ".".join(parts[:2]) not in FLOOR:
            yield f"{source.path}: parity/{parts[1]}/ has no floor in tests/tidy/layers.py"


def check_no_files_import_each_other(sources: list[Source]) -> Iterator[str]:
    """No circle between files, imports for types included."""
    modules = {source.module: source for source in product(sources)}
    graph = {
        module: sorted({imported_file(name, modules) for _, name in source.imports()} - {None})
        for module, source in sorted(modules.items())
    }
    for circle in circles(graph):
        yield f"{modules[circle[0]].path}: imports itself through {' -> '.join([*circle, circle[0]])}"


def imported_file(name: str, modules: Mapping[str, Source]) -> str | None:
    """The module of ours that an imported name lies in, None for others'."""
    if name in modules:
        return name
    parent = name.rpartition(".")[0]
    return parent if parent in modules else None


def circles(graph: Mapping[str, list[str]]) -> Iterator[list[str]]:
    """One circle for each group of modules that reach each other: the first that a walk closes."""
    done: dict[str, None] = {}

    def walk(module: str, path: list[str]) -> Iterator[list[str]]:
        if module in path:
            yield path[path.index(module) :]
            return
        if module in done:
            return
        for imported in graph.get(module, ()):
            yield from walk(imported, [*path, module])
        done[module] = None

    for module in graph:
        yield from walk(module, [])


def check_scheduler_needs_only_the_standard_library(sources: list[Source]) -> Iterator[str]:
    """scheduler/ is importable where nothing is installed."""
    for source in sources:
        if source.is_python and source.folder == "scheduler":
            for line, name in source.imports():
                top = name.partition(".")[0]
                if top != "scheduler" and top not in sys.stdlib_module_names:
                    yield f"{source.path}:{line}: imports {name}, which is not in the standard library"


def check_engines_are_imported_in_one_file_each(sources: list[Source]) -> Iterator[str]:
    """One file knows an engine's package, so that its absence and its aborts are handled in one place."""
    for source in sources:
        for line, name in source.imports() if source.is_python else ():
            package = name.partition(".")[0]
            if ENGINE_FILES.get(package, source.path) != source.path:
                yield f"{source.path}:{line}: imports {package}; use {ENGINE_FILES[package]}"
