"""What every context held, step by step, read off operations and calls: nobody's own counts are believed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from parity.history import Run, TraceStep, session_index
from parity.records import Case, FaultKind
from scheduler.engine import PAD_ROW, Call, MemoryOp, OpKind
from scheduler.limits import Layout


@dataclass(slots=True)
class StageMemory:
    """Rows of one context by sequence id: position -> cell. Cells that the engine chooses are numbered as
    they come, from -1 down. ``copied_from`` names the source of a sequence that began as a copy.
    """

    streams: bool
    rows: dict[int, dict[int, int]] = field(default_factory=dict)
    copied_from: dict[int, int] = field(default_factory=dict)
    touched: list[int] = field(default_factory=list)  # sequences that lost rows since it was emptied
    life: dict[int, int] = field(default_factory=dict)  # how often an id was begun anew
    _unnamed: int = 0

    def apply(self, op: MemoryOp) -> None:
        """Carry out one operation as llama.cpp would."""
        if op.kind is OpKind.CLEAR:
            self.touched += self.rows
            self.rows.clear()
            self.copied_from.clear()
        elif op.kind is OpKind.COPY:
            stop = op.stop if op.stop >= 0 else float("inf")
            copied = {p: cell for p, cell in self.rows.get(op.source, {}).items() if op.start <= p < stop}
            if self.streams:
                copied = {position: self._cell(-1) for position in copied}
            self._begin(op.seq_id).update(copied)
            self.copied_from[op.seq_id] = op.source
        elif op.kind is OpKind.REMOVE and op.seq_id in self.rows:
            stop = op.stop if op.stop >= 0 else float("inf")
            kept = {p: c for p, c in self.rows[op.seq_id].items() if not op.start <= p < stop}
            if len(kept) < len(self.rows[op.seq_id]):
                self.touched.append(op.seq_id)
            self.rows[op.seq_id] = kept
            if not kept:
                del self.rows[op.seq_id]
                self.copied_from.pop(op.seq_id, None)

    def place(self, call: Call, positions: tuple[int, ...]) -> None:
        """Put a call's rows where they belong."""
        for row, seq_id, cell in zip(call.rows, call.seq_ids, call.cells, strict=True):
            if row != PAD_ROW:
                self._begin(seq_id)[positions[row]] = self._cell(cell)

    def _begin(self, seq_id: int) -> dict[int, int]:
        if seq_id not in self.rows:
            self.rows[seq_id] = {}
            self.life[seq_id] = self.life.get(seq_id, 0) + 1
        return self.rows[seq_id]

    def _cell(self, cell: int) -> int:
        if cell >= 0 and not self.streams:
            return cell
        self._unnamed -= 1
        return self._unnamed


@dataclass(slots=True)
class Stay:
    """Where one session is: its context and its sequence id there (the first stage's), the rows that it has,
    the most it ever had.

    ``lost`` once its rows were seen to be taken, ``leaves`` once it was told to give them up.
    """

    sequence: tuple[int, int]
    rows: int
    furthest: int
    lost: bool = False
    leaves: bool = False


@dataclass(frozen=True, slots=True)
class StepFacts:
    """What one step is seen to have done, by session.

    ``shared`` entered for the first time on rows that were copied from another's sequence, ``displaced`` lost
    their rows, ``resumed`` came back after that, ``moved`` in another shard, ``rebuilt`` computed rows again;
    ``full`` says whether no cell (in streams: no sequence) of some stage was left when the rows were placed.
    """

    traced: TraceStep
    shared: tuple[int, ...]
    displaced: tuple[int, ...]
    resumed: tuple[int, ...]
    moved: tuple[int, ...]
    rebuilt: tuple[int, ...]
    full: bool

    @property
    def failed(self) -> bool:
        traced = self.traced
        return traced.result is None and bool(traced.flight.plan.chunks) and not traced.is_given_up


def facts_of(run: Run) -> Iterator[StepFacts]:
    """The facts of every step of a run, in order."""
    return _Residences(run).steps()


class _Residences:
    def __init__(self, run: Run) -> None:
        self.run, self.case = run, run.case
        self.stages: list[StageMemory] = []
        self.last_use = last_uses(run)
        self.stays: dict[tuple[int, int], Stay] = {}  # by session and generation
        self.ended: dict[tuple[int, int], int] = {  # after which step
            (earlier.session, earlier.completion.generation): earlier.ended_at for earlier in run.earlier
        }
        self.ended |= {(i, run.completions[i].generation): step for i, step in run.ended_at.items()}
        self.preempts: dict[tuple[int, bool], list[int]] = {}
        for fault in run.fired:
            if fault.kind is FaultKind.PREEMPT:
                self.preempts.setdefault((fault.step, fault.in_flight), []).append(fault.session)

    def steps(self) -> Iterator[StepFacts]:
        for traced in self.run.trace:
            self._leave(traced.step, in_flight=False)
            yield self._step(traced)
            self._leave(traced.step, in_flight=True)

    def _leave(self, step: int, *, in_flight: bool) -> None:
        """Preemptions that were asked for: who is told to go has no rows, though its cells are there."""
        for session in self.preempts.get((step, in_flight), ()):
            for (other, _), stay in self.stays.items():
                stay.leaves = stay.leaves or other == session

    def _step(self, traced: TraceStep) -> StepFacts:
        flight = traced.flight
        displaced = self._displaced(traced)
        sequences = _sequences(traced)
        shared, resumed, moved, rebuilt = [], [], [], []
        completed = {item.request_id: item for item in traced.result.chunks} if traced.result else {}
        for chunk in flight.plan.chunks:
            session = session_index(chunk.request_id)
            if chunk.request_id not in sequences:
                continue
            key = session, chunk.generation
            (context, seq_id), stay = sequences[chunk.request_id], self.stays.get(key)
            back = stay is not None and (
                stay.lost or stay.leaves or stay.sequence != (context, seq_id) or chunk.start < stay.rows
            )
            if stay is None and chunk.start and seq_id in self.stages[context].copied_from:
                shared.append(session)
            if back:
                resumed.append(session)
                moved += [session] if stay.sequence[0] != context else []
                if not stay.lost:
                    displaced.append(session)
            furthest = chunk.start if stay is None else max(stay.furthest, chunk.start)
            item, rows = completed.get(chunk.request_id), chunk.start
            if item is not None:
                if item.before < furthest and item.after > item.before:
                    rebuilt.append(session)
                rows, furthest = item.after, max(furthest, item.after)
            self.stays[key] = Stay((context, seq_id), rows, furthest)
        full = bool(flight.plan.chunks) and self._is_full(traced.step)
        kinds = map(tuple, (shared, displaced, resumed, moved, rebuilt))
        return StepFacts(traced, *kinds, full)

    def _displaced(self, traced: TraceStep) -> list[int]:
        """Apply a step's calls; the sessions without an end whose rows were taken."""
        for stage, calls in enumerate(traced.flight.batch.stages):
            if stage == len(self.stages):
                self.stages.append(StageMemory(self.case.layout is Layout.STREAMS))
            memory = self.stages[stage]
            memory.touched.clear()
            for call in calls:
                for op in call.ops:
                    memory.apply(op)
                memory.place(call, traced.flight.batch.positions)
        touched = {(at, seq_id) for at, memory in enumerate(self.stages) for seq_id in memory.touched}
        displaced = []
        for key, stay in self.stays.items():
            if stay.sequence in touched and self.ended.get(key, traced.step + 1) > traced.step:
                displaced += [] if stay.lost else [key[0]]
                stay.lost = True
        return displaced

    def _is_full(self, step: int) -> bool:
        """Whether every cell (in streams: every sequence) of some stage belongs to what is used again later:
        what lies there and is used by nobody any more may have been given up.
        """
        for stage, memory in enumerate(self.stages):
            used = [
                rows
                for seq_id, rows in memory.rows.items()
                if self.last_use.get((stage, seq_id, memory.life[seq_id]), -1) >= step
            ]
            if memory.streams:
                if len(used) >= self.case.num_sequences:
                    return True
                continue
            size = cells_of_stage(self.case, stage)
            if sum(map(len, used)) >= size:
                if len({cell for rows in used for cell in rows.values()}) >= size:
                    return True
        return False


def last_uses(run: Run) -> dict[tuple[int, int, int], int]:
    """The last step in which rows were placed in a sequence or copied from it, by stage, id and life."""
    stages: list[StageMemory] = []
    uses: dict[tuple[int, int, int], int] = {}
    for traced in run.trace:
        for stage, calls in enumerate(traced.flight.batch.stages):
            if stage == len(stages):
                stages.append(StageMemory(run.case.layout is Layout.STREAMS))
            memory = stages[stage]
            for call in calls:
                for op in call.ops:
                    if op.kind is OpKind.COPY:
                        uses[stage, op.source, memory.life.get(op.source, 0)] = traced.step
                    memory.apply(op)
                memory.place(call, traced.flight.batch.positions)
                for seq_id in dict.fromkeys(call.seq_ids):
                    uses[stage, seq_id, memory.life.get(seq_id, 0)] = traced.step
    return uses


def cells_of_stage(case: Case, stage: int) -> int:
    """Usable cells of one stage's pool; stages of all shards are counted on."""
    return case.stage_cells[stage % len(case.stage_cells)] if case.stage_cells else case.pool_cells


def _sequences(traced: TraceStep) -> dict[str, tuple[int, int]]:
    """The context and sequence id of every planned session in first stages' calls, if it has rows there."""
    batch, chunks = traced.flight.batch, traced.flight.plan.chunks
    seq_of_row = {
        row: (context, seq_id)
        for context, call in batch.first_calls()
        for row, seq_id in zip(call.rows, call.seq_ids, strict=True)
        if row != PAD_ROW
    }
    return {
        chunk.request_id: seq_of_row[batch.offsets[index]]
        for index, chunk in enumerate(chunks)
        if batch.offsets[index] in seq_of_row
    }
