"""Mutants of prefix sharing: what is shared, how far, when, and what is forgotten on the way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import scheduler.memory as memory_module
from parity.mutants import cases, sharing_cases
from parity.mutants.cells import ANY_DAMAGE
from parity.mutants.mutant import Killer, Reach, mutant
from parity.mutants.rows import DIFFERS, everywhere
from parity.mutants.seam import Change, in_batches, in_method
from parity.mutants.trials import exact_trial
from parity.records import Case, Session
from scheduler.engine import Batch, Call, MemoryOp, OpKind
from scheduler.limits import Sharing
from scheduler.memory import Memory
from scheduler.prefix import PrefixCache, PrefixEntry
from scheduler.records import IterationPlan, SessionView


@mutant(
    in_method(PrefixCache, "lookup"),
    part="prefix",
    killers=DIFFERS,
    trials=everywhere(sharing_cases.shared_prefix, cases.ATTENTION),
)
def prefix_shared_one_token_too_far(original: Callable[..., Any], reach: Reach) -> Callable[..., Any]:
    """A follower shares one token more than it has in common with the donor."""

    def lookup(self: PrefixCache, chain: tuple[bytes, ...]) -> tuple[PrefixEntry | None, int]:
        entry, count = original(self, chain)
        if entry is not None and count < min(entry.count, len(chain) - 1):
            reach()
            return entry, count + 1
        return entry, count

    return lookup


@mutant(
    in_method(PrefixCache, "lookup"),
    part="prefix",
    killers=(Killer.LIVENESS, Killer.CONTRACT, Killer.LEGALITY),
    trials=tuple(exact_trial(sharing_cases.same_prompt(family)) for family in cases.ATTENTION),
)
def full_hit_leaves_nothing_to_compute(original: Callable[..., Any], reach: Reach) -> Callable[..., Any]:
    """A prompt that is resident as a whole is shared as a whole, so that no row gives logits."""

    def lookup(self: PrefixCache, chain: tuple[bytes, ...]) -> tuple[PrefixEntry | None, int]:
        entry, count = original(self, (*chain, b""))
        if entry is not None and count == len(chain):
            reach()
        return entry, count

    return lookup


@mutant(
    in_method(Memory, "keep_prefix"),
    part="prefix",
    killers=(Killer.ENGINE, Killer.INTERNAL, *DIFFERS),
    trials=everywhere(sharing_cases.prefix_in_progress, cases.ATTENTION),
)
def prefix_shared_before_it_is_computed(original: Callable[..., Any], reach: Reach) -> Callable[..., Any]:
    """A prompt is shareable as a whole as soon as its first chunk is computed."""

    def keep_prefix(self: Memory, view: SessionView) -> None:
        chain = self._chain(view)
        early = 0 < view.computed < len(chain) and self.sharing is Sharing.POSITIONAL
        if early and not self.prefix.holds(chain) and min(len(pool.free_ids) for pool in self.pools) > 1:
            seq_ids = self.residences[view.request_id].seq_ids
            shares = tuple(
                p.share(seq_id, view.computed) for p, seq_id in zip(self.pools, seq_ids, strict=True)
            )
            self.prefix.insert(chain, shares)
            reach()
        original(self, view)

    return keep_prefix


@mutant(
    in_method(memory_module, "digest_chain"),
    part="prefix",
    killers=DIFFERS,
    trials=everywhere(sharing_cases.same_ending, cases.ATTENTION),
)
def prefix_identity_without_its_past(original: Callable[..., Any], reach: Reach) -> Callable[..., Any]:
    """Prefixes are told apart by their last token and length alone."""

    def digest_chain(model_digest: str, tokens: tuple[int, ...]) -> tuple[bytes, ...]:
        reach()
        return tuple(original(model_digest, (position, token))[-1] for position, token in enumerate(tokens))

    return digest_chain


@mutant(
    in_method(Memory, "cached_tokens"),
    part="prefix",
    killers=(Killer.LIVENESS, Killer.LEGALITY, Killer.ENGINE, Killer.INTERNAL),
    trials=tuple(exact_trial(sharing_cases.prefix_lost_while_waiting(family)) for family in cases.ATTENTION),
)
def cached_count_from_the_first_lookup(original: Callable[..., Any], reach: Reach) -> Callable[..., Any]:
    """The number of cached tokens is looked up while a session waits and used when it runs."""

    first_answers: dict[tuple[int, str], int] = {}

    def cached_tokens(self: Memory, view: SessionView) -> int:
        now = original(self, view)
        known = first_answers.setdefault((id(self), view.request_id), now)
        if known != now:
            reach()
        return known

    return cached_tokens


@mutant(
    in_method(PrefixCache, "oldest_idle"),
    part="prefix",
    killers=(Killer.CONSERVATION,),
    trials=(
        exact_trial(sharing_cases.exhausted_with_sharers("llama")),
        exact_trial(sharing_cases.exhausted_with_sharers("gemma2")),
    ),
)
def entry_in_use_evicted(original: Callable[..., Any], reach: Reach) -> Callable[..., Any]:
    """Eviction takes an entry that live sessions share."""

    def oldest_idle(self: PrefixCache) -> PrefixEntry | None:
        oldest = next(iter(self.entries.values()), None)
        if oldest is not None and oldest.users:
            reach()
        return oldest

    return oldest_idle


@mutant(
    in_method(Memory, "pinned_rows"),
    part="prefix",
    killers=(Killer.LIVENESS, Killer.CONTRACT),
    trials=(
        exact_trial(sharing_cases.full_with_prefix("llama")),
        exact_trial(sharing_cases.full_with_prefix("deepseek2")),
    ),
)
def shared_rows_counted_as_need(original: Callable[..., Any], reach: Reach) -> Callable[..., Any]:
    """A follower must find room for the rows that it shares."""

    def pinned_rows(self: Memory, view: SessionView) -> int:
        pinned, cached = original(self, view), self.cached_tokens(view)
        if cached:
            reach()
        return pinned + cached

    return pinned_rows


@mutant(
    in_method(PrefixCache, "lookup"),
    part="prefix",
    killers=DIFFERS,
    trials=everywhere(sharing_cases.short_of_the_state, cases.HYBRIDS),
)
def recurrent_share_past_the_boundary(original: Callable[..., Any], reach: Reach) -> Callable[..., Any]:
    """A recurrent state is taken for a prefix shorter than the one it was saved at."""

    def lookup(self: PrefixCache, chain: tuple[bytes, ...]) -> tuple[PrefixEntry | None, int]:
        exact = original(self, chain)
        for entry in self.entries.values() if self.sharing is Sharing.WHOLE_STATE else ():
            common = next(
                (
                    n
                    for n in range(min(entry.count, len(chain) - 1), 0, -1)
                    if entry.digests[n - 1] == chain[n - 1]
                ),
                0,
            )
            if exact[1] < common < entry.count:
                reach()
                return entry, common
        return exact

    return lookup


@mutant(
    in_batches,
    part="prefix",
    killers=DIFFERS,
    trials=everywhere(sharing_cases.state_of_a_runner, cases.HYBRIDS),
)
def recurrent_state_one_token_late() -> Change:
    """A prefix's recurrent state is taken after its donor computed one more token."""

    held: list[MemoryOp] = []

    def change(plan: IterationPlan, batch: Batch) -> Batch:
        def late(call: Call) -> Call:
            copies = tuple(op for op in call.ops if op.kind is OpKind.COPY and op.seq_id not in call.seq_ids)
            earlier = tuple(held)
            held[:] = copies
            return replace(call, ops=(*earlier, *(op for op in call.ops if op not in copies)))

        return replace(batch, stages=tuple(tuple(map(late, calls)) for calls in batch.stages))

    return change


@mutant(
    in_batches,
    part="prefix",
    killers=(*DIFFERS, Killer.ENGINE),
    trials=everywhere(sharing_cases.shared_prefix, cases.HYBRIDS),
)
def copy_forgets_the_recurrent_state() -> Change:
    """The attention part of a prefix hits, the recurrent part misses."""

    def change(plan: IterationPlan, batch: Batch) -> Batch:
        def drop(call: Call) -> Call:
            ops = [
                new
                for op in call.ops
                for new in ((op, MemoryOp(OpKind.DROP_STATE, op.seq_id)) if op.kind is OpKind.COPY else (op,))
            ]
            return replace(call, ops=tuple(ops))

        return replace(batch, stages=tuple(tuple(map(drop, calls)) for calls in batch.stages))

    return change


@mutant(
    in_batches,
    part="prefix",
    killers=(*ANY_DAMAGE, Killer.BYTES),
    trials=everywhere(sharing_cases.shared_prefix),
)
def copy_forgotten() -> Change:
    """A shared prefix is in the books but not in the engine."""

    def change(plan: IterationPlan, batch: Batch) -> Batch:
        def drop(call: Call) -> Call:
            return replace(call, ops=tuple(op for op in call.ops if op.kind is not OpKind.COPY))

        return replace(batch, stages=tuple(tuple(map(drop, calls)) for calls in batch.stages))

    return change


def _cut_with_nobody_running() -> Case:
    """A tight pool in which the last session may share less than is resident, of an entry that is not the
    only one with those first tokens.
    """
    chosen = (
        ((143, 133, 8, 56, 159, 238, 106), 9, 2),
        ((150, 207, 116), 1, 2),
        ((88, 150, 117, 188, 140, 245), 2, 1),
        ((88, 212), 1, 2),
        ((212, 142, 156), 12, 2),
        ((88, 51, 96, 40, 244, 197, 140), 1, 0),
        ((88, 212, 65, 41, 180, 45), 1, 2),
    )
    return Case(
        family="llama",
        model="llama",
        sessions=tuple(
            Session(prompt=prompt, max_tokens=outputs, priority=priority)
            for prompt, outputs, priority in chosen
        ),
        pool_cells=42,
        num_sequences=12,
        max_num_batched_tokens=2,
        max_num_seqs=4,
        prefix_block_tokens=1,
        policy="sglang_adder",
        policy_options=(("max_extend_tokens", 4),),
    )


@mutant(
    in_method(Memory, "open"),
    part="prefix",
    killers=(Killer.CONTRACT,),
    trials=(exact_trial(_cut_with_nobody_running()),),
)
def another_entry_pinned(original: Callable[..., Any], reach: Reach) -> Callable[..., Any]:
    """A share that is cut short pins whatever entry begins alike, not the one that admission counted."""

    def open_session(self: Memory, view: SessionView, count: int) -> bool:
        lookup = self.prefix.lookup

        def short_lookup(chain: tuple[bytes, ...]) -> tuple[PrefixEntry | None, int]:
            found = lookup(chain[: count + 1])
            if found[0] is not lookup(chain)[0]:
                reach()
            return found

        self.prefix.lookup = short_lookup if count else lookup
        try:
            return original(self, view, count)
        finally:
            self.prefix.lookup = lookup

    return open_session


def many_prompts(family: str, **settings: Any) -> Case:
    """Prompts with nothing in common, one after the other: each leaves a prefix that may be kept."""
    sessions = tuple(cases.session(300 + i, 20, 2, arrival_step=2 * i) for i in range(8))
    return cases.case_of(family, sessions, **{"prefix_block_tokens": 4, **settings})


def kept_without(limit: str, value: int) -> Callable[..., Any]:
    """A fault: entries are kept as if ``limit`` of the cache or the pool were ``value``."""

    def fault(original: Callable[..., Any], reach: Reach) -> Callable[..., Any]:
        def make_room(self: Memory, count: int) -> bool:
            entries = len(self.prefix.entries)
            if limit == "entries":
                most, self.prefix.max_entries = self.prefix.max_entries, value
                kept = original(self, count)
                self.prefix.max_entries = most
                if kept and entries >= most:
                    reach()
                return kept
            resident = sum(entry.count for entry in self.prefix.entries.values())
            if resident + count <= self.total_rows() // 2:
                return original(self, count)
            reach()
            return entries < self.prefix.max_entries and self._free_ids() >= value

        return make_room

    return fault


@mutant(
    lambda _: in_method(Memory, "_make_room_for_entry")(kept_without("entries", 1000)),
    part="prefix",
    killers=(Killer.CONSERVATION,),
    trials=(exact_trial(many_prompts("llama", max_num_seqs=1, num_sequences=16, pool_cells=400)),),
)
def prefixes_without_number() -> None:
    """More than two prefixes a lane are kept."""


@mutant(
    lambda _: in_method(Memory, "_make_room_for_entry")(kept_without("rows", 2)),
    part="prefix",
    killers=(Killer.CONSERVATION,),
    trials=tuple(
        exact_trial(many_prompts(family, num_sequences=16, pool_cells=100))
        for family in ("llama", "qwen3next")
    ),
)
def prefixes_in_the_whole_pool() -> None:
    """Prefixes are kept in more than half of the pool."""
