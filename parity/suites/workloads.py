"""Small synthetic workloads on plain counted cells, one step a tick of 10 ms, and what their replays show."""

from __future__ import annotations

from typing import Any

from parity.records import Case, Session
from parity.run.runner import Replay, replay
from scheduler.limits import Layout

TICK_MS = 10.0
STOP_TOKEN = 7


class WorkloadFailed(AssertionError):
    """A workload that any policy must serve had problems; the message lists them."""


def session(
    prompt_tokens: int,
    outputs: int,
    *,
    at: int = 0,
    first_token: int = 1000,
    hidden: int | None = None,
    **fields: Any,
) -> Session:
    """A session of ``prompt_tokens`` and at most ``outputs``; ``hidden``
    outputs are realised if it is given.
    """
    prompt = tuple(range(first_token, first_token + prompt_tokens))
    stops = (STOP_TOKEN,) if hidden is not None else ()
    return Session(
        prompt=prompt,
        max_tokens=outputs,
        arrival_step=at,
        stop_token_ids=stops,
        hidden_output_tokens=hidden,
        **fields,
    )


def workload(*sessions: Session, policy: str = "fcfs", options: dict | None = None, **fields: Any) -> Case:
    """A case with counted cells, no prefix cache and generous limits unless ``fields`` say otherwise."""
    fields = {
        "layout": Layout.STOCK,
        "prefix_cache": False,
        "pool_cells": 1000,
        "num_sequences": 64,
        "max_num_batched_tokens": 64,
        "max_num_seqs": 16,
        "ms_per_step": TICK_MS,
        **fields,
    }
    return Case(
        family="llama",
        model="llama",
        sessions=sessions,
        policy=policy,
        policy_options=tuple((options or {}).items()),
        **fields,
    )


def play(*sessions: Session, policy: str = "fcfs", options: dict | None = None, **fields: Any) -> Replay:
    """Replay a workload. Raises ``WorkloadFailed`` for a run with problems."""
    played = replay(workload(*sessions, policy=policy, options=options, **fields))
    if played.run.problems:
        raise WorkloadFailed("; ".join(played.run.problems))
    return played


def intervals(played: Replay) -> list[list[tuple[str, int, int]]]:
    """Who ran which rows, per step."""
    return [
        [(c.request_id, c.start, c.stop) for c in traced.flight.plan.chunks] for traced in played.run.trace
    ]


def rows_per_step(played: Replay) -> list[dict[str, int]]:
    """Rows of each session, per step."""
    return [{name: stop - start for name, start, stop in step} for step in intervals(played)]


def order_of_first_chunks(played: Replay) -> list[str]:
    """Sessions in the order in which they first ran."""
    return list(dict.fromkeys(name for step in intervals(played) for name, _, _ in step))
