"""Scenario templates S1 to S8: shapes of input behind faults that serving
engines had, as strategies of cases.

Swarm style: which features are on is drawn first, then values, small ones and boundaries often. S9 to S15 are
in ``parity.cases.scenarios``; ``parity.cases.scenarios`` names all of them with the marks that each must hit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hypothesis import strategies as st

from parity.cases.strategies import most_sequences, tokens_of
from parity.models.families import load_family
from parity.models.splits import load_splits
from parity.records import Case, Fault, FaultKind, Session
from scheduler.limits import Layout

WINDOW = (
    16  # of the tiny gemma2; the other families' state chunks and blocks are multiples of it, or divide it
)
PAD_UNIT = 32
PRIMES = (2, 3, 5, 7, 11, 13, 17, 31, 37, 61)


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a scenario runs: family and layout, and the policy that schedules it."""

    family: str
    layout: Layout = Layout.UNIFIED
    policy: str = "fcfs"


def around(*values: int) -> st.SearchStrategy[int]:
    """Each value, one less and one more, where that is at least 1."""
    return st.sampled_from(sorted({n for value in values for n in (value - 1, value, value + 1) if n >= 1}))


def case_at(place: Place, sessions: Sequence[Session], **settings: Any) -> Case:
    """A case whose pool and ids fit the layout: in ``streams`` a pool is one session's."""
    streams = place.layout is Layout.STREAMS
    longest = max(len(s.prompt) + s.max_tokens for s in sessions)
    pool = settings.pop("pool_cells", None) or (max(longest, 64) if streams else 1200)
    ids = settings.pop("num_sequences", 12)
    return Case(
        family=place.family,
        model=place.family,
        layout=place.layout,
        policy=place.policy,
        sessions=tuple(sessions),
        pool_cells=max(pool, longest) if streams else pool,
        num_sequences=min(ids, 20 if streams else most_sequences(place.family)),
        **settings,
    )


@st.composite
def identical_prompts(draw: st.DrawFn, place: Place) -> Case:
    """S1: N identical prompts in one context, N from 1 to 12; every answer must be the same one."""
    count, length = draw(st.integers(1, 12)), draw(around(1, WINDOW, PAD_UNIT, 63))
    staggered, sharing = draw(st.booleans()), draw(st.booleans())
    prompt, tokens = tokens_of(draw(st.integers(0, 9)), length), draw(st.integers(1, 12))
    sessions = [
        Session(prompt=prompt, max_tokens=tokens, arrival_step=i if staggered else 0) for i in range(count)
    ]
    return case_at(
        place,
        sessions,
        prefix_cache=sharing,
        prefix_block_tokens=draw(st.sampled_from([1, 4, 16])),
        max_num_batched_tokens=draw(around(8, 63, 64, 128)),
    )


@st.composite
def reused_ids(draw: st.DrawFn, place: Place) -> Case:
    """S2: eight sessions on five ids in a pool with holes; each has a marker that nobody else may utter."""
    seed = draw(st.integers(0, 9))
    sessions = [
        Session(
            prompt=tokens_of(100 * seed + i, draw(st.integers(2, 30))),
            max_tokens=draw(st.integers(1, 14)),
            arrival_step=2 * i if draw(st.booleans()) else 0,
        )
        for i in range(8)
    ]
    cancels = draw(st.lists(st.integers(0, 7), max_size=2, unique=True))
    faults = tuple(Fault(kind=FaultKind.CANCEL, step=draw(st.integers(2, 12)), session=i) for i in cancels)
    return case_at(
        place,
        sessions,
        faults=faults,
        num_sequences=6,
        prefix_cache=False,
        pool_cells=None if place.layout is Layout.STREAMS else draw(st.integers(60, 140)),
        max_num_batched_tokens=draw(st.sampled_from([8, 24, 64])),
    )


@st.composite
def alternating_steps(draw: st.DrawFn, place: Place) -> Case:
    """S3: steps of one session each and of equal shape, two or three sessions taking turns."""
    count = draw(st.integers(2, 3))
    length, tokens = draw(st.integers(1, 6)), draw(st.integers(1, 6))
    sessions = [Session(prompt=tokens_of(200 + i, length), max_tokens=tokens) for i in range(count)]
    turns = tuple(
        Fault(kind=FaultKind.PREEMPT, step=step, session=step % count)
        for step in range(1, draw(st.integers(2, 24)))
    )
    return case_at(
        place,
        sessions,
        faults=turns,
        max_num_seqs=1,
        max_num_batched_tokens=max(length, 1),
        prefix_cache=draw(st.booleans()),
        prefix_block_tokens=1,
    )


@st.composite
def edited_prompts(draw: st.DrawFn, place: Place) -> Case:
    """S4: one prompt repeated, extended, truncated and edited; what is shared
    lies at every boundary there is.
    """
    length = draw(around(4, WINDOW, PAD_UNIT, WINDOW + WINDOW // 2, 48))
    block = draw(st.sampled_from([1, 4, 16]))
    base = tokens_of(draw(st.integers(0, 9)), length)
    other = tokens_of(300, 40)
    sessions = [Session(prompt=base, max_tokens=draw(st.integers(1, 6)))]
    for i in range(draw(st.integers(1, 4))):
        kind = draw(st.sampled_from(["repeat", "extend", "truncate", "edit"]))
        shared = min(draw(around(1, length, block * (length // block), WINDOW, length // 2)), length)
        prompt = {
            "repeat": base,
            "extend": base + other[: draw(st.integers(1, 20))],
            "truncate": base[:shared],
            "edit": base[:shared] + other[: max(1, length - shared)],
        }[kind]
        sessions.append(Session(prompt=prompt, max_tokens=draw(st.integers(1, 6)), arrival_step=3 + 3 * i))
    return case_at(
        place,
        sessions,
        prefix_block_tokens=block,
        max_num_batched_tokens=draw(st.sampled_from([length, 8, 64])),
    )


@st.composite
def donors(draw: st.DrawFn, place: Place) -> Case:
    """S5: one prefix admitted by several at once, its donor mid-chunk, cancelled, or evicted meanwhile."""
    length, chunk = draw(around(16, 24, 64)), draw(st.sampled_from([4, 8, 16, 64]))
    prefix = tokens_of(draw(st.integers(0, 9)), length)
    sessions = [Session(prompt=prefix, max_tokens=draw(st.integers(1, 20)))]
    for i in range(draw(st.integers(1, 4))):
        tail = tokens_of(400 + i, draw(st.integers(0, 6)))
        sessions.append(
            Session(
                prompt=prefix + tail, max_tokens=draw(st.integers(1, 8)), arrival_step=draw(st.integers(0, 8))
            )
        )
    faults: tuple[Fault, ...] = ()
    if draw(st.booleans()):
        faults = (Fault(kind=FaultKind.CANCEL, step=draw(st.integers(0, 8)), in_flight=draw(st.booleans())),)
    tight = draw(st.booleans())
    if tight:
        sessions.append(
            Session(prompt=tokens_of(450, length + 6), max_tokens=4, arrival_step=draw(st.integers(3, 9)))
        )
    room = 2 * length + 40 if tight and place.layout is not Layout.STREAMS else None
    return case_at(
        place,
        sessions,
        faults=faults,
        pool_cells=room,
        max_chunk_tokens=chunk,
        prefix_block_tokens=4,
        max_num_batched_tokens=draw(st.sampled_from([chunk, 2 * chunk, 128])),
    )


@st.composite
def chunk_grid(draw: st.DrawFn, place: Place) -> Case:
    """S6: chunk and step widths against window, padding unit and call width,
    with their neighbours and primes.
    """
    chunk = draw(st.one_of(around(1, WINDOW // 2, WINDOW, 2 * WINDOW, PAD_UNIT, 63), st.sampled_from(PRIMES)))
    times = draw(st.integers(1, 4))
    lengths = [
        draw(st.sampled_from([max(1, times * chunk + more), max(1, times * chunk - 1)]))
        for more in draw(st.lists(st.sampled_from([0, 1, 5]), min_size=1, max_size=3))
    ]
    sessions = [
        Session(
            prompt=tokens_of(500 + i, min(length, 200)),
            max_tokens=draw(st.integers(1, 6)),
            arrival_step=draw(st.integers(0, 2)),
        )
        for i, length in enumerate(lengths)
    ]
    return case_at(
        place,
        sessions,
        max_chunk_tokens=chunk,
        prefix_cache=draw(st.booleans()),
        max_num_batched_tokens=draw(st.sampled_from([chunk, chunk + 1, 64, 127])),
    )


@st.composite
def mixed_steps(draw: st.DrawFn, place: Place) -> Case:
    """S7: one step with a chunk that goes on, a chunk that ends, a decoder and an
    idle session; few logits rows.
    """
    budget = draw(st.sampled_from([5, 8, 13, 32]))
    sessions = [
        Session(prompt=tokens_of(600, 3), max_tokens=draw(st.integers(6, 16))),
        Session(prompt=tokens_of(601, budget - 1), max_tokens=4, arrival_step=1),
        Session(prompt=tokens_of(602, 2 * budget + draw(st.integers(0, 3))), max_tokens=3, arrival_step=1),
        Session(prompt=tokens_of(603, 4), max_tokens=2, arrival_step=draw(st.integers(1, 4))),
    ]
    return case_at(
        place,
        sessions,
        max_num_batched_tokens=budget,
        max_num_seqs=draw(st.sampled_from([2, 3, 16])),
        prefix_cache=False,
    )


@st.composite
def forced_preemptions(draw: st.DrawFn, place: Place) -> Case:
    """S8: preemption every k steps, after 0, 1, C and 10C tokens, and during the session's own rebuild."""
    chunk, every = draw(st.sampled_from([1, 2, 4, 16])), draw(st.integers(1, 4))
    count = draw(st.integers(1, 4))
    sessions = [
        Session(
            prompt=tokens_of(700 + i, draw(around(3, chunk, 2 * chunk))),
            max_tokens=draw(st.sampled_from([1, 2, chunk + 1, min(10 * chunk, 30)])),
        )
        for i in range(count)
    ]
    start = draw(st.integers(0, 6))
    faults = tuple(
        Fault(
            kind=FaultKind.PREEMPT,
            step=start + every * i,
            session=draw(st.integers(0, count - 1)),
            in_flight=draw(st.booleans()),
        )
        for i in range(draw(st.integers(1, 8)))
    )
    return case_at(
        place,
        sessions,
        faults=faults,
        max_chunk_tokens=chunk,
        prefix_block_tokens=4,
        max_num_batched_tokens=draw(st.sampled_from([chunk, 8, 32])),
        prefix_cache=draw(st.booleans()),
    )


# -- Scenario templates S9 to S15: cancellation, full pools, liveness, stages, failures, long interleaving.


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


# -- All scenario templates by their ids, with the marks that each must hit: a template
# that hits none proves nothing.

BOTH = (Layout.UNIFIED, Layout.STREAMS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One template: ``cases`` draws from it, ``marks`` are what some of its cases must exercise."""

    name: str
    title: str
    cases: Callable[[Place], st.SearchStrategy[Case]]
    marks: tuple[str, ...]
    layouts: tuple[Layout, ...] = BOTH
    on_exact: bool = True
    policy: str | None = None  # the policy that it is about, if there is one

    def at(
        self, family: str, layout: Layout = Layout.UNIFIED, *, policy: str | None = None
    ) -> st.SearchStrategy[Case]:
        """Its cases for one family and layout, under ``policy``, its own policy or FCFS."""
        load_family(family)
        return self.cases(Place(family=family, layout=layout, policy=policy or self.policy or "fcfs"))


def _scenario(
    name: str, cases: Callable[[Place], st.SearchStrategy[Case]], *marks: str, **more: Any
) -> Scenario:
    title = (cases.__doc__ or "").partition(": ")[2].split(";")[0].rstrip(".")
    return Scenario(name=name, title=title, cases=cases, marks=marks, **more)


SCENARIOS: tuple[Scenario, ...] = (
    _scenario("S1", identical_prompts, "concurrent", "shared"),
    _scenario("S2", reused_ids, "id_reused", "cancelled", "mixed_step"),
    _scenario("S3", alternating_steps, "preempted", "resumed"),
    _scenario("S4", edited_prompts, "shared", "chunked"),
    _scenario("S5", donors, "shared", "chunked", "cancelled", "cancelled_in_flight"),
    _scenario("S6", chunk_grid, "chunked", "one_token_chunk", "mixed_step"),
    _scenario("S7", mixed_steps, "mixed_step", "chunked", "concurrent"),
    _scenario("S8", forced_preemptions, "preempted", "resumed", "rebuilt"),
    _scenario("S9", cancellations, "cancelled", "cancelled_in_flight", "preempted"),
    _scenario("S10", full_pools, "pool_full", "refused", layouts=(Layout.UNIFIED,)),
    _scenario("S11", contention, "mixed_step", "chunked", policy="aging"),
    _scenario("S13", stages, "mixed_step", "chunked", on_exact=False, layouts=(Layout.UNIFIED,)),
    _scenario("S14", failures, "engine_failed", "rebuilt"),
    _scenario("S15", past_the_window, "concurrent"),
)  # S12 is no case of the scheduler: ``parity.suites.states`` runs it
