"""What a decode call costs on this machine, and the number of shards that follows from it.

A call of ``n`` rows, each of which sees ``own`` cells, over a pool with ``cells`` cells in use takes about

    call + n * (row + own_cell * own + cell * cells)        (one thread)

because every row's attention walks all cells in use, and is slower where it sees one. ``N`` sessions of ``L``
cells each in ``K`` shards, one row each, cost ``K * call + N * (row + own_cell * L) + cell * N^2 * L / K``:
least at ``K = N * sqrt(cell * L / call)``.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np

from parity.engines.llama import LlamaModel
from parity.engines.numerics import NumericsProfile
from parity.engines.pool import PAD_TOKEN, PoolContext
from parity.models import resolve_model
from parity.models.families import load_family
from parity.processes import Worker
from parity.run.profiles import engine_fingerprint, profile_of
from parity.store import cache_dir, save_text
from scheduler.limits import Layout

FORMAT = 2
SEQUENCES = 32
CELLS_EACH = (2, 16, 64)  # of every sequence, in turn, while time is left; then all but 2 are one sequence's
ROWS = (2, 8, 32)
REPEATS = 5  # the fastest counts: a busy machine only makes a call slower
MOST_SECONDS = 20.0  # for filling; beyond it the larger pools are left out
MOST_SHARDS = 32
CALL_ROWS = 32  # when the pool is filled


@dataclass(frozen=True, slots=True)
class CallCost:
    """Seconds of one thread: of a call, of a row in it, of a cell that a row sees, and of a row and cell in
    use.
    """

    call_s: float
    row_s: float
    own_cell_s: float
    cell_s: float

    def step_s(self, *, sessions: int, cells: float, shards: int, threads: int, call_rows: int) -> float:
        """Seconds of a step in which each of ``sessions``, of ``cells`` cells each, computes one row;
        ``call_rows`` bounds the rows of a call.
        """
        own_threads = max(1, threads // shards)
        rows = -(-sessions // shards)
        calls = -(-rows // call_rows)
        a_row_s = self.row_s + self.own_cell_s * cells + self.cell_s * rows * cells
        call_s = calls * self.call_s + rows * a_row_s
        turns = -(-min(shards, sessions) // max(1, threads // own_threads))
        return turns * call_s / own_threads

    def best_shards(self, *, sessions: int, cells: float, threads: int, most: int, call_rows: int) -> int:
        """The number of shards, at most ``most``, with the shortest such step; the smallest of equals."""

        def step_s(shards: int) -> float:
            return self.step_s(
                sessions=sessions, cells=cells, shards=shards, threads=threads, call_rows=call_rows
            )

        return min(range(1, max(1, min(most, sessions, MOST_SHARDS)) + 1), key=step_s)


class Sample(NamedTuple):
    """A measured call: its rows, the cells in use, those that each row sees, and its seconds."""

    rows: int
    cells: int
    own: int
    seconds: float


def fit(samples: Sequence[Sample]) -> CallCost:
    """The cost that calls show: least squares of relative errors, none negative."""
    rows, cells, own, seconds = (np.array(column, np.float64) for column in zip(*samples, strict=True))
    columns = np.stack([np.ones_like(rows), rows, rows * own, rows * cells]) / seconds
    kept = list(range(len(columns)))
    while True:
        found, *_ = np.linalg.lstsq(columns[kept].T, np.ones_like(seconds), rcond=None)
        if len(kept) == 1 or found.min() >= 0:
            break
        kept.remove(kept[int(found.argmin())])
    costs = [0.0] * len(columns)
    for index, value in zip(kept, found, strict=True):
        costs[index] = max(float(value), 0.0)
    return CallCost(*costs)


@functools.cache
def cost_of(model: str, *, again: bool = False) -> CallCost:
    """The remembered cost of a model on this build and CPU; measured if there is none, or ``again``."""
    file, profile = resolve_model(model), profile_of(model).profile
    identity = json.dumps([FORMAT, file.sha256, engine_fingerprint(), profile.to_json()], sort_keys=True)
    path = cache_dir("call_costs") / f"{hashlib.blake2b(identity.encode(), digest_size=16).hexdigest()}.json"
    if not again:
        with contextlib.suppress(OSError, ValueError, TypeError):
            return CallCost(**json.loads(path.read_text()))
    cost = measure(model)
    save_text(path, json.dumps(asdict(cost)))
    return cost


def measure(model: str) -> CallCost:
    """Measure in a process of its own: it has the environment of the model's numerics."""
    profile = profile_of(model).profile
    worker = Worker(profile.environment)
    try:
        arguments = {"model": model, "profile": profile.to_json()}
        answer = worker.call("parity.run.call_cost:samples_here", arguments)
    finally:
        worker.close()
    return fit([Sample(*sample) for sample in answer["samples"]])


def samples_here(arguments: dict[str, Any]) -> dict[str, Any]:
    """In the worker: decode calls of several widths over pools of several sizes, one thread each."""
    file = resolve_model(arguments["model"])
    family, profile = load_family(file.family), NumericsProfile.from_json(arguments["profile"])
    model = LlamaModel(file.path, use_extra_bufts=profile.use_extra_bufts)
    samples: list[Sample] = []
    started = perf_counter()
    for each in CELLS_EACH:
        if samples and perf_counter() - started > MOST_SECONDS / 4:
            break  # the next one is four times as large
        for own in dict.fromkeys((each, CELLS_EACH[0])):
            pool = PoolContext(
                model,
                layout=Layout.UNIFIED,
                num_sequences=SEQUENCES + 1,
                num_cells=SEQUENCES * (each + len(ROWS) * REPEATS),
                shadow=family.needs_shadow,
                recurrent=family.is_hybrid,
                profile=profile,
            )
            samples += _samples(pool, own=own, others=SEQUENCES * (each - own))
            pool.close()
    model.close()
    return {"samples": samples}


def _samples(pool: PoolContext, *, own: int, others: int) -> list[Sample]:
    """Calls of several widths by sequences of ``own`` cells, beside one that has ``others``."""
    for sequence, length in enumerate((*[own] * SEQUENCES, others)):
        for start in range(0, length, CALL_ROWS):
            _decode(pool, [(sequence, at) for at in range(start, min(start + CALL_ROWS, length))])
    lengths, used, samples = [own] * SEQUENCES, SEQUENCES * own + others, []
    for rows in ROWS:
        taken = []
        for _ in range(REPEATS):
            seconds = _decode(pool, [(sequence, lengths[sequence]) for sequence in range(rows)])
            taken.append(Sample(rows, used, lengths[0], seconds))
            used += rows
            lengths[:rows] = [length + 1 for length in lengths[:rows]]
        samples.append(min(taken, key=lambda sample: sample.seconds))
    return samples


def _decode(pool: PoolContext, rows: Sequence[tuple[int, int]]) -> float:
    """Seconds of one call with (sequence, position) rows."""
    context, count = pool.context, len(rows)
    first = np.array([sequence for sequence, _ in rows], np.int32)[:, None] * pool.ids_per_row
    context.tokens[:count] = PAD_TOKEN
    context.positions[:count] = [position for _, position in rows]
    context.seq_ids[:count] = first + np.arange(pool.ids_per_row, dtype=np.int32)
    context.wanted[:count] = 1
    begin_s = perf_counter()
    pool.decode(count)
    return perf_counter() - begin_s
