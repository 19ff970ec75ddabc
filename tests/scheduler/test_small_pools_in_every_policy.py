"""Small pools with shared prefixes, enumerated in every policy: all end, nobody lacks what was kept.

The default suite plays a slice of each policy's cases, the nightly one all of them.
"""

from __future__ import annotations

import pytest

from parity.campaign.small_pools import CELLS, KINDS, PER_PAIR, SLICE, play_small_pools, small_pools
from scheduler.policies import policy_names


def number_of_cases() -> int:
    """By arithmetic: the largest of the ten shapes has 6 + 4 - 1 = 9 rows, so 8 cells fit nine of them."""
    per_pool = {8: 36 + 84 + 126, 9: 45 + 120 + 210, 10: 45 + 120 + 210, 12: 45 + 120 + 210}
    return sum(per_pool[cells] for cells in CELLS) * 2 * 2 * 2


def test_the_enumeration_is_as_large_as_it_says() -> None:
    assert sum(1 for _ in small_pools()) == number_of_cases() == PER_PAIR


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("policy", policy_names())
def test_small_pools_end_in_every_policy(policy: str, kind: str) -> None:
    first = policy_names().index(policy) * len(KINDS) + list(KINDS).index(kind)
    played = play_small_pools(policy, kind, step=SLICE, first=first)
    assert [(outcome.case, outcome.findings) for outcome in played.failures] == []
    assert played.cases.total() >= PER_PAIR // SLICE
    assert played.marks["shared"] > 0


@pytest.mark.nightly
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("policy", policy_names())
def test_every_small_pool_ends_in_every_policy(policy: str, kind: str) -> None:
    played = play_small_pools(policy, kind)
    assert [(outcome.case, outcome.findings) for outcome in played.failures] == []
    assert played.cases.total() == PER_PAIR
