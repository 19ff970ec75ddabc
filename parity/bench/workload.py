"""Workloads: length mixes, prefix shapes, arrival times. All drawn from one seed before a run starts."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from parity.errors import UsageError
from scheduler.records import ServiceLevel

LOWEST_TOKEN, TOKEN_BOUND = 3, 250  # token ids of prompts: plain ones in every vocabulary here


class PrefixShape(StrEnum):
    """What prompts have in common: nothing, a long beginning, or the conversation so far."""

    UNIQUE = "unique"
    SHARED = "shared"
    MULTI_TURN = "multi-turn"


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Tokens in and out of one request; a length varies by ``range_ratio`` to both sides, uniformly."""

    input_len: int
    output_len: int
    range_ratio: float = 0.0

    def draw(self, rng: random.Random) -> tuple[int, int]:
        return self._vary(rng, self.input_len), self._vary(rng, self.output_len)

    def _vary(self, rng: random.Random, length: int) -> int:
        low, high = int(length * (1 - self.range_ratio)), int(length * (1 + self.range_ratio))
        return max(1, rng.randint(low, high))


SHARED_FRACTION = 0.75
MIXES = {
    "short/short": Lengths(input_len=32, output_len=16),
    "long/short": Lengths(input_len=200, output_len=16),
    "short/long": Lengths(input_len=32, output_len=64),
    "long/long": Lengths(input_len=200, output_len=64),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One request to send, and the user's tokens of the turns that follow it in the same conversation."""

    index: int
    prompt: tuple[int, ...]
    max_tokens: int
    turn: int = 0
    later_turns: tuple[tuple[int, ...], ...] = ()
    client_id: str = "default"
    priority: int = 0
    slo: ServiceLevel = ServiceLevel()

    def following(self, output: Sequence[int]) -> Job | None:
        """The next turn: everything so far, then the user's next tokens."""
        if not self.later_turns:
            return None
        return replace(
            self,
            prompt=(*self.prompt, *output, *self.later_turns[0]),
            turn=self.turn + 1,
            later_turns=self.later_turns[1:],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What is sent. ``SHARED_FRACTION`` of each prompt is the same in shape ``shared``; ``turns`` per
    conversation in shape ``multi-turn``, where ``num_prompts`` counts requests, not conversations.

    ``clients`` and ``priorities`` (from 0, the favoured one) take turns over the conversations; every
    request has the objectives ``slo``.
    """

    name: str
    lengths: Lengths
    num_prompts: int
    shape: PrefixShape = PrefixShape.UNIQUE
    turns: int = 3
    seed: int = 0
    clients: int = 1
    priorities: int = 1
    slo: ServiceLevel = ServiceLevel()

    def jobs(self) -> list[Job]:
        """Requests in the order of sending; with several turns, the conversations' first ones."""
        rng = random.Random(f"bench {self.seed} {self.shape.value}")

        def tokens(count: int) -> tuple[int, ...]:
            return tuple(rng.randrange(LOWEST_TOKEN, TOKEN_BOUND) for _ in range(count))

        shared = tokens(int(self.lengths.input_len * SHARED_FRACTION))
        turns = self.turns if self.shape is PrefixShape.MULTI_TURN else 1
        jobs = []
        for index in range(-(-self.num_prompts // turns)):
            input_len, output_len = self.lengths.draw(rng)
            if self.shape is PrefixShape.SHARED:
                prompt = (*shared, *tokens(max(1, input_len - len(shared))))
            else:
                prompt = tokens(input_len)
            later = tuple(tokens(max(1, input_len // 4)) for _ in range(turns - 1))
            jobs.append(
                Job(
                    index=index,
                    prompt=prompt,
                    max_tokens=output_len,
                    later_turns=later,
                    client_id=f"client-{index % self.clients}" if self.clients > 1 else "default",
                    priority=index % self.priorities,
                    slo=self.slo,
                )
            )
        return jobs

    def longest_session(self) -> int:
        """Upper bound of prompt and output tokens of one request."""
        ratio = 1 + self.lengths.range_ratio
        turns = self.turns if self.shape is PrefixShape.MULTI_TURN else 1
        per_turn = self.lengths.input_len + self.lengths.output_len
        return int(turns * per_turn * ratio) + turns


def arrival_times(count: int, *, request_rate: float, burstiness: float, seed: int) -> list[float]:
    """Send times in seconds from the start: gaps from a gamma distribution of shape ``burstiness`` and mean
    ``1 / request_rate``, as in ``vllm bench serve``; 1 is a Poisson process, below 1 bursty, above 1 even.
    """
    if request_rate <= 0 or burstiness <= 0:
        raise UsageError(
            "request rate and burstiness must be above 0", why=f"{request_rate:g} and {burstiness:g}"
        )
    rng = random.Random(f"arrivals {seed}")
    now, times = 0.0, []
    for _ in range(count):
        now += rng.gammavariate(burstiness, 1 / (request_rate * burstiness))
        times.append(now)
    return times
