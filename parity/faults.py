"""What can happen during a run, how it is made to happen, and what must come of it."""

from __future__ import annotations

import os
import resource
import select
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

from parity.records import Case, Fault, FaultKind

# Whatever happens, every accepted session ends exactly once, with its result or with an error that says why.
REQUIRED: Mapping[FaultKind, str] = MappingProxyType(
    {
        FaultKind.CANCEL: "the session ends with the tokens it had; the others give their solo answers",
        FaultKind.PREEMPT: "the session is rebuilt and gives its solo answer",
        FaultKind.NO_SLOT: "the step is given up and all are rebuilt; all give their solo answers",
        FaultKind.DECODE_ERROR: "as no_slot, whichever call fails; three without a new row are a typed error",
        FaultKind.SLOW_STEP: "nothing but time is lost; all give their solo answers",
        FaultKind.CLOCK_JUMP: "order and answers stay, whichever way the clock jumps",
        FaultKind.WORKER_KILLED: "the step fails, a new process is started, every session is rebuilt in it",
        FaultKind.OUT_OF_MEMORY: "the step fails, the process is replaced, every session is rebuilt in it",
        FaultKind.STAGE_LOST: "the sessions in the step end with an error that names the stage",
        FaultKind.DISK_FULL: "answers are not remembered, nothing half-written stays, verdicts do not change",
    }
)
OWN_PROCESS = frozenset({FaultKind.WORKER_KILLED, FaultKind.OUT_OF_MEMORY})


def needs_own_process(case: Case) -> bool:
    """Whether a case kills its engine, which then must not be the process that judges."""
    return case.split is None and any(fault.kind in OWN_PROCESS for fault in case.faults)


def inject_fault(engine: Any, fault: Fault, *, split: bool = False) -> bool:
    """Arm a fault that only an engine can show, for its next step; False if this engine cannot show it."""
    if fault.kind in (FaultKind.NO_SLOT, FaultKind.DECODE_ERROR):
        engine.fail_before_call = fault.call
    elif fault.kind is FaultKind.WORKER_KILLED and hasattr(engine, "die_before_call"):
        engine.die_before_call = 0
    elif fault.kind is FaultKind.OUT_OF_MEMORY and hasattr(engine, "exhaust_before_call"):
        engine.exhaust_before_call = 0
    elif fault.kind is FaultKind.STAGE_LOST and split:
        engine.lose_next = fault.call % len(engine.limits)
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
