"""Composes one plan under the budgets; every limit that holds for all policies is applied here, once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

from scheduler.policy.state import SchedulerState
from scheduler.records import (
    BudgetLedger,
    IntentKind,
    IterationPlan,
    PlannedChunk,
    PolicyIdentity,
    QueueIntent,
    ReservationEstimate,
    SessionState,
    SessionView,
)
from scheduler.rooms import Room

if TYPE_CHECKING:
    from scheduler.memory import Memory, Place
    from scheduler.shards import ShardedMemory

# How the reason of a DEFER begins when a session waits for a foreign owner, not for room or for its turn.
NOT_READY = "not ready: "
MAX_IMBALANCE = 4  # sessions that a shard may have more than another one because prefixes draw them there


class Seams(Protocol):
    """What composing a plan asks of its policy (``scheduler.policy.base.Policy`` documents each)."""

    @property
    def identity(self) -> PolicyIdentity: ...

    def order_key(self, state: SchedulerState, view: SessionView) -> tuple: ...

    def future_rows(self, state: SchedulerState, view: SessionView) -> int: ...

    def reserved_rows(self, state: SchedulerState, plan: PlanBuilder) -> int: ...

    def watermark_rows(self) -> int: ...

    def chunk_tokens(self, state: SchedulerState, view: SessionView, available: int) -> int: ...


class _Door:
    """What is left of one shard of the memory for those who want to enter it in this plan."""

    def __init__(self, shard: Memory, index: int, state: SchedulerState, plan: PlanBuilder) -> None:
        self.shard, self.index = shard, index
        state = state.in_shard(shard)
        self.sequences_left = shard.available_sequences()
        running = sum(state.views[request_id].next_rows for request_id in state.running)
        reserved = max(plan.policy.reserved_rows(state, plan), running)
        self.rows_left = shard.available_rows() - reserved
        self.num_sessions = len(state.running)
        self.pinned: dict[tuple[int, ...], None] = {}
        self._rooms: list[Room] = []  # copied when the first one who shares wants to enter
        self._taken: list[list[tuple[Place, int]]] = []

    def has_room(self, places: Sequence[Place], rows: int) -> bool:
        """Whether a session that shares has cells above what it shares, together with all who
        run and all who enter with it.
        """
        if places and not self._rooms:
            self._rooms = [room.copy() for room in self.shard.rooms()]
            for earlier in self._taken:
                for room, (place, need) in zip(self._rooms, earlier, strict=True):
                    room.take(floor=place.floor, rows=need, pinned=place.pinned)
        return all(
            room.shortage(floor=place.floor, rows=rows, pinned=place.pinned) is None
            for room, place in zip(self._rooms, places, strict=True)
        )

    def take_room(self, places: Sequence[Place], rows: int) -> None:
        """Count a session that will enter."""
        self._taken.append([(place, rows) for place in places])
        for room, place in zip(self._rooms, places, strict=False):
            room.take(floor=place.floor, rows=rows, pinned=place.pinned)


class PlanBuilder:
    """Composes one plan under the budgets; every limit that holds for all policies is applied here, once."""

    def __init__(self, state: SchedulerState, policy: Seams) -> None:
        self.state, self.policy = state, policy
        self.tokens_left = state.max_num_batched_tokens
        self.seqs_left = state.step_seqs
        self.closed = False  # nobody enters any more
        self.entered: list[SessionView] = []
        self._doors: tuple[_Door, ...] = ()  # asked only when somebody wants to enter
        self._chunks: list[tuple[tuple, PlannedChunk]] = []
        self._intents: list[QueueIntent] = []

    def add(self, view: SessionView, *, key: tuple | None = None, limit: int | None = None) -> int:
        """Give a running session its next chunk, as long as budgets and
        ``limit`` allow; returns its tokens.
        """
        if not view.ready:
            return 0
        return self._grant(view, view.computed, limit, key, self.state.memory.home(view.request_id))

    def cached_tokens(self, view: SessionView) -> int:
        """Tokens that a session would share in the shard that it would enter first, as the plan stands."""
        if len(self.state.memory.shards) == 1:
            return self.state.memory.cached_tokens(view)
        return self._open_doors(view)[0].shard.cached_tokens(view)

    def planned_rows(self, shard: Memory | ShardedMemory) -> int:
        """Rows of the plan so far of those who run in a shard; with the whole memory, all."""
        if shard is self.state.memory:
            return self.state.max_num_batched_tokens - self.tokens_left
        return sum(
            chunk.stop - chunk.start for _, chunk in self._chunks if chunk.request_id in shard.residences
        )

    @property
    def lacks_cells(self) -> bool:
        """Whether the rows of running sessions, as planned so far, are more than a shard has available."""
        shards = self.state.memory.shards
        return any(self.planned_rows(shard) > shard.available_rows() for shard in shards)

    def _open_doors(self, view: SessionView) -> Sequence[_Door]:
        """The shards in the order in which a session should try to enter them: where it finds the longest
        prefix, but not where ``MAX_IMBALANCE`` sessions more live than elsewhere; then where the fewest
        live, then where most rows are left.
        """
        if not self._doors:
            shards = self.state.memory.shards
            self._doors = tuple(_Door(shard, at, self.state, self) for at, shard in enumerate(shards))
        if len(self._doors) == 1:
            return self._doors
        fewest = min(door.num_sessions for door in self._doors)

        def preference(door: _Door) -> tuple[int, int, int, int]:
            is_level = door.num_sessions < fewest + MAX_IMBALANCE
            cached = door.shard.cached_tokens(view) if is_level else 0
            return (-cached, door.num_sessions, -door.rows_left, door.index)

        return sorted(self._doors, key=preference)

    def enter(self, view: SessionView, *, limit: int | None = None, future_rows: int | None = None) -> bool:
        """Admit or resume a session if every memory component of a shard has room for it; False if it must
        wait.

        ``future_rows`` is what to keep free for it (default: the policy's
        forecast), its shared rows not counted.
        """
        state = self.state
        if self.tokens_left < 1 or self.seqs_left < 1 or not view.ready:
            return False
        if len(state.running) + len(self.entered) >= state.max_num_seqs:
            return False
        doors = self._open_doors(view)
        need = self.policy.future_rows(state, view) if future_rows is None else future_rows
        need = max(need, view.next_rows)
        return any(self._enter_shard(door, view, need, limit) for door in doors)

    def _enter_shard(self, door: _Door, view: SessionView, need: int, limit: int | None) -> bool:
        memory = door.shard
        cached = memory.cached_tokens(view)
        need -= cached
        prefix = view.request.prompt[:cached]  # sessions that enter together pin what they share once
        pinned = memory.pinned_rows(view) if cached and prefix not in door.pinned else 0
        sequences = memory.sequences_for(view) if cached and memory.shares else 1
        total = memory.total_rows()
        estimate = ReservationEstimate(
            request_id=view.request_id,
            generation=view.request.generation,
            rows=max(need, 1),
            reserved_rows=total - door.rows_left + pinned,
            hard_rows=total,
            watermark_rows=self.policy.watermark_rows() if door.num_sessions else 0,
        )
        if door.sequences_left < sequences or not estimate.fits:
            return False
        places = memory.places(view) if memory.shares else ()
        if cached and not door.has_room(places, need):
            return False
        if not self._grant(view, cached, limit, None, memory):
            return False
        door.sequences_left -= sequences
        door.rows_left -= need + pinned
        door.num_sessions += 1
        door.take_room(places, need)
        door.pinned[prefix] = None
        self.entered.append(view)
        kind = IntentKind.RESUME if view.state is SessionState.SUSPENDED else IntentKind.ADMIT
        generation = view.request.generation
        self._intents.append(
            QueueIntent(kind, view.request_id, generation, estimate=estimate, shard=door.index)
        )
        return True

    def while_open(self, views: Iterable[SessionView]) -> Iterator[SessionView]:
        """The views up to the one that closes the scan: a long queue costs no more than a short one."""
        for view in views:
            if self.closed:
                return
            yield view

    def reject(self, view: SessionView, reason: str) -> None:
        """Give up a waiting session for good, with a reason for its caller."""
        self._intents.append(QueueIntent(IntentKind.REJECT, view.request_id, view.request.generation, reason))

    def preempt(self, view: SessionView, reason: str) -> None:
        """Suspend a running session that has no chunk in this plan; its rows
        are free from the next step on.
        """
        self._intents.append(
            QueueIntent(IntentKind.PREEMPT, view.request_id, view.request.generation, reason)
        )

    def defer(self, view: SessionView, reason: str) -> None:
        """Record that a session was considered and passed over."""
        self._intents.append(QueueIntent(IntentKind.DEFER, view.request_id, view.request.generation, reason))

    def _grant(
        self, view: SessionView, start: int, limit: int | None, key: tuple | None, memory: Memory
    ) -> int:
        if self.seqs_left < 1 or self.tokens_left < 1:
            return 0
        state = self.state
        available = min(self.tokens_left, state.max_chunk_tokens)
        if limit is not None:
            available = min(available, limit)
        seen = state if view.state is SessionState.RUNNING else state.in_shard(memory)
        available = min(available, self.policy.chunk_tokens(seen, view, available))
        stop = view.limit_at(start)
        if stop > start + available:
            stop = start + available
        if stop - start > 1:
            stop = memory.chunk_stop(view, start=start, stop=stop)
        if stop <= start:
            return 0
        if key is None:
            key = self.policy.order_key(state, view)
        request = view.request
        self._chunks.append(
            (key, PlannedChunk(request.request_id, request.generation, view.version, start, stop))
        )
        self.tokens_left -= stop - start
        self.seqs_left -= 1
        return stop - start

    def build(self) -> IterationPlan:
        """The plan, its chunks sorted by key."""
        state = self.state
        self._chunks.sort(key=lambda item: item[0])
        chunks = tuple(chunk for _, chunk in self._chunks)
        ledger = BudgetLedger(
            state.max_num_batched_tokens,
            state.step_seqs,
            state.max_num_batched_tokens - self.tokens_left,
            len(chunks),
        )
        return IterationPlan(
            state.decision_id,
            state.version,
            self.policy.identity,
            chunks,
            ledger,
            tuple(self._intents),
            tuple(key for key, _ in self._chunks),
        )


class _Alone:
    """Seams of a plan for one session that has the pool to itself: it is kept from nothing."""

    def __init__(self, policy: Seams) -> None:
        self.identity, self.order_key = policy.identity, policy.order_key

    def future_rows(self, state: SchedulerState, view: SessionView) -> int:
        return view.future_rows

    def reserved_rows(self, state: SchedulerState, plan: PlanBuilder) -> int:
        return 0

    def watermark_rows(self) -> int:
        return 0

    def chunk_tokens(self, state: SchedulerState, view: SessionView, available: int) -> int:
        return available


def plan_alone(state: SchedulerState, policy: Seams, view: SessionView) -> IterationPlan:
    """The plan in which one session runs or enters and nobody else does, in the name of the policy."""
    plan = PlanBuilder(state, _Alone(policy))
    if view.state is SessionState.RUNNING:
        plan.add(view)
    else:
        plan.enter(view)
    return plan.build()
