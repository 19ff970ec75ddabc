"""Exact engine: llama.cpp's KV semantics without weights, so that scheduler properties cost microseconds.

A cell holds a digest of what it was computed from: input, position and everything that its row could see.
Attention folds the visible cells in the order in which the row kernel walks them (increasing cell index
where cells are shared), a window sees the last few positions, a recurrent state folds every row of its
sequence. The next token is a digest of exactly that. So one missing, stale, foreign or misplaced cell
changes the token with near certainty.

Placement, refusals and aborts follow llama.cpp (llama-kv-cache.cpp,
llama-memory-recurrent.cpp, llama-batch.cpp).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from parity.engines.exact_memory import BASE, MODULUS, EngineAbort, ExactPool
from parity.engines.in_flight import StagesInTurn, Walk
from parity.errors import UsageError
from parity.records import Session
from scheduler.engine import PAD_ROW, Batch, Call, EngineFailure, MemoryOp, completed_result
from scheduler.limits import PoolLimits
from scheduler.records import IterationPlan, SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class ExactModel:
    """What a session can see: all its cells, with ``window`` also its last ``window`` positions, with
    ``recurrent`` a state. ``vocabulary`` bounds the tokens; ``seed`` stands for the weights.
    """

    window: int | None = None
    recurrent: bool = False
    vocabulary: int = 256
    seed: int = 0

    def __post_init__(self) -> None:
        if self.vocabulary < 1 or (self.window is not None and self.window < 1):
            raise UsageError("exact model out of range", why=str(self), todo="use sizes of at least 1")


__all__ = ["EngineAbort", "ExactEngine", "ExactModel", "expected_tokens", "hidden_stops", "next_token"]


class ExactEngine(StagesInTurn):
    """Implements ``scheduler.engine.OverlappingEngine`` for every layout and any number of stages.

    ``stops`` maps a request id to (position, token): what is sampled at that position whatever the digest
    says, which is how a hidden output length is realised (``hidden_stops``). ``duration_ms`` gives the
    virtual time that a batch takes. Raises ``EngineFailure`` where llama.cpp refuses and ``EngineAbort``
    where it would end the process.
    """

    def __init__(
        self,
        limits: Sequence[PoolLimits],
        model: ExactModel | None = None,
        *,
        stops: Mapping[str, tuple[int, int]] | None = None,
        duration_ms: Callable[[Batch], float] | None = None,
    ) -> None:
        super().__init__()
        self.limits = tuple(limits)
        self.model = ExactModel(recurrent=any(pool.recurrent for pool in limits)) if model is None else model
        self.stops = {} if stops is None else stops
        self.duration_ms = duration_ms
        self.pools = tuple(
            ExactPool(pool, window=self.model.window, salt=_salt(self.model, stage))
            for stage, pool in enumerate(self.limits)
        )
        self.fail_before_call: int | None = None

    def fail_next(self, call: int = 0) -> None:
        """Make the next step fail at its native call number ``call`` (stages counted
        on), after the calls before it.
        """
        self.fail_before_call = call

    def walk(self, plan: IterationPlan, batch: Batch, now_ms: float) -> Walk:
        """Run the batch through every stage and sample."""
        failing, self.fail_before_call = self.fail_before_call, None
        hidden: list[int | None] = list(batch.tokens)
        for stage, (pool, calls) in enumerate(zip(self.pools, batch.stages, strict=True)):
            if stage:
                yield
            computed: list[int | None] = [None] * len(hidden)
            for call in calls:
                if failing is not None and failing <= 0:
                    raise EngineFailure("injected failure of a native call")
                failing = None if failing is None else failing - 1
                _run_call(pool, call, hidden, batch.positions, computed)
            if None in computed:
                raise EngineFailure(f"batch row {computed.index(None)} is in no call")
            hidden = computed
        tokens = [
            self._sample(hidden[sample.row], sample.request_id, sample.position, sample.sampling)
            for sample in batch.samples
        ]
        finished_ms = now_ms if self.duration_ms is None else now_ms + self.duration_ms(batch)
        return completed_result(plan, batch, tokens, started_ms=now_ms, finished_ms=finished_ms)

    def apply(self, stages: Sequence[Sequence[MemoryOp]]) -> None:
        """Apply memory operations outside a step; what is in flight is given up."""
        self.give_up_launched()
        for pool, ops in zip(self.pools, stages, strict=True):
            for op in ops:
                pool.apply(op)

    def _sample(self, digest: int, request_id: str, position: int, sampling: SamplingParams) -> int:
        stop = self.stops.get(request_id)
        if stop is not None and stop[0] == position:
            return stop[1]
        return next_token(self.model, digest, request_id, position, sampling)


def _run_call(
    pool: ExactPool, call: Call, hidden: Sequence[int], positions: Sequence[int], computed: list[int | None]
) -> None:
    for op in call.ops:
        pool.apply(op)
    if pool.limits.pads and len(call.rows) == 1 and call.rows[0] != PAD_ROW:
        raise EngineAbort("a lone row: its numerics differ from those of rows in company")
    rows = []
    for row, seq_id, cell in zip(call.rows, call.seq_ids, call.cells, strict=True):
        if row == PAD_ROW:
            rows.append((0, pool.next_position(seq_id), seq_id, cell))
            continue
        if computed[row] is not None:
            raise EngineFailure(f"batch row {row} is in two calls")
        rows.append((hidden[row], positions[row], seq_id, cell))
    for row, digest in zip(call.rows, pool.decode(rows), strict=True):
        if row != PAD_ROW:
            computed[row] = digest


def next_token(
    model: ExactModel, digest: int, request_id: str, position: int, sampling: SamplingParams
) -> int:
    """The token for a row's digest: greedy, or keyed by (seed, session, position)."""
    if sampling.temperature:
        digest = hash((digest, sampling.seed, _name_digest(sampling.key or request_id), position))
    return digest % model.vocabulary


def hidden_stops(sessions: Sequence[Session]) -> dict[str, tuple[int, int]]:
    """``stops`` of an engine for a case's sessions: the stop token comes as output
    number ``hidden_output_tokens``.
    """
    stops = {}
    for index, session in enumerate(sessions):
        if session.hidden_output_tokens is None:
            continue
        if not session.stop_token_ids:
            raise UsageError(
                f"session {index} has a hidden output length but no stop token",
                where="case",
                todo="give it stop_token_ids",
            )
        stops[f"s{index}"] = (
            len(session.prompt) + session.hidden_output_tokens - 1,
            session.stop_token_ids[0],
        )
    return stops


def expected_tokens(
    model: ExactModel,
    prompt: Sequence[int],
    max_tokens: int,
    *,
    request_id: str = "s0",
    sampling: SamplingParams | None = None,
    stop_token_ids: Sequence[int] = (),
    stop: tuple[int, int] | None = None,
    stages: int = 1,
) -> tuple[int, ...]:
    """What a session alone answers: the oracle, by the definition and without
    cells, calls, chunks or a scheduler.
    """
    sampling = SamplingParams() if sampling is None else sampling
    contents: list[list[int]] = [[] for _ in range(stages)]
    folds, states = [0] * stages, [0] * stages
    tokens, output = list(prompt), []
    for position in range(len(prompt) + max_tokens - 1):
        value = tokens[position]
        for stage in range(stages):
            seen = 0
            if model.window is not None:
                for content in contents[stage][max(position + 1 - model.window, 0) :]:
                    seen = (seen * BASE + content) % MODULUS
            content = hash((_salt(model, stage), value, position, folds[stage], seen, states[stage]))
            contents[stage].append(content)
            folds[stage] = (folds[stage] * BASE + content) % MODULUS
            if model.window is not None:
                seen = (seen * BASE + content) % MODULUS
            if model.recurrent:
                states[stage] = hash((states[stage], content))
            value = hash((content, folds[stage], seen, states[stage]))
        if position + 1 >= len(prompt):
            forced = stop is not None and stop[0] == position + 1
            token = stop[1] if forced else next_token(model, value, request_id, position + 1, sampling)
            output.append(token)
            tokens.append(token)
            if token in stop_token_ids:
                break
    return tuple(output)


def _salt(model: ExactModel, stage: int) -> int:
    return hash((model.seed, stage, 0x5EED))


@lru_cache(maxsize=4096)
def _name_digest(request_id: str) -> int:
    """A number for a name that is the same in every process."""
    return int.from_bytes(hashlib.blake2b(request_id.encode(), digest_size=7).digest(), "little")
