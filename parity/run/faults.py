"""What can happen during a run, how it is made to happen, and what must come of it.

Whatever happens, every accepted session ends exactly once, with its result or with an error that says why.
After a cancel it has the tokens that it had; where a stage is lost the error names it; after three failed
steps without a new row the error is typed. After everything else it gives its solo answer, rebuilt where an
engine or its process was in doubt. A full disk costs the memory of answers, nothing half-written stays.
"""

from __future__ import annotations

import os
import resource
import select
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from parity.records import Case, Fault, FaultKind

OWN_PROCESS = frozenset({FaultKind.WORKER_KILLED, FaultKind.OUT_OF_MEMORY})


def needs_own_process(case: Case) -> bool:
    """Whether a case kills its engine, which then must not be the process that judges."""
    return case.split is None and any(fault.kind in OWN_PROCESS for fault in case.faults)


def inject_fault(engine: Any, fault: Fault, *, split: bool = False) -> bool:
    """Arm a fault that only an engine can show, for its next step; False if this engine cannot show it."""
    if fault.kind in (FaultKind.NO_SLOT, FaultKind.DECODE_ERROR):
        engine.fail_before_call = fault.call
    elif fault.kind in OWN_PROCESS and getattr(engine, "restarts", False):
        engine.break_next = (0, "killed" if fault.kind is FaultKind.WORKER_KILLED else "out_of_memory")
    elif fault.kind is FaultKind.STAGE_LOST and split:
        engine.break_next = (fault.call % len(engine.limits), "killed")
    else:
        return fault.kind is FaultKind.DISK_FULL
    return True


@contextmanager
def full_disk(full: bool = True) -> Iterator[None]:
    """While it lasts this process can write no byte to a regular file (RLIMIT_FSIZE), as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if full:
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def hang_here(arguments: dict[str, Any]) -> None:
    """Never answer: what a worker's caller must survive."""
    select.select([], [], [])


def die_here(arguments: dict[str, Any]) -> None:
    """End this process as the system's out-of-memory killer would."""
    os.kill(os.getpid(), signal.SIGKILL)
