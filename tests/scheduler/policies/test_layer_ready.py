"""Admission that waits for layers: facts are consumed, nothing is moved."""

from __future__ import annotations

import pytest

from parity.run.runner import replay
from parity.suites.workloads import TICK_MS, play, rows_per_step, session, workload
from scheduler.policies import make_policy


def admitted_at(facts: list, layer_ms: float = 5.0) -> int:
    """Step at which a session with these facts first ran beside one that has none."""
    played = play(
        session(1, 9),
        session(2, 1, first_token=3000),
        policy="layer_ready",
        options={"facts": {"s1": facts}, "layer_ms": layer_ms},
    )
    return next(i for i, step in enumerate(rows_per_step(played)) if "s1" in step)


@pytest.mark.parametrize(
    ("facts", "step"),
    [
        ([("ready", 0), ("ready", 0)], 0),
        ([("inflight", 0), ("ready", 0)], 0),
        ([("ready", 0), ("inflight", 5.0)], 0),  # needed 5 ms after the start: in time
        ([("ready", 0), ("inflight", 6.0)], 1),
        ([("inflight", 5.0), ("ready", 0)], 1),
        ([("inflight", 4 * TICK_MS), ("ready", 0)], 4),
    ],
)
def test_a_session_enters_when_every_layer_will_be_there_in_time(
    facts: list[tuple[str, float]], step: int
) -> None:
    assert admitted_at(facts) == step


def test_a_missing_layer_keeps_its_session_out_and_delays_nobody_else() -> None:
    sessions = [session(2, 1, first_token=3000), session(1, 5)]
    # The run ends with a stuck session: nobody moves the layer.
    played = replay(workload(*sessions, policy="layer_ready", options={"facts": {"s0": [("miss", 0)]}}))
    assert [problem.split(":")[0] for problem in played.run.problems] == ["liveness"]
    assert len(played.outputs[1]) == 5 and 0 not in played.outputs
    assert all(i.kind.value == "defer" for i in played.run.trace[-1].flight.plan.intents)


def test_a_residency_that_nobody_defined_is_refused() -> None:
    with pytest.raises(ValueError):
        make_policy("layer_ready", facts={"s0": [("somewhere", 0)]})
