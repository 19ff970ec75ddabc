"""Scenario templates S9 to S15: cancellation, full pools, liveness, stages, failures, long interleaving."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st

from parity.records import Case, Fault, FaultKind, Session
from parity.scenarios import WINDOW, Place, around, case_at
from parity.splits import load_splits
from parity.strategies import tokens_of
from scheduler.limits import Layout


@st.composite
def cancellations(draw: st.DrawFn, place: Place) -> Case:
    """S9: cancel while queued, between chunks, with the last chunk or a decode
    in flight, preempted, resumed.
    """
    chunk, count = draw(st.sampled_from([3, 8, 32])), draw(st.integers(2, 6))
    sessions = [
        Session(
            prompt=tokens_of(800 + i, draw(st.integers(1, 3 * chunk))),
            max_tokens=draw(st.integers(1, 12)),
            arrival_step=draw(st.sampled_from([0, 0, 3, 8])),
        )
        for i in range(count)
    ]
    faults = []
    for _ in range(draw(st.integers(1, 5))):
        victim, step = draw(st.integers(0, count - 1)), draw(st.integers(0, 14))
        if draw(
            st.booleans()
        ):  # so that it is suspended, or half way through its rebuild, when the cancel comes
            faults.append(
                Fault(kind=FaultKind.PREEMPT, step=max(step - draw(st.integers(0, 2)), 0), session=victim)
            )
        faults.append(Fault(kind=FaultKind.CANCEL, step=step, session=victim, in_flight=draw(st.booleans())))
    return case_at(
        place,
        sessions,
        faults=tuple(faults),
        max_chunk_tokens=chunk,
        num_sequences=5,
        max_num_batched_tokens=2 * chunk,
        max_num_seqs=draw(st.sampled_from([1, 2, 16])),
        prefix_block_tokens=4,
        prefix_cache=draw(st.booleans()),
    )


@st.composite
def full_pools(draw: st.DrawFn, place: Place) -> Case:
    """S10: a pool K that fits exactly, needs of K - 1, K and K + 1, needs that add up to 1.5 K and more."""
    cells = draw(st.sampled_from([12, 24, 40, 64]))
    sessions = []
    for i in range(draw(st.integers(1, 4))):
        need = draw(st.sampled_from([cells, cells - 1, cells + 1, cells // 2, cells // 2 + 1, 3]))
        tokens = draw(st.integers(1, min(need, 12)))
        sessions.append(
            Session(
                prompt=tokens_of(900 + i, need + 1 - tokens),
                max_tokens=tokens,
                arrival_step=draw(st.integers(0, 4)),
            )
        )
    # One that needs the whole pool, so that it is full whatever else was drawn.
    sessions.append(
        Session(prompt=tokens_of(950, cells - 2), max_tokens=3, arrival_step=draw(st.integers(0, 4)))
    )
    case = case_at(
        place,
        sessions,
        prefix_block_tokens=4,
        prefix_cache=draw(st.booleans()),
        num_sequences=6,
        max_num_batched_tokens=draw(st.sampled_from([4, 16, 64])),
    )
    return replace(case, pool_cells=cells)  # smaller than the longest: the point is that some do not fit


@st.composite
def contention(draw: st.DrawFn, place: Place) -> Case:
    """S11: a head that does not fit yet, a long prompt beside short ones, high
    priority arriving all the time.
    """
    hog = Session(
        prompt=tokens_of(1000, draw(st.sampled_from([40, 80, 120]))), max_tokens=draw(st.integers(2, 10))
    )
    low = Session(prompt=tokens_of(1001, 10), max_tokens=6, priority=5, arrival_step=1)
    stream = [
        Session(
            prompt=tokens_of(1002 + i, draw(st.integers(1, 12))),
            max_tokens=draw(st.integers(1, 6)),
            arrival_step=i,
            priority=0,
        )
        for i in range(draw(st.integers(3, 10)))
    ]
    head = Session(prompt=tokens_of(1100, 100), max_tokens=4, arrival_step=2)
    sessions = [hog, low, *stream, *([head] if draw(st.booleans()) else [])]
    room = draw(st.sampled_from([140, 200])) if place.layout is not Layout.STREAMS else None
    return case_at(
        place,
        sessions,
        pool_cells=room,
        max_num_batched_tokens=draw(st.sampled_from([4, 16, 40])),
        max_num_seqs=draw(st.sampled_from([2, 4, 16])),
        prefix_cache=False,
    )


@st.composite
def stages(draw: st.DrawFn, place: Place) -> Case:
    """S13: a chain of stages; steps without a final row, decodes beside them,
    a stage that fails in mid-step.
    """
    splits = [split.name for split in load_splits(place.family) if split.row == "tiny"]
    chunk = draw(st.sampled_from([1, 4, 16]))
    sessions = [
        Session(
            prompt=tokens_of(1200 + i, draw(st.integers(1, 3 * chunk + 8))),
            max_tokens=draw(st.integers(1, 8)),
            arrival_step=draw(st.integers(0, 3)),
        )
        for i in range(draw(st.integers(1, 5)))
    ]
    faults: tuple[Fault, ...] = ()
    if draw(st.booleans()):
        faults = (
            Fault(kind=FaultKind.DECODE_ERROR, step=draw(st.integers(0, 6)), call=draw(st.integers(0, 4))),
        )
    return case_at(
        place,
        sessions,
        faults=faults,
        split=draw(st.sampled_from(splits)),
        max_chunk_tokens=chunk,
        max_num_batched_tokens=draw(st.sampled_from([chunk, 2 * chunk, 32])),
        prefix_cache=False,
    )


@st.composite
def failures(draw: st.DrawFn, place: Place) -> Case:
    """S14: native call k of a step fails, in prefill, in decode and in a rebuild; up to two such steps."""
    sessions = [
        Session(
            prompt=tokens_of(1300 + i, draw(st.sampled_from([1, 5, 63, 64, 70]))),
            max_tokens=draw(st.integers(1, 8)),
        )
        for i in range(draw(st.integers(1, 4)))
    ]
    kinds = st.sampled_from([FaultKind.DECODE_ERROR, FaultKind.NO_SLOT])
    faults = tuple(
        Fault(kind=draw(kinds), step=step, call=draw(st.integers(0, 2)))
        for step in draw(st.lists(st.integers(0, 8), min_size=1, max_size=2, unique=True))
    )
    return case_at(
        place,
        sessions,
        faults=(*faults, Fault(kind=FaultKind.DECODE_ERROR, step=0)),
        prefix_block_tokens=4,
        max_num_batched_tokens=draw(st.sampled_from([16, 100, 150])),
        prefix_cache=draw(st.booleans()),
    )


@st.composite
def past_the_window(draw: st.DrawFn, place: Place) -> Case:
    """S15: four sessions that decode in turn, each past twice the window, in one pool."""
    sessions = [
        Session(
            prompt=tokens_of(1400 + i, draw(around(4, WINDOW, 2 * WINDOW))),
            max_tokens=2 * WINDOW + draw(st.integers(1, 4)),
        )
        for i in range(4)
    ]
    return case_at(
        place,
        sessions,
        prefix_cache=draw(st.booleans()),
        prefix_block_tokens=4,
        max_num_batched_tokens=draw(st.sampled_from([16, 63, 130])),
    )
