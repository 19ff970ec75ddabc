"""Hypothesis strategies for cases: small first, boundaries often, features
drawn before values (swarm style).
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from hypothesis import strategies as st
from hypothesis.internal.conjecture.providers import AVAILABLE_PROVIDERS, HypothesisProvider

from parity.cases.policy_options import PolicyOptions
from parity.models.families import load_family
from parity.records import Case, Fault, FaultKind, Session
from scheduler.limits import Layout
from scheduler.policies import option_types
from scheduler.records import SamplingParams, ServiceLevel

TINY_VOCABULARY = tuple(range(264))  # every token of the tiny models, as stop tokens: one is sure to come
BYTE_TOKENS = 250  # token ids below this are plain bytes in every tiny vocabulary
FEATURES = (
    "shared",
    "arrivals",
    "cancel",
    "preempt",
    "tight_pool",
    "few_lanes",
    "seeded",
    "stops",
    "failures",
)
WORK_TOKENS = 1600  # rows that one case may compute at most, so that a case takes a fraction of a second
STREAM_CELLS = 400
# (seed, count) -> token ids of a prompt: random bytes, or text for a model with a real vocabulary.
DrawTokens = Callable[[int, int], tuple[int, ...]]


def tokens_of(seed: int, count: int) -> tuple[int, ...]:
    """``count`` token ids determined by ``seed``; a prefix of a longer draw with the same seed."""
    rng = random.Random(seed)
    return tuple(rng.randrange(3, BYTE_TOKENS) for _ in range(count))


def prompt_lengths(most: int) -> st.SearchStrategy[int]:
    """1 to ``most``, with the neighbours of powers of two, windows and kernel widths drawn often."""
    edges = [
        n
        for base in (1, 2, 16, 32, 37, 48, 63, 64, 128, 256)
        for n in (base - 1, base, base + 1)
        if 1 <= n <= most
    ]
    return st.one_of(st.integers(1, min(8, most)), st.sampled_from(edges), st.integers(1, most))


@st.composite
def prompts(
    draw: st.DrawFn, *, count: int, most: int, shared: bool, tokens: DrawTokens = tokens_of
) -> list[tuple[int, ...]]:
    """``count`` prompts; with ``shared`` each may go on from a prefix of an
    earlier one, so that they form trees.
    """
    made: list[tuple[int, ...]] = []
    for index in range(count):
        own = tokens(1000 + index, draw(prompt_lengths(most)))
        if shared and made and draw(st.integers(0, 3)):
            parent = made[draw(st.integers(0, len(made) - 1))]
            kept = draw(st.one_of(st.just(len(parent)), st.integers(1, len(parent))))
            own = parent[:kept] + own[: draw(st.integers(0, max(1, most // 3)))]
        made.append(own[:most])
    return made


def arrival_steps(index: int) -> st.SearchStrategy[int]:
    """All at once, spread over a dozen steps, or one after the other, so that a later
    session finds an earlier prefix.
    """
    return st.one_of(st.just(6 * index), st.integers(0, 12), st.just(0))


def seeded_sampling() -> st.SearchStrategy[SamplingParams]:
    """Sampling by seed at several temperatures, cut off by count, by mass, or not at all."""
    return st.builds(
        SamplingParams,
        temperature=st.sampled_from([0.5, 1.0, 2.0]),
        seed=st.integers(0, 9),
        top_k=st.sampled_from([0, 1, 40]),
        top_p=st.sampled_from([1.0, 0.9]),
    )


@st.composite
def fault_lists(
    draw: st.DrawFn, *, count: int, features: dict[str, bool], last_step: int
) -> tuple[Fault, ...]:
    """Forced preemptions, cancellations and injected failures at any step,
    some while the step is in flight.
    """
    kinds = [
        kind
        for feature, kind in (
            ("cancel", FaultKind.CANCEL),
            ("preempt", FaultKind.PREEMPT),
            ("failures", FaultKind.DECODE_ERROR),
            ("failures", FaultKind.NO_SLOT),
        )
        if features[feature]
    ]
    if not kinds:
        return ()
    faults = []
    for _ in range(draw(st.integers(1, 6))):
        kind = draw(st.sampled_from(kinds))
        in_flight = kind in (FaultKind.CANCEL, FaultKind.PREEMPT) and draw(st.booleans())
        faults.append(
            Fault(
                kind=kind,
                step=draw(st.integers(0, last_step)),
                in_flight=in_flight,
                session=draw(st.integers(0, count - 1)),
                call=draw(st.integers(0, 2)),
            )
        )
    return tuple(faults)


@st.composite
def cases(
    draw: st.DrawFn,
    family: str,
    layout: Layout,
    *,
    model: str | None = None,
    policy: str = "fcfs",
    policy_options: PolicyOptions | None = None,
    tokens: DrawTokens = tokens_of,
    work_tokens: int = WORK_TOKENS,
) -> Case:
    """Cases of one family and layout: 1 to 16 sessions, prompts of 1 to 300 tokens, budgets from 1.

    For a policy other than the default, clients, priorities and objectives vary between sessions, and without
    ``policy_options`` (None or none at all) so do the policy's options.
    """
    features = {name: draw(st.booleans()) for name in FEATURES}
    budget = draw(st.one_of(st.integers(1, 4), st.integers(5, 64), st.integers(65, 300)))
    count = draw(st.integers(1, 16 if budget > 4 else 5))
    work = min(work_tokens, 60 * budget)
    most = max(1, min(300, work // count))
    texts = draw(prompts(count=count, most=most, shared=features["shared"], tokens=tokens))
    sessions = []
    for index, prompt in enumerate(texts):
        sampling = draw(seeded_sampling()) if features["seeded"] and draw(st.booleans()) else SamplingParams()
        sessions.append(
            Session(
                prompt=prompt,
                max_tokens=draw(st.one_of(st.integers(1, 3), st.integers(4, 24))),
                arrival_step=draw(arrival_steps(index)) if features["arrivals"] or features["shared"] else 0,
                sampling=sampling,
                stop_token_ids=tuple(range(3, 30)) if features["stops"] and index % 2 else (),
            )
        )
    longest = max(len(s.prompt) + s.max_tokens - 1 for s in sessions)
    total = sum(len(s.prompt) + s.max_tokens - 1 for s in sessions)
    if layout is Layout.STREAMS:
        pool = longest if features["tight_pool"] else STREAM_CELLS
        num_sequences = draw(st.integers(2, 4 if features["few_lanes"] else 20))
    else:
        most = most_sequences(family)
        pool = (
            draw(st.one_of(st.just(longest), st.integers(longest, min(total, 1900) + 8)))
            if features["tight_pool"]
            else 1900
        )
        num_sequences = draw(st.integers(3, most))
    case = Case(
        family=family,
        model=model or family,
        sessions=tuple(sessions),
        layout=layout,
        pool_cells=pool,
        kv_type=draw(st.sampled_from(("f16", "f16", "f32"))),
        num_sequences=num_sequences,
        max_num_batched_tokens=budget,
        max_num_seqs=draw(st.integers(1, 3)) if features["few_lanes"] else 16,
        max_chunk_tokens=draw(st.one_of(st.just(2048), st.integers(1, 64))),
        prefix_block_tokens=draw(st.sampled_from([1, 1, 4, 16])),
        policy=policy,
    )
    case = replace(case, faults=draw(fault_lists(count=count, features=features, last_step=last_step(case))))
    return case if policy == "fcfs" and not policy_options else draw(varied(case, policy_options))


_LATE_LAYERS = {
    "s0": [["inflight", 45.0], ["ready", 0.0]],
    "s1": [["ready", 0.0], ["inflight", 150.0]],
    "s3": [["ready", 0.0], ["inflight", 30.0]],
}
# What is drawn for a policy's options, beside their defaults. Objectives and times count in the case's steps.
OPTION_VALUES: dict[str, dict[str, tuple[Any, ...]]] = {
    "aging": {"quantum_ms": (1.0, 20.0, 100.0)},
    "fastserve_mlfq": {
        "quantum_rows": (1, 4, 16),
        "levels": (1, 3, 6),
        "promote_after_ms": (20.0, 300.0),
        "max_batch": (None, 1, 2),
    },
    "layer_ready": {"layer_ms": (1.0, 10.0), "facts": ({}, _LATE_LAYERS)},
    "least_slack": {"tokens_per_tick": (1, 64)},
    "orca": {"slots": (None, 2000)},
    "preble_quota": {"quotas": ([1], [2, 1], [1, 1, 3])},
    "sarathi": {"chunk_tokens": (1, 7, 256)},
    "sarathi_serve": {"tau": (None, 1, 9)},
    "scorpio_guard": {"base_ms": (0.0, 15.0), "ms_per_session": (0.0, 5.0)},
    "sglang_adder": {
        "warm_cold": (False, True),
        "warm_tokens": (1, 64),
        "mix_chunked": (False, True),
        "priority_scheduling": (False, True),
        "max_requests": (None, 1, 3),
        "chunk_tokens": (None, 5, 32),
        "max_extend_tokens": (None, 16),
        "max_cached_tokens": (None, 20),
        "page_tokens": (1, 4, 16),
    },
    "vllm_fcfs": {"long_prefill_threshold": (0, 1, 8)},
    "vllm_priority": {"long_prefill_threshold": (0, 1, 8)},
    "vtc": {"input_weight": (0, 1, 3), "output_weight": (0, 1, 2)},
    "vtc_completed": {"input_weight": (0, 1, 3), "output_weight": (0, 1, 2)},
}
_RESERVATIONS = ("maximum", {"kind": "watermark", "watermark_rows": 8})
_OVERLOADS = ("queue", {"kind": "bounded", "max_live": 6})


def option_values(policy: str) -> dict[str, tuple[Any, ...]]:
    """Values that are drawn for each option of a policy: those above, and those of the seams it has."""
    seams = {"reservation": _RESERVATIONS, "overload": _OVERLOADS}
    own = OPTION_VALUES.get(policy, {})
    return {**own, **{name: values for name, values in seams.items() if name in option_types(policy)}}


@st.composite
def varied(draw: st.DrawFn, case: Case, policy_options: PolicyOptions | None = None) -> Case:
    """The case with clients, priorities, objectives and options drawn: what its policy looks at.

    ``policy_options`` are kept if there are any. Limits are brought to what the policy allows.
    """
    objectives = st.sampled_from([None, None, 20.0, 50.0, 200.0, 1000.0])
    sessions = tuple(
        replace(
            session,
            client_id=draw(st.sampled_from("abc")),
            priority=draw(st.integers(0, 3)),
            slo=ServiceLevel(ttft_ms=draw(objectives), tbt_ms=draw(objectives)),
        )
        for session in case.sessions
    )
    options = tuple(policy_options or ()) or tuple(
        (name, draw(st.sampled_from(values)))
        for name, values in option_values(case.policy).items()
        if draw(st.booleans())
    )
    return within_limits(replace(case, sessions=sessions, policy_options=options))


def within_limits(case: Case) -> Case:
    """The case with fewer sessions at once, and a lower threshold of long prefills, where its policy would
    refuse the limits as they are.
    """
    if not case.policy.startswith("vllm_"):
        return case
    most = min(case.stage_cells or (case.pool_cells,)) + 1  # tokens of a session that has a pool to itself
    options = tuple(
        (name, min(value, most) if name == "long_prefill_threshold" else value)
        for name, value in case.policy_options
    )
    seqs = min(case.max_num_seqs, case.max_num_batched_tokens)
    return replace(case, max_num_seqs=seqs, policy_options=options)


def fixed_variety(policy: str, index: int) -> dict[str, Any]:
    """Client, priority and objectives of the ``index``-th session of a fixed case; none for the default."""
    if policy == "fcfs":
        return {}
    slo = ServiceLevel(ttft_ms=500.0 + 250.0 * (index % 3), tbt_ms=40.0 + 40.0 * (index % 2))
    return {"client_id": "abc"[index % 3], "priority": (index * 7) % 3, "slo": slo}


def fixed_options(policy: str) -> PolicyOptions:
    """Options of the fixed cases under a policy that is fcfs by its defaults; those of others stay theirs."""
    late = {f"s{index}": [["ready", 0.0], ["inflight", 10.0 * (20 + 9 * index)]] for index in (1, 2, 5)}
    chosen = {
        "layer_ready": {"facts": late},
        "preble_quota": {"quotas": [2, 1, 1, 1]},
        "sarathi_serve": {"tau": 9},
    }
    return tuple(chosen.get(policy, {}).items())


def last_step(case: Case) -> int:
    """The step by which a case without faults is through, at the latest: its last arrival and its work.

    Work is one session's chunks and tokens after the other, as many sessions at a time as lanes and pool let
    run, or the budget's share of all rows.
    """
    width = min(case.max_num_batched_tokens, case.max_chunk_tokens)
    turns = [-(-len(session.prompt) // width) + session.max_tokens for session in case.sessions]
    rows = [len(session.prompt) + session.max_tokens for session in case.sessions]
    lanes = min(case.max_num_seqs, case.num_sequences)
    if case.layout is not Layout.STREAMS:
        lanes = max(1, min(lanes, case.pool_cells // max(rows)))
    arrival = max(session.arrival_step for session in case.sessions)
    return arrival + max(turns) + max(sum(turns) // lanes, sum(rows) // case.max_num_batched_tokens)


def most_sequences(family: str) -> int:
    """Sequences of a family's default context."""
    return load_family(family).most_sequences


def landmark(
    family: str,
    layout: Layout,
    *,
    model: str | None = None,
    policy: str = "fcfs",
    policy_options: PolicyOptions = (),
    tokens: DrawTokens = tokens_of,
) -> Case:
    """A fixed case that runs first in every suite: one tree of prefixes asked for
    again and again, in a small pool.
    """
    root = tokens(7, 44)
    sessions = [
        Session(
            prompt=root[: 12 + 8 * (i % 5)] + tokens(100 + i, 1 + 5 * (i % 3)),
            max_tokens=6 + i,
            arrival_step=7 * (i if policy == "fcfs" else min(i, 4)),  # a policy has some to choose from
            **fixed_variety(policy, i),
        )
        for i in range(8)
    ]
    sessions.append(Session(prompt=tokens(99, 70), max_tokens=20, arrival_step=9))
    faults = (
        Fault(kind=FaultKind.PREEMPT, step=12, session=1),
        Fault(kind=FaultKind.PREEMPT, step=30, session=4),
        Fault(kind=FaultKind.CANCEL, step=17, session=8),
        Fault(kind=FaultKind.PREEMPT, step=40, session=5),
    )
    streams = layout is Layout.STREAMS
    return Case(
        family=family,
        model=model or family,
        sessions=tuple(sessions),
        layout=layout,
        policy=policy,
        policy_options=tuple(policy_options) or fixed_options(policy),
        pool_cells=STREAM_CELLS if streams else 130,
        num_sequences=9,
        max_num_batched_tokens=24,
        max_num_seqs=6,
        max_chunk_tokens=16,
        prefix_block_tokens=4,
        faults=faults,
    )


def edges(
    family: str,
    layout: Layout,
    *,
    model: str | None = None,
    policy: str = "fcfs",
    policy_options: PolicyOptions = (),
    tokens: DrawTokens = tokens_of,
) -> Case:
    """A fixed case of what generated ones reach seldom: a preemption, a cancel and a caller that asks again
    while a step is in flight, a failed step, a refusal, a stop token, seeds, a one-token prompt, one that
    fills the pool.
    """
    cells = 72
    sessions = (
        Session(prompt=tokens(201, 21), max_tokens=14),
        Session(prompt=tokens(202, 1), max_tokens=9, sampling=SamplingParams(temperature=1.0, seed=4)),
        Session(prompt=tokens(203, 9), max_tokens=10, stop_token_ids=TINY_VOCABULARY, hidden_output_tokens=3),
        Session(prompt=tokens(204, cells + 1), max_tokens=2, arrival_step=2),  # never fits
        Session(prompt=tokens(205, 6), max_tokens=20),
        Session(prompt=tokens(206, 50), max_tokens=cells + 1 - 50, arrival_step=36),  # fits exactly
    )
    faults = (
        Fault(kind=FaultKind.PREEMPT, step=4, session=0, in_flight=True),
        Fault(kind=FaultKind.CANCEL, step=7, session=0, in_flight=True),
        Fault(kind=FaultKind.DECODE_ERROR, step=9),
        Fault(kind=FaultKind.RESUBMIT, step=14, session=4, in_flight=True),
    )
    return Case(
        family=family,
        model=model or family,
        sessions=sessions,
        layout=layout,
        policy=policy,
        policy_options=tuple(policy_options),
        pool_cells=cells,
        num_sequences=3 if layout is Layout.STREAMS else 9,
        max_num_batched_tokens=32,
        max_num_seqs=6,
        max_chunk_tokens=16,
        prefix_block_tokens=4,
        faults=faults,
    )


# -- A Hypothesis backend that draws the same from the same seed in every process.
#
# Hypothesis' own also draws constants that it finds in the source of whatever modules are loaded,
# so that pytest, the command line and a Dask worker would explore different cases. Strategies here
# name their boundaries themselves.

BACKEND = "samebytes-steady"


class SteadyProvider(HypothesisProvider):
    """Hypothesis' provider without constants from loaded modules."""

    def _maybe_draw_constant(self, choice_type: Any, constraints: Any, *, p: float = 0.05) -> None:
        return None


def steady_backend() -> str:
    """The backend's name for ``settings(backend=...)``, registered."""
    AVAILABLE_PROVIDERS[BACKEND] = SteadyProvider
    return BACKEND
