"""The repository keeps its own rules, and each rule is shown to catch a file that breaks it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.tidy import layers, purity, shape
from tests.tidy.source import Source, load_sources

Rule = Callable[[list[Source]], Iterator[str]]

# Written in pieces, so that this file does not hold what the rules look for.
SLEEP = "".join(["sle", "ep"])
HOST = ".".join(["pypi", "org"])
HOME, WORK = (f"/{folder}" for folder in ("home", "work"))

# Each rule with small files that break it: path, text.
BAD_FILES: dict[Rule, list[tuple[str, str]]] = {
    layers.check_dependency_direction: [
        ("scheduler/loop.py", "import parity.records"),
        ("parity/records.py", "from parity.run import runner"),
        ("parity/records.py", "from .engines.llama import Engine"),
        ("parity/engines/exact.py", "def f():\n    import parity.run.runner"),
        ("parity/engines/exact.py", "from ..report import timeline"),
        ("parity/run/runner.py", "from parity.cli import main"),
        ("parity/store.py", "from parity.models import resolve_model"),
        ("parity/checkers/bits.py", "from parity.engines import pool"),
        ("parity/reference/llama.py", "from parity.checkers import identity"),
        ("parity/run/oracle.py", "from scheduler.loop import step"),
    ],
    layers.check_every_folder_has_a_floor: [
        ("parity/attic/a.py", "x = 1"),
    ],
    layers.check_no_files_import_each_other: [
        ("scheduler/a.py", "from scheduler.a import b"),
    ],
    layers.check_scheduler_needs_only_the_standard_library: [
        ("scheduler/cells.py", "import numpy as np"),
    ],
    layers.check_engines_are_imported_in_one_file_each: [
        ("parity/run/oracle.py", "import llama_cpp"),
        ("tests/test_x.py", "from llama_cpp import llama_decode"),
        ("parity/a.py", "importlib.import_module('llama_cpp')"),
        ("parity/engines/llama.py", "import xllamacpp"),
    ],
    purity.check_decisions_read_no_clock_chance_or_environment: [
        ("scheduler/loop.py", "import time"),
        ("scheduler/loop.py", "from os import environ"),
        ("scheduler/a.py", "from random import choice"),
        ("scheduler/a.py", "random.shuffle(order)"),
        ("scheduler/a.py", "random.Random()"),
        ("scheduler/a.py", "key = hash(request_id)"),
        ("parity/checkers/a.py", "np.random.normal()"),
        ("parity/checkers/a.py", "path.read_text()"),
    ],
    purity.check_scheduler_never_iterates_a_set: [
        ("scheduler/a.py", "for x in set(ids): pass"),
        ("scheduler/a.py", "for x in {1, 2}: pass"),
        ("scheduler/a.py", "y = [x for x in {i for i in ids}]"),
        ("scheduler/a.py", "live = set()\nfor x in live: pass"),
        ("scheduler/a.py", "class A:\n ids: set[int]\n def f(self): return list(self.ids)"),
        ("scheduler/a.py", "def f(ids: frozenset[int]): return [*ids]"),
        ("scheduler/a.py", "for x in set(a) - b: pass"),
    ],
    purity.check_nothing_loads_code_from_data: [
        ("parity/models/families.py", "yaml.load(text)"),
        ("parity/processes.py", "import pickle"),
        ("parity/a.py", "np.load(path, allow_pickle=True)"),
    ],
    purity.check_tests_never_sleep_or_rerun: [
        ("tests/test_a.py", f"import time\ntime.{SLEEP}(1)"),
        ("tests/test_a.py", f"from time import {SLEEP}"),
        ("tests/test_a.py", "@pytest.mark.flaky\ndef test(): pass"),
    ],
    purity.check_checkers_have_no_tolerance: [
        ("parity/checkers/bits.py", "np.allclose(a, b)"),
    ],
    shape.check_names_say_something: [
        ("parity/utils.py", ""),
        ("parity/cache_manager.py", ""),
        ("parity/common/cells.py", ""),
        ("parity/cells.py", "class CellManager: pass"),
    ],
    shape.check_no_place_of_one_machine_is_written_down: [
        ("docs/a.md", f"see https://{HOST}/simple"),
        ("a.txt", f"in {HOME}/someone/models"),
        ("a.yaml", f"path: '{WORK}/main'"),
    ],
}

# What the rules must leave alone.
GOOD_FILES: dict[Rule, list[tuple[str, str]]] = {
    layers.check_dependency_direction: [
        ("parity/engines/exact.py", "from parity.records import Case\nimport scheduler.cells"),
        ("parity/engines/exact.py", "from parity import store, errors"),
        ("parity/commands/check.py", "from parity import run, report"),
    ],
    layers.check_every_folder_has_a_floor: [
        ("parity/engines/a.py", "x = 1"),
        ("parity/schemas/__init__.py", "x = 1"),
        ("parity/a.py", "x = 1"),
    ],
    layers.check_no_files_import_each_other: [
        ("parity/cases/a.py", "from parity.cases.b import B"),
    ],
    layers.check_engines_are_imported_in_one_file_each: [
        ("parity/engines/llama.py", "import llama_cpp"),
        ("parity/systems/xllama.py", "import xllamacpp"),
    ],
    purity.check_decisions_read_no_clock_chance_or_environment: [
        ("scheduler/a.py", "import random\nrandom.Random(seed)"),
    ],
    purity.check_scheduler_never_iterates_a_set: [
        ("scheduler/a.py", "live = set()\nfor x in sorted(live): pass\n1 in live"),
    ],
    shape.check_names_say_something: [
        ("scheduler/longest_common_prefix.py", "class MemoryLedger: pass"),
    ],
    shape.check_no_place_of_one_machine_is_written_down: [
        ("a.py", "x = 'path/work/a'; y = '~/home/x'"),
    ],
}

RULES = list(BAD_FILES)


def flatten(files: dict[Rule, list[tuple[str, str]]]) -> list[tuple[Rule, str, str]]:
    """One row for each file: rule, path, text."""
    return [(rule, path, text) for rule, rows in files.items() for path, text in rows]


def name(value: object) -> str:
    """Identifier of a parameter: the rule's name without its verb, or a file's path."""
    return value.__name__.removeprefix("check_") if callable(value) else str(value)[:40].replace("\n", ";")


@pytest.fixture(scope="module")
def sources() -> list[Source]:
    found = load_sources()
    assert {"scheduler/__init__.py", "parity/cli.py", "tests/tidy/test_tidy.py"} <= {
        source.path for source in found
    }
    return found


@pytest.mark.parametrize("rule", RULES, ids=name)
def test_repository_obeys(rule: Rule, sources: list[Source]) -> None:
    if complaints := list(rule(sources)):
        pytest.fail("\n".join([rule.__doc__, *complaints]), pytrace=False)


@pytest.mark.parametrize(("rule", "path", "text"), flatten(BAD_FILES), ids=name)
def test_rule_rejects_a_file_that_breaks_it(rule: Rule, path: str, text: str) -> None:
    assert [
        complaint for complaint in rule([Source(path, text)]) if complaint.startswith(path.partition("/")[0])
    ]


@pytest.mark.parametrize(("rule", "path", "text"), flatten(GOOD_FILES), ids=name)
def test_rule_accepts_a_file_that_keeps_it(rule: Rule, path: str, text: str) -> None:
    assert list(rule([Source(path, text)])) == []


def test_every_rule_is_in_the_list() -> None:
    defined = {
        value
        for module in (layers, purity, shape)
        for key, value in vars(module).items()
        if key.startswith("check_")
    }
    assert defined == set(RULES)


def test_a_circle_of_two_files_is_found_whichever_comes_first() -> None:
    files = [
        Source("parity/cases/a.py", "from parity.cases.b import B"),
        Source("parity/cases/b.py", "def f():\n    from parity.cases import c"),
        Source("parity/cases/c.py", "import parity.cases.a"),
        Source("parity/cases/d.py", "import parity.cases.a"),
    ]
    expected = [
        "parity/cases/a.py: imports itself through " + " -> ".join(f"parity.cases.{x}" for x in "abca")
    ]
    assert list(layers.check_no_files_import_each_other(files)) == expected
    assert len(list(layers.check_no_files_import_each_other(files[::-1]))) == 1
    assert list(layers.check_no_files_import_each_other(files[:2])) == []
