"""What decides and what judges depends on nothing but its arguments; nothing loads code from data."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tests.tidy.source import Source, called_name, dotted_name

AMBIENT_MODULES = {
    "datetime",
    "os",
    "platform",
    "secrets",
    "socket",
    "subprocess",
    "tempfile",
    "threading",
    "time",
    "uuid",
}
DISK_CALLS = {"read_text", "write_text", "read_bytes", "write_bytes", "mkdir", "unlink"}
UNSAFE_MODULES = {"cloudpickle", "dill", "marshal", "pickle", "shelve"}
TOLERANT_CALLS = {"allclose", "approx", "isclose"}


def is_pure(source: Source) -> bool:
    """Files whose outcome may depend on their arguments alone."""
    return source.is_python and (
        source.folder == "scheduler"
        or source.path.startswith("parity/checkers/")
        or source.path in ("parity/checkers.py", "parity/records.py")
    )


def check_decisions_read_no_clock_chance_or_environment(sources: list[Source]) -> Iterator[str]:
    """No clock, unseeded randomness, environment or disk in scheduler/, the checkers and the records."""
    for source in filter(is_pure, sources):
        for line, name in source.imports():
            if name.partition(".")[0] in AMBIENT_MODULES:
                yield f"{source.path}:{line}: imports {name}: time and settings come in as arguments"
            if name.startswith("random.") and name != "random.Random":
                yield f"{source.path}:{line}: imports {name}: only a seeded random.Random may be used"
        for node in source.nodes:
            name = dotted_name(node) if isinstance(node, ast.Attribute) else ""
            if (
                name.startswith(("np.random.", "numpy.random."))
                or name.startswith("random.")
                and name != "random.Random"
            ):
                yield f"{source.path}:{node.lineno}: {name}: only a seeded random.Random may be used"
        for call in source.calls():
            name = called_name(call)
            if name in ("random.Random", "Random") and not call.args:
                yield f"{source.path}:{call.lineno}: {name}() without a seed"
            if name in ("hash", "id", "input"):
                yield f"{source.path}:{call.lineno}: {name}() differs from process to process"
            if name == "open" or name.rpartition(".")[2] in DISK_CALLS:
                yield f"{source.path}:{call.lineno}: {name}() touches the disk"


def check_scheduler_never_iterates_a_set(sources: list[Source]) -> Iterator[str]:
    """A set's order is not part of its value: plans made from one would differ from run to run."""
    for source in sources:
        if not source.is_python or source.folder != "scheduler":
            continue
        names = set(_names_of_sets(source))
        for node in source.nodes:
            for line, iterated in _iterated(node):
                if _is_set(iterated) or dotted_name(iterated) in names:
                    yield f"{source.path}:{line}: iterates a set: {ast.unparse(iterated)}"


def _is_set(node: ast.AST | None) -> bool:
    if isinstance(node, ast.Set | ast.SetComp):
        return True
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitAnd | ast.BitOr | ast.Sub | ast.BitXor):
        return _is_set(node.left) or _is_set(node.right)
    return isinstance(node, ast.Call) and called_name(node) in ("set", "frozenset")


def _names_of_sets(source: Source) -> Iterator[str]:
    """Names and attributes that hold a set: assigned one, or annotated as one."""
    for node in source.nodes:
        if isinstance(node, ast.Assign) and _is_set(node.value):
            yield from filter(None, map(dotted_name, node.targets))
        elif isinstance(node, ast.AnnAssign) and (_is_set(node.value) or _says_set(node.annotation)):
            yield dotted_name(node.target)
            if isinstance(node.target, ast.Name):
                yield f"self.{node.target.id}"  # a field of a class
        elif isinstance(node, ast.arg) and _says_set(node.annotation):
            yield node.arg


def _says_set(annotation: ast.AST | None) -> bool:
    base = annotation.value if isinstance(annotation, ast.Subscript) else annotation
    return isinstance(base, ast.Name) and base.id in ("set", "frozenset", "AbstractSet", "Set")


def _iterated(node: ast.AST) -> Iterator[tuple[int, ast.AST]]:
    if isinstance(node, ast.For):
        yield node.lineno, node.iter
    elif isinstance(node, ast.comprehension):
        yield node.iter.lineno, node.iter
    elif isinstance(node, ast.Starred):
        yield node.lineno, node.value
    elif (
        isinstance(node, ast.Call)
        and called_name(node) in ("list", "tuple", "iter", "enumerate", "deque")
        and node.args
    ):
        yield node.lineno, node.args[0]


def check_nothing_loads_code_from_data(sources: list[Source]) -> Iterator[str]:
    """No pickle and its kin, no yaml.load, no numpy arrays of objects."""
    for source in filter(lambda source: source.is_python, sources):
        for line, name in source.imports():
            if name.partition(".")[0] in UNSAFE_MODULES:
                yield f"{source.path}:{line}: imports {name}, which runs code found in data"
        for call in source.calls():
            name = called_name(call)
            if name in ("yaml.load", "yaml.unsafe_load", "yaml.full_load", "yaml.load_all"):
                yield f"{source.path}:{call.lineno}: {name}; use yaml.safe_load"
            for keyword in call.keywords:
                if keyword.arg == "allow_pickle" and getattr(keyword.value, "value", True) is not False:
                    yield f"{source.path}:{call.lineno}: {name}(allow_pickle=...) runs code found in data"


def check_tests_never_sleep_or_rerun(sources: list[Source]) -> Iterator[str]:
    """A test that waits for time to pass, or that may be run again until it is green, proves nothing."""
    for source in sources:
        if not source.is_python or not source.path.startswith(("tests/", "conftest.py", "parity/checkers")):
            continue
        for line, name in source.imports():
            if name in ("time.sleep", "asyncio.sleep"):
                yield f"{source.path}:{line}: imports {name}"
        for node in source.nodes:
            name = dotted_name(node) if isinstance(node, ast.Attribute) else ""
            if name in ("time.sleep", "asyncio.sleep", "pytest.mark.flaky"):
                yield f"{source.path}:{node.lineno}: {name}"


def check_checkers_have_no_tolerance(sources: list[Source]) -> Iterator[str]:
    """Identical means identical."""
    for source in sources:
        if source.is_python and source.path.startswith("parity/checkers"):
            for call in source.calls():
                if called_name(call).rpartition(".")[2] in TOLERANT_CALLS:
                    yield f"{source.path}:{call.lineno}: {called_name(call)} tolerates a difference"
