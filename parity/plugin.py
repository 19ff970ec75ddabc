"""The pytest plugin: markers from the manifests, the provenance line, the user's own scheduler or engine.

Thin hooks; what they do lives in the modules that they call.
"""

from __future__ import annotations

import pytest

from parity.errors import UsageError
from parity.families import load_families


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("samebytes")
    group.addoption("--scheduler", metavar="PACKAGE:FACTORY", default=None,
                    help="run the engine-agnostic suites against this scheduler")
    group.addoption("--engine", metavar="PACKAGE:FACTORY", default=None,
                    help="run the engine-agnostic suites against this engine")


def pytest_configure(config: pytest.Config) -> None:
    try:
        for family in load_families().values():
            config.addinivalue_line("markers", f"{family.marker}: tests of the {family.name} family "
                                               f"({family.kv_class.value})")
    except UsageError as error:
        raise pytest.UsageError(error.line) from error


def pytest_report_header(config: pytest.Config) -> list[str]:
    from parity.provenance import provenance_line

    if hasattr(config, "workerinput"):
        return []
    try:
        return [f"samebytes: {provenance_line(None)}",
                *(f"samebytes: model {family.name} {family.row('tiny').sha256}" for family in load_families().values())]
    except UsageError as error:
        return [f"samebytes: {error.line}"]


def family_params(*names: str) -> list:
    """Parameters for ``pytest.mark.parametrize("family", ...)``: every family (or ``names``) under its marker."""
    families = load_families()
    return [pytest.param(name, marks=getattr(pytest.mark, families[name].marker)) for name in names or families]
