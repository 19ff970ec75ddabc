"""Small cases with shared prefixes: each function's docstring says what its case makes happen."""

from __future__ import annotations

from typing import Any

from parity.cases.strategies import tokens_of
from parity.mutants.cases import case_of, session
from parity.records import Case, Fault, FaultKind, Session
from scheduler.limits import Layout


def shared_prefix(family: str, **settings: Any) -> Case:
    """A donor of 24 tokens, then two followers that share 20 and 17 of them and go on differently."""
    donor, other = tokens_of(1, 24), tokens_of(2, 12)
    sessions = (
        Session(prompt=donor, max_tokens=5),
        Session(prompt=donor[:20] + other, max_tokens=5, arrival_step=5),
        Session(prompt=donor[:17] + other[4:], max_tokens=5, arrival_step=6),
    )
    return case_of(family, sessions, **{"prefix_block_tokens": 4, "max_num_batched_tokens": 32, **settings})


def same_prompt(family: str, **settings: Any) -> Case:
    """One prompt of 20 tokens four times: twice at once, then after the first has ended."""
    sessions = tuple(session(3, 20, 4, arrival_step=step) for step in (0, 0, 7, 9))
    return case_of(family, sessions, **{"prefix_block_tokens": 4, "max_num_batched_tokens": 24, **settings})


def full_with_prefix(family: str, **settings: Any) -> Case:
    """A donor whose 16 tokens stay resident in a pool where a follower of 24 fits only if it shares them."""
    prompt = tokens_of(95, 16)
    sessions = (
        Session(prompt=prompt, max_tokens=2),
        Session(prompt=prompt + tokens_of(96, 12), max_tokens=5, arrival_step=4),
        Session(prompt=prompt + tokens_of(97, 9), max_tokens=5, arrival_step=4),
    )
    return case_of(
        family,
        sessions,
        **{"pool_cells": 40, "prefix_block_tokens": 4, "max_num_batched_tokens": 20, **settings},
    )


def publisher_cancelled(family: str, **settings: Any) -> Case:
    """A donor's prefix is shared while it still runs, then the donor is
    cancelled and its cells are used again.
    """
    prompt = tokens_of(100, 24)
    sessions = (
        Session(prompt=prompt, max_tokens=30),
        Session(prompt=prompt[:20] + tokens_of(101, 6), max_tokens=14, arrival_step=4),
        session(102, 30, 6, arrival_step=8),
        session(103, 26, 6, arrival_step=9),
    )
    return case_of(
        family,
        sessions,
        **{
            "prefix_block_tokens": 4,
            "max_num_batched_tokens": 40,
            "pool_cells": 120,
            "faults": (Fault(kind=FaultKind.CANCEL, step=7),),
            **settings,
        },
    )


def prefix_in_progress(family: str, **settings: Any) -> Case:
    """The same prompt four times: all of them wait or start while the first
    one's chunks are still running.
    """
    sessions = tuple(session(120, 26, 4, arrival_step=step) for step in (0, 1, 2, 3))
    return case_of(
        family,
        sessions,
        **{"max_num_batched_tokens": 8, "prefix_block_tokens": 4, "pool_cells": 54, **settings},
    )


def prefix_lost_while_waiting(family: str, **settings: Any) -> Case:
    """A prompt's prefix is resident when it begins to wait, and goes while another session fills the pool."""
    prompt = tokens_of(126, 8)
    sessions = (
        Session(prompt=prompt, max_tokens=1),
        session(127, 4, 21, arrival_step=3),
        Session(prompt=prompt + tokens_of(128, 3), max_tokens=3, arrival_step=4),
    )
    settings = {"layout": Layout.STOCK, "prefix_block_tokens": 4, "pool_cells": 24, **settings}
    return case_of(family, sessions, **settings)


def same_ending(family: str, **settings: Any) -> Case:
    """Two prompts that differ at their beginning and are equal from there on, one after the other."""
    first, second, rest = tokens_of(121, 6), tokens_of(122, 6), tokens_of(123, 16)
    sessions = (
        Session(prompt=first + rest, max_tokens=4),
        Session(prompt=second + rest, max_tokens=4, arrival_step=4),
    )
    return case_of(family, sessions, **{"prefix_block_tokens": 4, **settings})


def exhausted_with_sharers(family: str, **settings: Any) -> Case:
    """A follower shares a resident prefix for long, while newcomers need its ids and cells."""
    prompt = tokens_of(124, 16)
    sessions = (
        Session(prompt=prompt, max_tokens=2),
        Session(prompt=prompt + tokens_of(125, 4), max_tokens=24, arrival_step=3),
        session(126, 18, 4, arrival_step=5),
        session(127, 20, 4, arrival_step=6),
    )
    return case_of(
        family, sessions, **{"prefix_block_tokens": 4, "num_sequences": 5, "pool_cells": 64, **settings}
    )


def short_of_the_state(family: str, **settings: Any) -> Case:
    """A whole state is kept at 16 tokens; a follower has only 12 of them in
    common, so nothing may be reused.
    """
    donor = tokens_of(128, 20)
    sessions = (
        Session(prompt=donor, max_tokens=4),
        Session(prompt=donor[:12] + tokens_of(129, 9), max_tokens=5, arrival_step=5),
    )
    return case_of(family, sessions, **{"prefix_block_tokens": 8, "max_num_batched_tokens": 32, **settings})


def state_of_a_runner(family: str, **settings: Any) -> Case:
    """A state is kept at 16 tokens while its donor goes on by one token; a
    follower goes on from the state.
    """
    donor = tokens_of(130, 17)
    sessions = (
        Session(prompt=donor, max_tokens=6),
        Session(prompt=donor[:16] + tokens_of(131, 7), max_tokens=6, arrival_step=5),
    )
    return case_of(family, sessions, **{"prefix_block_tokens": 16, "max_num_batched_tokens": 16, **settings})


def long_followers(family: str, **settings: Any) -> Case:
    """Followers of a prefix longer than the window, whose donor ends and whose cells are used again."""
    donor = tokens_of(155, 40)
    sessions = (
        Session(prompt=donor, max_tokens=3),
        Session(prompt=donor[:36] + tokens_of(156, 8), max_tokens=30, arrival_step=4),
        Session(prompt=donor[:30] + tokens_of(157, 5), max_tokens=30, arrival_step=4),
        session(158, 50, 10, arrival_step=8),
        session(159, 40, 10, arrival_step=10),
    )
    return case_of(family, sessions, **{"prefix_block_tokens": 4, **settings})
