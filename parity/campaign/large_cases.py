"""Twenty large failing cases, one planted fault each: what shrinking has to make small."""

from __future__ import annotations

import random
from dataclasses import dataclass

from parity.campaign.rerun import Rerun
from parity.cases.shrink import shrink_case, size_of
from parity.cases.strategies import tokens_of
from parity.mutants import find_mutant
from parity.records import Case, Fault, FaultKind, Session, Verdict

MOST_SESSIONS, MOST_TOKENS = 3, 40  # what a planted case must shrink to
PLANTED = (
    "position_off_by_one",
    "logits_rows_swapped",
    "logits_rows_dense",
    "tokens_of_two_sessions_swapped",
    "replay_without_generated_tokens",
    "cell_below_the_last_one",
    "freed_cells_kept_by_the_engine",
    "retired_cells_freed_too_late",
    "shared_cells_freed_with_one_owner",
    "cancel_leaves_cells_behind",
    "prefix_shared_one_token_too_far",
    "recurrent_share_past_the_boundary",
    "copy_forgotten",
    "preempted_session_lost",
    "token_after_cancel",
    "cancel_in_flight_lost",
    "session_ends_twice",
    "rebuild_debited_as_service",
    "state_lost_at_a_chunk_boundary",
    "window_one_position_short",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shrunk:
    """A planted case before and after, with the number of runs that it took."""

    mutant: str
    before: Case
    after: Case
    runs: int

    @property
    def is_small(self) -> bool:
        sessions, tokens, _, _ = size_of(self.after)
        return sessions <= MOST_SESSIONS and tokens <= MOST_TOKENS


def large_case(family: str, seed: int) -> Case:
    """12 to 15 sessions with and without a common beginning, arrivals, cancels and preemptions."""
    rng = random.Random(seed)
    root, sessions = tokens_of(seed, 30), []
    for index in range(12 + seed % 4):
        own = tokens_of(1000 * seed + index, rng.randrange(1, 40))
        prompt = root[: rng.randrange(4, 30)] + own if rng.random() < 0.6 else own
        sessions.append(
            Session(prompt=prompt, max_tokens=rng.randrange(1, 16), arrival_step=rng.randrange(0, 25))
        )
    faults = tuple(
        Fault(
            kind=rng.choice([FaultKind.CANCEL, FaultKind.PREEMPT]),
            step=rng.randrange(0, 30),
            session=rng.randrange(len(sessions)),
            in_flight=rng.random() < 0.5,
        )
        for _ in range(5)
    )
    return Case(
        family=family,
        model=family,
        sessions=tuple(sessions),
        pool_cells=300,
        num_sequences=14,
        max_num_batched_tokens=24,
        prefix_block_tokens=4,
        faults=faults,
    )


def shrink_planted(name: str) -> Shrunk:
    """Plant a fault, take the first large case that fails with it, and shrink that.

    Raises ValueError without.
    """
    family = find_mutant(name).families[0]
    run = Rerun(exact=True, mutant=name)
    before = next(
        (
            case
            for case in (large_case(family, seed) for seed in range(1, 30))
            if run(case).verdict is Verdict.FAIL
        ),
        None,
    )
    if before is None:
        raise ValueError(f"no large case fails with {name}")
    return Shrunk(mutant=name, before=before, after=shrink_case(before, run), runs=run.count)
