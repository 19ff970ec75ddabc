"""The exact engine: its own semantics, and llama.cpp's side by side: same
refusals, same visibility, same plans.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from parity.engines.exact import ExactEngine, ExactModel, expected_tokens, hidden_stops
from parity.engines.exact_memory import EngineAbort, ExactPool
from parity.engines.llama import DecodeFailure, LlamaModel
from parity.engines.numerics import ROW
from parity.engines.pool import PoolContext
from parity.errors import UsageError
from parity.models import resolve_model
from parity.models.families import load_family
from parity.plugin import family_params
from parity.records import Case, Fault, FaultKind, Session
from parity.run.runner import Runner, drive_exact, exact_limits, exact_model
from scheduler.engine import EngineFailure, MemoryOp, OpKind
from scheduler.limits import Layout, PoolLimits, Sharing

WINDOW = 16  # of the tiny gemma2


def pool_of(
    *,
    layout: Layout = Layout.UNIFIED,
    recurrent: bool = False,
    window: int | None = None,
    cells: int = 32,
    ids: int = 8,
) -> ExactPool:
    whole = recurrent or layout is Layout.STREAMS
    limits = PoolLimits(
        layout=layout,
        num_cells=cells,
        num_sequences=ids,
        recurrent=recurrent,
        pad_lone_rows=False,
        sharing=Sharing.WHOLE_STATE if whole else Sharing.POSITIONAL,
    )
    return ExactPool(limits, window=window, salt=1)


def rows(seq_id: int, start: int, tokens: tuple[int, ...]) -> list[tuple[int, int, int, int]]:
    return [(token, start + i, seq_id, -1) for i, token in enumerate(tokens)]


def remove(seq_id: int, start: int = -1, stop: int = -1) -> MemoryOp:
    return MemoryOp(OpKind.REMOVE, seq_id, start, stop)


# -- its own semantics


def test_digest_depends_on_the_session_alone_wherever_its_cells_are() -> None:
    first, second = pool_of(), pool_of()
    alone = [first.decode(rows(0, i, (token,)))[0] for i, token in enumerate((5, 6, 7))]
    second.decode(rows(1, 0, (9, 9)))
    crowded = [
        second.decode([*rows(1, 2 + i, (8,)), *rows(0, i, (token,))])[1] for i, token in enumerate((5, 6, 7))
    ]
    assert alone == crowded


def test_cells_out_of_order_change_the_digest_where_attention_walks_by_cell() -> None:
    def last(layout: Layout) -> int:
        pool = pool_of(layout=layout)
        pool.decode(rows(1, 0, (9, 9)))
        pool.decode(rows(0, 0, (5, 6)))
        pool.apply(remove(1))
        return pool.decode(rows(0, 2, (7,)))[0]

    alone = pool_of()
    expected = alone.decode(rows(0, 0, (5, 6, 7)))[-1]
    assert last(Layout.UNIFIED) != expected
    assert last(Layout.STOCK) == expected


@pytest.mark.parametrize("window", [1, 2, 5])
def test_window_forgets_and_the_full_layers_do_not(window: int) -> None:
    assert expected_tokens(
        ExactModel(window=window, vocabulary=1 << 30), (1, 2, 3, 4, 5, 6), 6
    ) != expected_tokens(ExactModel(vocabulary=1 << 30), (1, 2, 3, 4, 5, 6), 6)
    pool = pool_of(window=window)
    together = pool.decode(rows(0, 0, (1, 2, 3, 4, 5, 6)))
    step = pool_of(window=window)
    assert together == [step.decode(rows(0, i, (i + 1,)))[0] for i in range(6)]


def test_hole_in_a_sequence_is_seen() -> None:
    whole, holed = pool_of(), pool_of()
    for pool in (whole, holed):
        pool.decode(rows(0, 0, (1, 2, 3)))
    holed.apply(remove(0, 1, 2))
    assert whole.decode(rows(0, 3, (4,))) != holed.decode(rows(0, 3, (4,)))


@pytest.mark.parametrize(
    ("what", "error"),
    [
        (lambda pool: pool.decode(rows(0, 2, (1,))), EngineFailure),
        (lambda pool: pool.decode(rows(8, 0, (1,))), EngineFailure),
        (lambda pool: pool.decode([]), EngineFailure),
        (lambda pool: pool.decode(rows(1, 0, (1,) * 40)), EngineFailure),
        (lambda pool: pool.apply(remove(8)), EngineAbort),
        (lambda pool: pool.apply(MemoryOp(OpKind.COPY, 9, source=0)), EngineAbort),
        (lambda pool: pool.decode([(1, 0, 2, 31)]), EngineAbort),
    ],
)
def test_it_refuses_and_aborts_where_llama_cpp_does(what: Callable[..., Any], error: type[Exception]) -> None:
    pool = pool_of()
    pool.decode(rows(0, 0, (1,)))
    with pytest.raises(error):
        what(pool)


def test_partial_removal_is_refused_while_a_state_lives() -> None:
    pool = pool_of(recurrent=True)
    pool.decode(rows(0, 0, (1, 2, 3)))
    with pytest.raises(EngineFailure, match="refused"):
        pool.apply(remove(0, 2, 3))
    pool.apply(MemoryOp(OpKind.DROP_STATE, 0))
    pool.apply(remove(0, 2, 3))
    assert pool.num_used() == 2


def test_partial_copy_between_streams_aborts() -> None:
    pool = pool_of(layout=Layout.STREAMS, cells=64)
    pool.decode(rows(0, 0, (1, 2, 3)))
    with pytest.raises(EngineAbort, match="partial range"):
        pool.apply(MemoryOp(OpKind.COPY, 1, 0, 2, 0))
    pool.apply(MemoryOp(OpKind.COPY, 1, source=0))
    assert pool.decode(rows(1, 3, (4,))) == pool.decode(rows(0, 3, (4,)))


def test_hidden_length_needs_a_stop_token() -> None:
    with pytest.raises(UsageError, match="no stop token"):
        hidden_stops((Session(prompt=(1,), max_tokens=3, hidden_output_tokens=2),))


# -- side by side with llama.cpp


class Pair:
    """llama.cpp's memory and its models: one that orders by cell, one that
    sees sets; same operations on all.
    """

    CELLS, IDS = 256, 6

    def __init__(self, family_name: str) -> None:
        family = load_family(family_name)
        self.recurrent = family.is_hybrid
        self.real = PoolContext(
            LlamaModel(resolve_model(family_name).path),
            layout=Layout.STOCK,
            num_sequences=self.IDS,
            num_cells=self.CELLS,
            shadow=family.needs_shadow,
            recurrent=self.recurrent,
            profile=ROW,
            kv_type="f32",
        )
        window = WINDOW if load_family(family_name).needs_shadow else None
        self.exact = [
            pool_of(layout=layout, recurrent=self.recurrent, window=window, cells=self.CELLS, ids=self.IDS)
            for layout in (Layout.UNIFIED, Layout.STOCK)
        ]
        self.logits_of: list[dict[int, bytes]] = [{}, {}]
        self.refused = self.seen_again = 0

    def apply(self, op: MemoryOp) -> None:
        self._both(lambda: self.real.apply([op]), lambda pool: pool.apply(op))

    def decode(self, batch: list[tuple[int, int, int, int]]) -> None:
        def native() -> np.ndarray:
            ids = [list(self.real.physical_ids(seq_id)) for _, _, seq_id, _ in batch]
            return self.real.context.decode_rows(
                [r[0] for r in batch], [r[1] for r in batch], ids, [1] * len(batch)
            )

        logits, digests = self._both(native, lambda pool: pool.decode(batch))
        if logits is None:
            return
        for row, ordered, as_set in zip(logits, *digests, strict=True):
            self.seen_again += ordered in self.logits_of[0]
            known = self.logits_of[0].setdefault(ordered, row.tobytes())
            assert known == row.tobytes(), "the same visible cells in the same order gave other logits"
            self.logits_of[1].setdefault(as_set, row.tobytes())

    def _both(self, native: Any, modelled: Any) -> Any:
        """Run on all; they must agree on refusing, and then on the last position of every sequence."""
        try:
            answer = native()
        except (EngineFailure, DecodeFailure) as failure:
            answer = failure
        models = []
        for pool in self.exact:
            try:
                models.append(modelled(pool))
            except EngineFailure as failure:
                models.append(failure)
        refused = [isinstance(item, Exception) for item in (answer, *models)]
        assert len(set(refused)) == 1, (answer, models)
        for seq_id in range(self.IDS):
            last = self.real.context.last_position(self.real.physical_ids(seq_id)[0])
            assert [pool.next_position(seq_id) - 1 for pool in self.exact] == [last, last]
        self.refused += refused[0]
        return (None, None) if refused[0] else (answer, models)


@pytest.mark.parametrize("family", family_params())
def test_refusals_and_visibility_are_those_of_llama_cpp(family: str) -> None:
    source, pair = random.Random(7), Pair(family)
    for _ in range(250):
        seq_id, other = source.sample(range(pair.IDS), 2)
        held = pair.exact[0].next_position(seq_id)
        match source.choice("ddddddrccpsxk"):
            case "d":  # equally many rows each, at least two: row numerics, and one group for hybrids
                count = source.choice((1, 2, 3))
                chosen = sorted({seq_id, other} if count == 1 else {seq_id})
                batch = [
                    row
                    for chosen_id in chosen
                    for row in rows(
                        chosen_id,
                        pair.exact[0].next_position(chosen_id),
                        tuple(source.choice((3, 4)) for _ in range(count)),
                    )
                ]
                pair.decode(batch)
            case "r":
                pair.apply(remove(seq_id))
            case "p" if held > 1:
                start = source.randrange(held)
                pair.apply(remove(seq_id, start, source.randint(start + 1, held)))
            case "c" if not pair.exact[0].sequences[other].cells and (held or not pair.recurrent):
                pair.apply(remove(other))
                stop = held if pair.recurrent else source.randint(0, held)
                pair.apply(MemoryOp(OpKind.COPY, other, 0, stop, seq_id))
            case "s" if pair.recurrent:
                pair.apply(MemoryOp(OpKind.DROP_STATE, seq_id))
                pair.apply(remove(seq_id))
            case "x" if held:
                pair.decode(rows(seq_id, held + source.choice((-1, 1)), (3, 3)))
            case "k":
                pair.apply(MemoryOp(OpKind.CLEAR)) if source.random() < 0.2 else None
    assert pair.refused > 5 and pair.seen_again > 20
    assert len(pair.logits_of[0]) > 50
    by_logits: dict[bytes, int] = {}
    for digest, logits in pair.logits_of[1].items():
        assert by_logits.setdefault(logits, digest) == digest, "other visible cells gave the same logits"


@pytest.mark.parametrize("family", family_params())
@pytest.mark.parametrize("pool_cells", [40, 90])
def test_plans_and_refusals_are_those_of_a_run_on_llama_cpp(family: str, pool_cells: int) -> None:
    root = tuple(range(20, 36))
    sessions = [Session(prompt=root + (40 + i, 41), max_tokens=4 + i, arrival_step=2 * i) for i in range(4)]
    sessions += [
        Session(prompt=(7,) * 60, max_tokens=8),
        Session(prompt=(9, 8, 7), max_tokens=12, arrival_step=1),
    ]
    faults = (
        Fault(kind=FaultKind.PREEMPT, step=4, session=0),
        Fault(kind=FaultKind.CANCEL, step=6, session=1),
        Fault(kind=FaultKind.DECODE_ERROR, step=9),
        Fault(kind=FaultKind.PREEMPT, step=7, session=5, in_flight=True),
    )
    case = Case(
        family=family,
        model=family,
        sessions=tuple(sessions),
        pool_cells=pool_cells,
        num_sequences=12,
        max_num_batched_tokens=20,
        prefix_block_tokens=4,
        faults=faults,
    )
    modelled = drive_exact(case, ExactEngine(exact_limits(case), exact_model(case)))
    runner, known, file = Runner(), load_family(family), resolve_model(family)
    real = runner.attempt(case, runner.engine(case, file, known, ROW), known, ROW, file)

    def history(run: Any) -> list:
        return [(step.step, repr(step.flight.plan), step.flight.batch.stages) for step in run.trace]

    assert not modelled.problems and not real.problems
    assert history(modelled) == history(real)
    assert modelled.refusals == real.refusals
    assert bool(modelled.refusals) is (pool_cells == 40)
    assert {i: len(end.tokens) for i, end in modelled.completions.items()} == {
        i: len(end.tokens) for i, end in real.completions.items()
    }
