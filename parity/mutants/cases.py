"""Small cases that reach the planted faults: each function's docstring says what its case makes happen."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from parity.cases.strategies import tokens_of
from parity.models.families import family_names
from parity.records import Case, Fault, FaultKind, Session
from parity.run.runner import known_family
from scheduler.limits import Layout
from scheduler.records import SamplingParams

FAMILIES = tuple(family_names())
HYBRIDS = tuple(name for name in FAMILIES if known_family(name).is_hybrid)
ATTENTION = tuple(name for name in FAMILIES if name not in HYBRIDS)
SEEDED = SamplingParams(temperature=1.0, seed=5)


def case_of(family: str, sessions: tuple[Session, ...], **settings: Any) -> Case:
    """A case of a family's tiny model with few sequences; everything else as the caller says."""
    return Case(
        **{
            "family": family,
            "model": family,
            "num_sequences": 8,
            "pool_cells": 240,
            **settings,
            "sessions": sessions,
        }
    )


def session(seed: int, length: int, max_tokens: int = 6, **settings: Any) -> Session:
    """A session whose prompt is the first ``length`` tokens of the stream numbered ``seed``."""
    return Session(prompt=tokens_of(seed, length), max_tokens=max_tokens, **settings)


def mixed(family: str, **settings: Any) -> Case:
    """Four sessions of different lengths, prefill beside decode, chunks that do not divide the prompts."""
    sessions = tuple(session(10 + i, 5 + 6 * i, 6, arrival_step=i) for i in range(4))
    return case_of(family, sessions, **{"max_num_batched_tokens": 8, "prefix_cache": False, **settings})


def preempted(family: str, **settings: Any) -> Case:
    """Two sessions; the second is preempted after generated tokens, again during
    its own rebuild, and once more.
    """
    sessions = (session(4, 9, 12), session(5, 7, 12))
    faults = tuple(Fault(kind=FaultKind.PREEMPT, step=step, session=1) for step in (6, 8, 12))
    return case_of(
        family, sessions, **{"max_num_batched_tokens": 6, "faults": faults, "prefix_cache": False, **settings}
    )


def rebuilt_in_vain(family: str, **settings: Any) -> Case:
    """Two sessions; every rebuild succeeds and the decode after it fails."""
    faults = tuple(Fault(kind=FaultKind.DECODE_ERROR, step=step) for step in (1, 3, 5, 7))
    return case_of(
        family, (session(4, 9), session(5, 7)), **{"faults": faults, "prefix_cache": False, **settings}
    )


def cancelled(family: str, **settings: Any) -> Case:
    """Cancels before a step, with the last chunk in flight, and with a decode in
    flight; the ids are used again.
    """
    sessions = (session(6, 8, 20), session(7, 9, 20), session(8, 5, 12), session(9, 6, 5, arrival_step=12))
    faults = (
        Fault(kind=FaultKind.CANCEL, step=2, session=1, in_flight=True),
        Fault(kind=FaultKind.CANCEL, step=7, session=2, in_flight=True),
        Fault(kind=FaultKind.CANCEL, step=9, session=0),
    )
    return case_of(
        family, sessions, **{"max_num_batched_tokens": 8, "faults": faults, "prefix_cache": False, **settings}
    )


def refilled(family: str, **settings: Any) -> Case:
    """Cells and ids used again: short sessions end below a long one, new ones are
    placed among the retired cells.
    """
    sessions = (
        session(20, 12, 3),
        session(21, 14, 24),
        session(22, 9, 3),
        session(23, 30, 5, arrival_step=6),
        session(24, 26, 6, arrival_step=8),
        session(25, 18, 6, arrival_step=12),
    )
    return case_of(
        family,
        sessions,
        **{
            "max_num_batched_tokens": 24,
            "pool_cells": 90,
            "num_sequences": 5,
            "prefix_cache": False,
            **settings,
        },
    )


def one_token_chunks(family: str, **settings: Any) -> Case:
    """Decoders fill the step so that a newcomer's first chunk is one token;
    prompts of kC + 1 end with one.
    """
    sessions = (session(30, 3, 10), session(31, 4, 10), session(32, 9, 4, arrival_step=3), session(33, 1, 3))
    return case_of(
        family,
        sessions,
        **{"max_num_batched_tokens": 4, "max_chunk_tokens": 4, "prefix_cache": False, **settings},
    )


def lockstep(family: str, length: int = 12, count: int = 2, max_tokens: int = 20, **settings: Any) -> Case:
    """Sessions of equal length that decode side by side, past the window."""
    sessions = tuple(session(40 + i, length, max_tokens) for i in range(count))
    return case_of(family, sessions, **{"max_num_batched_tokens": 64, "prefix_cache": False, **settings})


def alternating(family: str, **settings: Any) -> Case:
    """Single-session steps of equal shape, one after the other: A, B, C,
    each one row at the same position.
    """
    sessions = tuple(session(50 + i, 2, 1) for i in range(3))
    return case_of(
        family,
        sessions,
        **{"max_num_batched_tokens": 2, "max_num_seqs": 1, "prefix_cache": False, **settings},
    )


def early_finishers(family: str, **settings: Any) -> Case:
    """Sessions of equal length that end at different steps while the others go on."""
    sessions = tuple(session(53 + i, 6, max_tokens) for i, max_tokens in enumerate((1, 2, 4, 9, 12)))
    return case_of(family, sessions, **{"prefix_cache": False, **settings})


def seeded(family: str, **settings: Any) -> Case:
    """Seeded sampling beside greedy, two sessions with one prompt and different seeds."""
    sessions = (
        session(60, 10, 6, sampling=SEEDED),
        session(60, 10, 6, sampling=replace(SEEDED, seed=6)),
        session(61, 5, 8, sampling=SEEDED, arrival_step=1),
        session(62, 7, 6),
    )
    return case_of(family, sessions, **{"prefix_cache": False, "max_num_batched_tokens": 16, **settings})


def wide(family: str, **settings: Any) -> Case:
    """Steps of many rows: several calls a step, none of which may be one row wide or too wide."""
    sessions = (session(70, 90, 4), session(71, 64, 4), session(72, 65, 4), session(73, 3, 8))
    return case_of(
        family,
        sessions,
        **{"max_num_batched_tokens": 127, "pool_cells": 400, "prefix_cache": False, **settings},
    )


def failing(family: str, **settings: Any) -> Case:
    """Native calls fail at their first and second micro-batch, while sessions prefill and decode."""
    sessions = (session(80, 70, 6), session(81, 12, 8), session(82, 5, 8, arrival_step=2))
    faults = (
        Fault(kind=FaultKind.DECODE_ERROR, step=0, call=1),
        Fault(kind=FaultKind.NO_SLOT, step=5, call=0),
    )
    return case_of(
        family,
        sessions,
        **{"max_num_batched_tokens": 100, "faults": faults, "prefix_cache": False, **settings},
    )


def exactly_full(family: str, **settings: Any) -> Case:
    """A pool that exactly fits the longest session, demand for half as much again,
    and one session that never fits.
    """
    sessions = (session(90, 20, 5), session(91, 10, 6), session(92, 9, 4), session(93, 24, 2, arrival_step=2))
    return case_of(
        family,
        sessions,
        **{"pool_cells": 24, "max_num_batched_tokens": 12, "prefix_cache": False, **settings},
    )


def long_and_alone(family: str, **settings: Any) -> Case:
    """A session of more than 512 cells that decodes alone: there the kernel for one row
    differs from that for several.
    """
    return case_of(
        family,
        (session(110, 560, 6),),
        **{"pool_cells": 700, "max_num_batched_tokens": 60, "prefix_cache": False, **settings},
    )


def preempted_by_rows(family: str, **settings: Any) -> Case:
    """As ``preempted``, with chunks of one token, so that a rebuild's last row is a chunk of its own."""
    faults = (Fault(kind=FaultKind.PREEMPT, step=12, session=1),)
    return preempted(family, **{"max_chunk_tokens": 1, "faults": faults, **settings})


def crowded(family: str, **settings: Any) -> Case:
    """A policy that admits without counting the rows to come: running sessions fill
    the pool and one must give way.
    """
    sessions = tuple(session(140 + i, 8, 20) for i in range(3))
    return case_of(
        family, sessions, **{"pool_cells": 48, "policy": "vllm_fcfs", "prefix_cache": False, **settings}
    )


def stopped(family: str, **settings: Any) -> Case:
    """A stop token comes as third output, which no scheduler may know beforehand."""
    sessions = (session(143, 6, 9, stop_token_ids=(2,), hidden_output_tokens=3), session(144, 9, 6))
    return case_of(family, sessions, **{"prefix_cache": False, **settings})


def one_row_tenants(family: str, **settings: Any) -> Case:
    """Ids used again by sessions whose first chunk is one token long."""
    tenants = (session(145 + i, 1 + i % 3, 3, arrival_step=3 * i) for i in range(12))
    sessions = (session(149, 4, 60), *tenants)
    return case_of(
        family, sessions, **{"num_sequences": 5, "max_chunk_tokens": 1, "prefix_cache": False, **settings}
    )


def past_the_window(family: str, **settings: Any) -> Case:
    """Four interleaved sessions, each past twice the window, in one pool."""
    sessions = tuple(session(150 + i, 30 + 3 * i, 24) for i in range(4))
    return case_of(family, sessions, **{"max_num_batched_tokens": 40, "prefix_cache": False, **settings})


def one_prompt_two_limits(family: str, **settings: Any) -> Case:
    """One prompt twice with different limits of the output."""
    return case_of(family, (session(160, 10, 3), session(160, 10, 8)), **{"prefix_cache": False, **settings})


def one_prompt_two_temperatures(family: str, **settings: Any) -> Case:
    """One prompt and one key of sampling at two temperatures, and once cut off by mass."""
    keyed = [
        SamplingParams(temperature=temperature, seed=5, top_p=top_p, key="one")
        for temperature, top_p in ((0.2, 1.0), (4.0, 1.0), (4.0, 0.3))
    ]
    sessions = tuple(session(161, 10, 12, sampling=sampling) for sampling in keyed)
    return case_of(family, sessions, **{"prefix_cache": False, **settings})


def one_prompt_with_and_without_a_stop(family: str, **settings: Any) -> Case:
    """One prompt three times: without stop tokens, with one that is sure to come, and with half of them."""
    stops = ((), tuple(range(512)), tuple(range(0, 512, 2)))
    sessions = tuple(session(162, 10, 12, stop_token_ids=ids) for ids in stops)
    return case_of(family, sessions, **{"prefix_cache": False, **settings})


STREAMS = {"layout": Layout.STREAMS, "pool_cells": 120}
STOCK = {"layout": Layout.STOCK}
