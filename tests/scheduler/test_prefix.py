"""Prefix sharing: what each memory class may share, when, at what cost, and what is never taken away."""

from __future__ import annotations

import pytest

from scheduler.limits import Layout
from scheduler.prefix import digest_chain
from tests.scheduler.serving import Serving, request

ROOT = tuple(range(500, 520))


def cached(serving: Serving, name: str) -> int:
    return serving.scheduler.memory.cached_tokens(serving.view(name))


def test_digests_chain_over_model_and_tokens() -> None:
    chain = digest_chain("m", (1, 2, 3))
    assert digest_chain("m", (1, 2, 4))[:2] == chain[:2]
    assert digest_chain("n", (1, 2, 3))[0] != chain[0]
    assert digest_chain("m", (2, 1, 3))[1] != chain[1]


@pytest.mark.parametrize(("common", "tail"), [(20, 1), (13, 5), (1, 8)])
def test_positional_sharing_gives_any_number_of_tokens(common: int, tail: int) -> None:
    serving = Serving(prefix_block_tokens=4)
    serving.submit(request("donor", ROOT, 3))
    serving.step()
    serving.submit(request("heir", ROOT[:common] + tuple(range(tail)), 3))
    assert cached(serving, "heir") == common
    serving.run()
    serving.check_all_as_alone()
    assert serving.totals.values["prefix_tokens_saved"] == common


@pytest.mark.parametrize("common", [15, 16, 17, 19])
def test_whole_states_are_shared_only_at_the_position_where_they_were_kept(common: int) -> None:
    serving = Serving(recurrent=True, prefix_block_tokens=8)
    serving.submit(request("donor", ROOT, 3))
    serving.step(4)
    serving.submit(request("heir", ROOT[:common] + tuple(range(9)), 3))
    assert cached(serving, "heir") == (16 if common >= 16 else 0)
    serving.run()
    serving.check_all_as_alone()


def test_a_state_is_kept_where_two_prompts_part() -> None:
    serving = Serving(cells=200, recurrent=True, prefix_block_tokens=4)
    serving.submit(request("first", ROOT[:9] + (1, 2, 3, 4, 5, 6, 7, 8), 2))
    serving.step(6)
    serving.submit(request("second", ROOT[:9] + tuple(range(30, 39)), 2))
    serving.step(6)
    serving.submit(request("third", ROOT[:9] + tuple(range(60, 69)), 2))
    assert cached(serving, "third") == 8
    serving.run()
    serving.check_all_as_alone()


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"window": 4},
        {"recurrent": True},
        {"layout": Layout.STREAMS, "cells": 480},
        {"layout": Layout.STOCK},
        {"stages": 2},
    ],
    ids=str,
)
@pytest.mark.parametrize("length", [1, 2, 16, 17])
def test_full_hit_recomputes_at_least_one_token(length: int, fields: dict) -> None:
    serving = Serving(prefix_block_tokens=1, **fields)
    for name in ("first", "second", "third"):
        serving.submit(request(name, ROOT[:length], 3))
        while not serving.scheduler.is_idle:
            record = serving.step()
            assert record.prefill_tokens + record.decode_tokens > 0
    assert serving.totals.values["prefix_tokens_saved"] == 2 * (length - 1)
    serving.run()
    serving.check_all_as_alone()


def test_prefix_is_shareable_only_after_the_step_that_computed_it() -> None:
    serving = Serving(cells=200, prefix_block_tokens=4)
    serving.submit(*[request(name, ROOT, 2) for name in ("a", "b", "c")])
    serving.step()
    assert [chunk.start for chunk in serving.trace[0][0].plan.chunks] == [0, 0, 0]
    serving.submit(request("d", ROOT, 2))
    assert cached(serving, "d") == len(ROOT) - 1
    serving.run()
    serving.check_all_as_alone()


def test_donor_in_the_middle_of_its_prompt_gives_nothing() -> None:
    serving = Serving(cells=200, prefix_block_tokens=1, max_chunk_tokens=5)
    serving.submit(request("donor", ROOT, 2))
    serving.step(2)
    serving.submit(request("heir", ROOT + (1,), 2))
    assert cached(serving, "heir") == 0
    serving.run()
    serving.check_all_as_alone()


@pytest.mark.parametrize("recurrent", [False, True])
def test_prefix_outlives_a_donor_that_is_cancelled(recurrent: bool) -> None:
    serving = Serving(recurrent=recurrent, prefix_block_tokens=4)
    serving.submit(request("donor", ROOT, 9))
    serving.step(3)
    serving.scheduler.cancel("donor", serving.now_ms)
    serving.submit(request("filler", 12, 6))
    serving.step(2)
    serving.submit(request("heir", ROOT + (1, 2), 4))
    serving.run()
    assert serving.ends["heir"].tokens == serving.solo("heir")
    assert serving.totals.values["prefix_hits"] == 1


def test_hit_is_looked_up_again_when_the_entry_went_meanwhile() -> None:
    serving = Serving(prefix_block_tokens=4)
    serving.submit(request("donor", ROOT, 2))
    serving.run()
    serving.submit(request("donor2", ROOT, 2))
    serving.step(3)
    serving.submit(request("heir", ROOT + (1,), 2))
    assert cached(serving, "heir") == len(ROOT)
    assert serving.scheduler.memory.evict_one()
    assert cached(serving, "heir") == 0
    serving.run()
    serving.check_all_as_alone()


def test_entries_stay_within_twice_the_lanes_and_half_the_pool() -> None:
    serving = Serving(cells=64, ids=40, prefix_block_tokens=1, max_num_seqs=2)
    for index in range(12):
        serving.submit(request(f"r{index}", 7, 2))
    while not serving.scheduler.is_idle:
        serving.step()
        entries = serving.scheduler.memory.prefix.entries.values()
        assert len(entries) <= 4
        assert sum(entry.count for entry in entries) <= 32
    serving.check_all_as_alone()


def test_least_recently_used_entry_goes_first_and_none_in_use() -> None:
    serving = Serving(cells=200, ids=40, prefix_block_tokens=4, max_num_seqs=8)
    memory = serving.scheduler.memory
    for name, base in (("a", 0), ("b", 100), ("c", 200)):
        serving.submit(request(name, range(base, base + 8), 1))
        serving.step()
    serving.submit(request("user", tuple(range(8)) + (9,), 6))
    serving.step()
    assert [entry.users for entry in memory.prefix.entries.values()] == [0, 0, 1, 0]
    serving.step()
    while memory.evict_one():
        pass
    assert [entry.users for entry in memory.prefix.entries.values()] == [1]
    serving.run()
    serving.check_all_as_alone()


def test_a_follower_that_needs_the_whole_pool_is_admitted_beside_its_idle_donor() -> None:
    serving = Serving(cells=12, prefix_block_tokens=4)
    serving.submit(request("donor", range(6), 1))
    serving.step()
    serving.submit(request("follower", tuple(range(6)) + (9, 9), 5))
    serving.run()
    serving.check_all_as_alone()
    assert serving.totals.values["prefix_tokens_saved"] == 6


def test_three_sessions_sharing_8_of_12_fit_20_cells_together() -> None:
    serving = Serving(cells=20, prefix_block_tokens=4)
    serving.submit(request("donor", range(8), 1))
    serving.step()
    serving.submit(*[request(f"s{i}", (*range(8), 50 + i), 4) for i in range(3)])
    serving.step()
    assert len(serving.scheduler.table.running) == 3
    assert serving.totals.values["cells_shared"] == 24
    serving.run()
    serving.check_all_as_alone()


@pytest.mark.parametrize("first", ["s0", "s2"])
def test_sharers_survive_each_other(first: str) -> None:
    serving = Serving(cells=20, prefix_block_tokens=4)
    serving.submit(request("donor", range(8), 1))
    serving.step()
    serving.submit(*[request(f"s{i}", (*range(8), 50 + i), 4) for i in range(3)])
    serving.step(2)
    serving.scheduler.cancel(first, serving.now_ms)
    serving.submit(request("filler", 3, 2))
    serving.run()
    del serving.ends[first]
    serving.check_all_as_alone()


def test_a_hit_that_lies_too_high_in_the_pool_is_no_hit() -> None:
    serving = Serving(cells=12, prefix_block_tokens=2)
    serving.submit(request("low", 7, 1, client_id="x"), request("donor", range(4), 1))
    serving.step()
    serving.submit(request("follower", (*range(4), 9, 9), 4))
    serving.run()
    serving.check_all_as_alone()


def test_evictable_cells_are_evicted_before_anybody_is_preempted() -> None:
    serving = Serving(cells=32, prefix_block_tokens=4)
    for index in range(4):
        serving.submit(request(f"e{index}", 4, 1))
        serving.step()
    assert serving.scheduler.memory.available_rows() == 32
    serving.submit(request("big", 30, 3))
    serving.run()
    serving.check_all_as_alone()
    assert serving.totals.values["preempted"] == 0


def test_a_share_that_is_cut_short_pins_the_entry_that_admission_counted() -> None:
    """``late`` goes on from ``long``, of which it may share three tokens only; those begin ``other``, too,
    which came later. Room was counted with the cells of ``long`` pinned, so these are the ones to pin.
    """
    serving = Serving(cells=64, prefix_block_tokens=4)
    serving.submit(request("long", range(100, 108)))
    serving.step(3)
    serving.submit(request("other", [*range(100, 103), *range(200, 209)]))
    serving.step(3)
    serving.submit(request("late", [*range(100, 108), 1, 2, 3], 2))
    memory, view = serving.scheduler.memory, serving.view("late")
    entry, count = memory.prefix.lookup(memory._chain(view))
    assert (entry.count, count, len(memory.prefix.entries)) == (8, 8, 2)

    assert memory.open(view, 3)
    assert memory.residences["late"].entry is entry


def test_nothing_is_shared_while_sharing_stands_in_the_way_although_it_is_resident() -> None:
    serving = Serving(prefix_block_tokens=4)
    serving.submit(request("donor", ROOT, 3))
    serving.step()
    serving.submit(request("heir", (*ROOT, 1), 3))
    memory = serving.scheduler.memory
    assert cached(serving, "heir") == len(ROOT)
    memory.allow_sharing(False)
    memory.begin_step()
    assert cached(serving, "heir") == 0
    memory.allow_sharing(True)
    memory.begin_step()
    assert cached(serving, "heir") == len(ROOT)
