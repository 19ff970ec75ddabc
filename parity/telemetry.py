"""Writes the scheduler's telemetry, JSON lines of one record a step, reads it, sums it and draws it."""

from __future__ import annotations

import contextlib
import io
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from parity.errors import UsageError
from scheduler.telemetry import GAUGES, StepRecord

Step = dict[str, Any]  # a number by name, and ``preemptions``: one dictionary each
PREEMPTION_KEYS = ("reason", "mode", "policy", "client", "epoch")

TOKENS = {"prefill_tokens": "prefill", "decode_tokens": "decode", "recompute_tokens": "recompute"}
QUEUES = {"running": "running", "waiting": "waiting", "suspended": "suspended"}
POOL = {"cells_used": "used", "cells_available": "available", "cells_shared": "shared more than once"}


@contextlib.contextmanager
def step_log(path: Path | None) -> Iterator[Callable[[StepRecord], None]]:
    """Writes each record that it is given as a line, at once, so that nothing is lost with the process; None
    writes nothing. Raises ``UsageError``. A disk that fills up ends the log and not the serving.
    """
    if path is None:
        yield lambda record: None
        return
    file: io.FileIO | None
    try:
        file = open(path, "wb", buffering=0)
    except OSError as error:
        raise UsageError("telemetry cannot be written", where=str(path), why=str(error.strerror)) from error

    def write(record: StepRecord) -> None:
        nonlocal file
        try:
            if file is not None:
                file.write(record.to_json().encode() + b"\n")
        except OSError as error:
            file = None
            print(f"telemetry ends here: {path}: {error.strerror}", file=sys.stderr)

    with file:
        yield write


def read_steps(path: Path) -> list[Step]:
    """The records of a file in order. Raises ``UsageError`` naming the line that is none."""
    names = StepRecord().as_dict()
    try:
        if not path.is_file():  # a device may never end
            raise FileNotFoundError("there is no such file")
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError("telemetry cannot be read", where=str(path), why=str(error)) from error
    steps = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            step = json.loads(line)
            missing = [name for name in (*names, "preemptions") if name not in step]
        except (ValueError, TypeError) as error:
            raise UsageError("not a step record", where=f"{path}:{number}", why=str(error)) from error
        if missing:
            raise UsageError(
                "not a step record", where=f"{path}:{number}", why=f"it lacks {', '.join(missing)}"
            )
        steps.append(step)
    if not steps:
        raise UsageError(
            "no step record", where=str(path), todo="write one with parity serve or bench --telemetry FILE"
        )
    return steps


def preemption_counts(steps: Iterable[Step]) -> list[dict[str, Any]]:
    """Preemptions and the rows that they took away, by reason, mode, policy, client and epoch; an epoch above
    1 is a session that was preempted before.
    """
    counts: Counter[tuple] = Counter()
    rows: Counter[tuple] = Counter()
    for step in steps:
        for item in step["preemptions"]:
            key = tuple(item[name] for name in PREEMPTION_KEYS)
            counts[key] += 1
            rows[key] += item["released_rows"]
    return [
        dict(zip(PREEMPTION_KEYS, key, strict=True)) | {"count": counts[key], "released_rows": rows[key]}
        for key in sorted(counts)
    ]


class Totals:
    """Sums of the counters and maxima of the gauges over all steps."""

    def __init__(self, steps: Iterable[Step] = ()) -> None:
        self.steps, self.values = 0, StepRecord().as_dict()
        for step in steps:
            self.add(step)

    def add(self, step: Step) -> None:
        self.steps += 1
        for name, old in self.values.items():
            self.values[name] = max(old, step[name]) if name in GAUGES else old + step[name]

    @property
    def bubble_share(self) -> float:
        """The part of the places for steps in flight that were empty when steps were launched."""
        return self.values["pipeline_bubbles"] / max(self.values["pipeline_places"], 1)

    def as_dict(self) -> dict[str, float]:
        return {"steps": self.steps, **self.values}


def plot_steps(steps: list[Step], *, kind: str) -> bytes:
    """A picture (``png`` or ``svg``): cells of the pool, queues, tokens by
    kind, each over the step's number.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 8), layout="constrained")
    pool, queues, tokens = figure.subplots(3, 1, sharex=True)
    numbers = list(range(len(steps)))  # not the schedulers' own: a bench has one for each of its points
    _lines(pool, numbers, steps, POOL, "cells")
    _lines(queues, numbers, steps, QUEUES, "sessions")
    tokens.stackplot(
        numbers, *([step[name] for step in steps] for name in TOKENS), labels=list(TOKENS.values())
    )
    for name, mark in (("preempted", "v"), ("engine_failures", "x")):
        at = [step["step"] for step in steps if step[name]]
        if at:
            tokens.plot(at, [0] * len(at), mark, color="black", label=name.replace("_", " "), clip_on=False)
    tokens.set(ylabel="rows", xlabel="step")
    tokens.legend(loc="upper right")
    picture = io.BytesIO()
    figure.savefig(picture, format=kind, metadata={"Date": None} if kind == "svg" else None)
    return picture.getvalue()


def _lines(axes: Any, numbers: Sequence[float], steps: list[Step], names: dict[str, str], unit: str) -> None:
    for name, label in names.items():
        axes.plot(numbers, [step[name] for step in steps], label=label, drawstyle="steps-post")
    axes.set(ylabel=unit)
    axes.legend(loc="upper right")
