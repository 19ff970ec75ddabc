"""Who may import whom: scheduler <- records <- engines and checkers <- runner <- report, command line."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from tests.tidy.source import Source

LLAMA_FILE = "parity/engines/llama.py"

# Rank of a module by its longest listed prefix; an import may only go to the same rank or a lower one.
RANKS = {
    "scheduler": 0,
    "parity": 1,
    "parity.errors": 1,
    "parity.store": 1,  # no knowledge of cases in it: whoever touches the disk writes through it
    "parity.schemas": 1,
    "parity.records": 2,
    "parity.contained": 4,  # the runner in a worker process
    "parity.exact_runner": 4,
    "parity.profiles": 4,  # found by running cases
    "parity.judge": 4,
    "parity.own_engine": 4,
    "parity.runner": 4,
    # Everything else in parity is 3: engines, oracle, strategies, faults, checkers, models.
    "parity.bench": 5,
    "parity.cli": 5,
    "parity.commands": 5,
    "parity.gate": 5,
    "parity.golden": 5,
    "parity.mutants": 5,
    "parity.campaign": 5,
    "parity.campaign_run": 5,
    "parity.cause": 5,
    "parity.rerun": 5,
    "parity.shrink": 5,
    "parity.plugin": 5,
    "parity.policy_checks": 5,
    "parity.policy_tests": 5,
    "parity.provenance": 5,
    "parity.replay": 5,
    "parity.report": 5,
    "parity.serve": 5,
    "parity.suite": 5,
    "parity.trace_view": 5,
    "parity.suite_splits": 5,
}
RANK_OF_THE_REST = 3

# Pairs that rank alone would allow.
FORBIDDEN_PAIRS = (
    ("parity.checkers", "parity.engines", "checkers read traces, they never drive an engine"),
    ("parity.checkers", "parity.oracle", "checkers are given the oracle's outputs"),
    ("parity.oracle", "scheduler.loop", "the oracle shares nothing with the scheduler"),
    ("parity.oracle", "scheduler.cells", "the oracle shares nothing with the scheduler"),
    ("parity.oracle", "scheduler.prefix", "the oracle shares nothing with the scheduler"),
    ("parity.oracle", "scheduler.policies", "the oracle shares nothing with the scheduler"),
    ("scheduler", "parity", "the scheduler knows nothing of the framework"),
)


def is_inside(module: str, package: str) -> bool:
    """True for the package itself and everything below it."""
    return module == package or module.startswith(f"{package}.")


def rank(module: str) -> int:
    """Rank of a module of scheduler or parity, by its longest listed prefix below ``parity`` itself."""
    prefixes = [prefix for prefix in RANKS if prefix != "parity" and is_inside(module, prefix)]
    if prefixes:
        return RANKS[max(prefixes, key=len)]
    return RANKS["parity"] if module == "parity" else RANK_OF_THE_REST


def check_dependency_direction(sources: list[Source]) -> Iterator[str]:
    """scheduler <- parity.records <- engines, oracle, strategies, faults, checkers <- runner <- the rest."""
    for source in sources:
        if not source.is_python or source.folder not in ("scheduler", "parity"):
            continue
        for line, name in source.imports():
            if not (is_inside(name, "scheduler") or is_inside(name, "parity")):
                continue
            if rank(name) > rank(source.module):
                yield f"{source.path}:{line}: imports {name}, which builds on it"
            for importer, imported, why in FORBIDDEN_PAIRS:
                if is_inside(source.module, importer) and is_inside(name, imported):
                    yield f"{source.path}:{line}: imports {name}: {why}"


def check_scheduler_needs_only_the_standard_library(sources: list[Source]) -> Iterator[str]:
    """scheduler/ is importable where nothing is installed."""
    for source in sources:
        if source.is_python and source.folder == "scheduler":
            for line, name in source.imports():
                top = name.partition(".")[0]
                if top != "scheduler" and top not in sys.stdlib_module_names:
                    yield f"{source.path}:{line}: imports {name}, which is not in the standard library"


def check_llama_cpp_is_imported_in_one_file(sources: list[Source]) -> Iterator[str]:
    """One file knows llama-cpp-python, so that its absence and its aborts are handled in one place."""
    for source in sources:
        if source.is_python and source.path != LLAMA_FILE:
            for line, name in source.imports():
                if name.partition(".")[0] == "llama_cpp":
                    yield f"{source.path}:{line}: imports llama_cpp; use {LLAMA_FILE}"
