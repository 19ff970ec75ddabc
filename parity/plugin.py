"""The pytest plugin: markers from the manifests, the provenance line, the user's own scheduler or engine.

Thin hooks; what they do lives in the modules that they call.
"""

from __future__ import annotations

import pytest

from parity.errors import UsageError
from parity.models.families import load_families
from parity.run.under_test import Brought

ON_DEMAND = ("quantised", "nightly", "transformers")


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("samebytes")
    group.addoption(
        "--scheduler",
        metavar="PACKAGE:FACTORY",
        default=None,
        help="run tests/machine and the concurrent-parity suites with this scheduler",
    )
    group.addoption(
        "--engine",
        metavar="PACKAGE:FACTORY",
        default=None,
        help="run tests/machine and the concurrent-parity suites on this engine",
    )


def pytest_configure(config: pytest.Config) -> None:
    try:
        brought_by(config).why_no_bits()
        for family in load_families().values():
            config.addinivalue_line(
                "markers", f"{family.marker}: tests of the {family.name} family ({family.kv_class.value})"
            )
    except UsageError as error:
        raise pytest.UsageError(error.line) from error


def brought_by(config: pytest.Config) -> Brought:
    """What ``--scheduler`` and ``--engine`` name."""
    return Brought(scheduler=config.getoption("--scheduler"), engine=config.getoption("--engine"))


@pytest.fixture(scope="session")
def brought(pytestconfig: pytest.Config) -> Brought:
    """The user's scheduler and engine, or ours: what the engine-agnostic suites are about."""
    return brought_by(pytestconfig)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave the slow suites out unless ``-m`` names them. Runs last: syrupy must
    see the items that are left out.
    """
    left_out = [mark for mark in ON_DEMAND if mark not in (config.option.markexpr or "")]
    dropped = [item for item in items if any(item.get_closest_marker(mark) for mark in left_out)]
    if dropped:
        config.hook.pytest_deselected(items=dropped)
        items[:] = [item for item in items if item not in dropped]


def pytest_report_header(config: pytest.Config) -> list[str]:
    from parity.run.profiles import provenance_line

    if hasattr(config, "workerinput"):
        return []
    try:
        return [
            f"samebytes: {provenance_line(None)}{brought_by(config).options}",
            *(
                f"samebytes: model {family.name} {family.row('tiny').sha256}"
                for family in load_families().values()
            ),
        ]
    except UsageError as error:
        return [f"samebytes: {error.line}"]


def family_params(*names: str) -> list:
    """Parameters for ``pytest.mark.parametrize("family", ...)``: every family
    (or ``names``) under its marker.
    """
    families = load_families()
    return [
        pytest.param(name, marks=getattr(pytest.mark, families[name].marker)) for name in names or families
    ]
