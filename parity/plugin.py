"""The pytest plugin: markers from the manifests, the provenance line, the user's own scheduler or engine.

Thin hooks; what they do lives in the modules that they call.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from parity.errors import UsageError
from parity.models.families import load_families
from parity.run.under_test import Brought
from parity.store import REPOSITORY, SHIPPED

if TYPE_CHECKING:
    from parity.gate.plan import GateJob
    from parity.gate.result import CheckKind
    from scheduler.limits import Layout

ON_DEMAND = {
    "quantised": "runs models quantised by llama.cpp itself (slower)",
    "nightly": "too slow for the default suite, or needs downloaded models",
    "transformers": "the reference beside Hugging Face transformers; needs torch and transformers, which no "
    "lock has",
}
SUITES = "samebytes.suites"


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
        if brought_by(config).options:
            brought_by(config).why_no_bits()
        for name, said in ON_DEMAND.items():
            config.addinivalue_line("markers", f"{name}: {said}")
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
    """Leave our slow suites out unless ``-m`` names them; the user's own tests are the user's. Runs last:
    syrupy must see the items that are left out.
    """
    left_out = [mark for mark in ON_DEMAND if mark not in (config.option.markexpr or "")]
    dropped = [
        item
        for item in items
        if is_ours(item.path) and any(item.get_closest_marker(mark) for mark in left_out)
    ]
    if dropped:
        config.hook.pytest_deselected(items=dropped)
        items[:] = [item for item in items if item not in dropped]


def pytest_report_header(config: pytest.Config) -> list[str]:
    from parity.run.profiles import provenance_line

    if hasattr(config, "workerinput") or not is_about_us(config):
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


def is_ours(path: Path) -> bool:
    """Whether a test file is one of the project's own, in the checkout or in the wheel."""
    return path.is_relative_to(REPOSITORY if SHIPPED == REPOSITORY else SHIPPED)


def is_about_us(config: pytest.Config) -> bool:
    """Whether a run is of our suites: a stranger's test run is told nothing."""
    named = any(str(argument).startswith(SUITES) for argument in config.args)
    own = SHIPPED == REPOSITORY and config.rootpath.resolve() == REPOSITORY
    return named or own or bool(brought_by(config).options) or any(is_ours(Path(a)) for a in config.args)


def family_params(*names: str) -> list:
    """Parameters for ``pytest.mark.parametrize("family", ...)``: every family
    (or ``names``) under its marker.
    """
    families = load_families()
    return [
        pytest.param(name, marks=getattr(pytest.mark, families[name].marker)) for name in names or families
    ]


@functools.cache
def gate_jobs(kind: CheckKind) -> tuple[GateJob, ...]:
    """The jobs of one kind in ``parity gate`` without options: what the suites run is what a merge needs."""
    from parity.gate.plan import plan_jobs  # not in every test run of a stranger
    from parity.gate.result import GateOptions

    options = GateOptions(families=tuple(load_families()), is_selection=False, required={})
    return tuple(job for job in plan_jobs(options) if job.kind is kind)


def _shards(job: GateJob) -> str:
    return f"{job.layout.value}-{job.shards}" if job.layout is not None and job.shards > 1 else ""


def gate_params(kind: CheckKind, *layouts: Layout) -> list:
    """Those jobs (of ``layouts``, if any are named) for ``pytest.mark.parametrize("job", ...)``, each under
    its family's marker.
    """
    families = load_families()
    return [
        pytest.param(
            job,
            marks=getattr(pytest.mark, families[job.family].marker),
            id="-".join(
                filter(None, (job.layout.value if layouts else "", job.family, job.split, _shards(job)))
            ),
        )
        for job in gate_jobs(kind)
        if not layouts or job.layout in layouts
    ]
