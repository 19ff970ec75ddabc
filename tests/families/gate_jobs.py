"""The gate's own list of jobs as parameters: what the family tests run is what a merge needs."""

from __future__ import annotations

import functools

import pytest

from parity.gate.plan import GateJob, plan_jobs
from parity.gate.result import CheckKind, GateOptions
from parity.models.families import load_families
from scheduler.limits import Layout


@functools.cache
def gate_jobs(kind: CheckKind) -> tuple[GateJob, ...]:
    """The jobs of one kind in ``parity gate`` without options."""
    options = GateOptions(families=tuple(load_families()), is_selection=False, required={})
    return tuple(job for job in plan_jobs(options) if job.kind is kind)


def gate_params(kind: CheckKind, *layouts: Layout) -> list:
    """Those jobs (of ``layouts``, if any are named) for ``pytest.mark.parametrize("job", ...)``, each under
    its family's marker.
    """
    families = load_families()
    return [
        pytest.param(
            job,
            marks=getattr(pytest.mark, families[job.family].marker),
            id="-".join(filter(None, (job.layout.value if layouts else "", job.family, job.split))),
        )
        for job in gate_jobs(kind)
        if not layouts or job.layout in layouts
    ]
