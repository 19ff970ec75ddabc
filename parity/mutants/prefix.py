"""Mutants of prefix sharing: what is shared, how far, when, and what is forgotten on the way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import scheduler.memory as memory_module
from parity.mutants import cases, sharing_cases
from parity.mutants.cells import ANY_DAMAGE
from parity.mutants.records import Killer, Mutant, Reach
from parity.mutants.rows import DIFFERS, everywhere
from parity.mutants.seam import Change, batch_plant, method_plant
from parity.mutants.trials import exact_trial
from scheduler.engine import Batch, Call, MemoryOp, OpKind
from scheduler.limits import Sharing
from scheduler.memory import Memory
from scheduler.prefix import PrefixCache, PrefixEntry
from scheduler.records import IterationPlan, SessionView


def _one_too_far(original: Callable[..., Any], reach: Reach) -> Callable[..., Any]:
    def lookup(self: PrefixCache, chain: tuple[bytes, ...]) -> tuple[PrefixEntry | None, int]:
        entry, count = original(self, chain)
        if entry is not None and count < min(entry.count, len(chain) - 1):
            reach()
            return entry, count + 1
        return entry, count

    return lookup


def _nothing_left(original: Callable[..., Any], reach: Reach) -> Callable[..., Any]:
    def lookup(self: PrefixCache, chain: tuple[bytes, ...]) -> tuple[PrefixEntry | None, int]:
        entry, count = original(self, (*chain, b""))
        if entry is not None and count == len(chain):
            reach()
        return entry, count

    return lookup


def _whole_prompt_published(original: Callable[..., Any], reach: Reach) -> Callable[..., Any]:
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


def _unchained_digests(original: Callable[..., Any], reach: Reach) -> Callable[..., Any]:
    def digest_chain(model_digest: str, tokens: tuple[int, ...]) -> tuple[bytes, ...]:
        reach()
        return tuple(original(model_digest, (position, token))[-1] for position, token in enumerate(tokens))

    return digest_chain


def _hit_remembered(original: Callable[..., Any], reach: Reach) -> Callable[..., Any]:
    first_answers: dict[tuple[int, str], int] = {}

    def cached_tokens(self: Memory, view: SessionView) -> int:
        now = original(self, view)
        known = first_answers.setdefault((id(self), view.request_id), now)
        if known != now:
            reach()
        return known

    return cached_tokens


def _users_ignored(original: Callable[..., Any], reach: Reach) -> Callable[..., Any]:
    def oldest_idle(self: PrefixCache) -> PrefixEntry | None:
        oldest = next(iter(self.entries.values()), None)
        if oldest is not None and oldest.users:
            reach()
        return oldest

    return oldest_idle


def _hit_counted_as_need(original: Callable[..., Any], reach: Reach) -> Callable[..., Any]:
    def pinned_rows(self: Memory, view: SessionView) -> int:
        pinned, cached = original(self, view), self.cached_tokens(view)
        if cached:
            reach()
        return pinned + cached

    return pinned_rows


def _positional_states(original: Callable[..., Any], reach: Reach) -> Callable[..., Any]:
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


def late_copies() -> Change:
    """A copy is carried out one call late, when its source has gone on."""
    held: list[MemoryOp] = []

    def change(plan: IterationPlan, batch: Batch) -> Batch:
        def late(call: Call) -> Call:
            copies = tuple(op for op in call.ops if op.kind is OpKind.COPY and op.seq_id not in call.seq_ids)
            earlier = tuple(held)
            held[:] = copies
            return replace(call, ops=(*earlier, *(op for op in call.ops if op not in copies)))

        return replace(batch, stages=tuple(tuple(map(late, calls)) for calls in batch.stages))

    return change


def stateless_copies() -> Change:
    """A copy brings the attention cells and leaves the recurrent state behind."""

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


def forgotten_copies() -> Change:
    """The session shares the prefix in the books only: nothing is copied."""

    def change(plan: IterationPlan, batch: Batch) -> Batch:
        def drop(call: Call) -> Call:
            return replace(call, ops=tuple(op for op in call.ops if op.kind is not OpKind.COPY))

        return replace(batch, stages=tuple(tuple(map(drop, calls)) for calls in batch.stages))

    return change


MUTANTS = (
    Mutant(
        name="prefix_shared_one_token_too_far",
        part="prefix",
        killers=DIFFERS,
        plant=method_plant(PrefixCache, "lookup", _one_too_far),
        fault="A follower shares one token more than it has in common with the donor.",
        trials=everywhere(sharing_cases.shared_prefix, cases.ATTENTION),
    ),
    Mutant(
        name="full_hit_leaves_nothing_to_compute",
        part="prefix",
        killers=(Killer.LIVENESS, Killer.CONTRACT, Killer.LEGALITY),
        plant=method_plant(PrefixCache, "lookup", _nothing_left),
        fault="A prompt that is resident as a whole is shared as a whole, so that no row gives logits.",
        trials=tuple(exact_trial(sharing_cases.same_prompt(family)) for family in cases.ATTENTION),
    ),
    Mutant(
        name="prefix_shared_before_it_is_computed",
        part="prefix",
        killers=(Killer.ENGINE, Killer.INTERNAL, *DIFFERS),
        plant=method_plant(Memory, "keep_prefix", _whole_prompt_published),
        fault="A prompt is shareable as a whole as soon as its first chunk is computed.",
        trials=everywhere(sharing_cases.prefix_in_progress, cases.ATTENTION),
    ),
    Mutant(
        name="prefix_identity_without_its_past",
        part="prefix",
        killers=DIFFERS,
        plant=method_plant(memory_module, "digest_chain", _unchained_digests),
        fault="Prefixes are told apart by their last token and length alone.",
        trials=everywhere(sharing_cases.same_ending, cases.ATTENTION),
    ),
    Mutant(
        name="cached_count_from_the_first_lookup",
        part="prefix",
        killers=(Killer.LIVENESS, Killer.LEGALITY, Killer.ENGINE, Killer.INTERNAL),
        plant=method_plant(Memory, "cached_tokens", _hit_remembered),
        fault="The number of cached tokens is looked up while a session waits and used when it runs.",
        trials=tuple(
            exact_trial(sharing_cases.prefix_lost_while_waiting(family)) for family in cases.ATTENTION
        ),
    ),
    Mutant(
        name="entry_in_use_evicted",
        part="prefix",
        killers=(Killer.CONSERVATION,),
        plant=method_plant(PrefixCache, "oldest_idle", _users_ignored),
        fault="Eviction takes an entry that live sessions share.",
        trials=(
            exact_trial(sharing_cases.exhausted_with_sharers("llama")),
            exact_trial(sharing_cases.exhausted_with_sharers("gemma2")),
        ),
    ),
    Mutant(
        name="shared_rows_counted_as_need",
        part="prefix",
        killers=(Killer.LIVENESS, Killer.CONTRACT),
        plant=method_plant(Memory, "pinned_rows", _hit_counted_as_need),
        fault="A follower must find room for the rows that it shares.",
        trials=(
            exact_trial(sharing_cases.full_with_prefix("llama")),
            exact_trial(sharing_cases.full_with_prefix("deepseek2")),
        ),
    ),
    Mutant(
        name="recurrent_share_past_the_boundary",
        part="prefix",
        killers=DIFFERS,
        plant=method_plant(PrefixCache, "lookup", _positional_states),
        fault="A recurrent state is taken for a prefix shorter than the one it was saved at.",
        trials=everywhere(sharing_cases.short_of_the_state, cases.HYBRIDS),
    ),
    Mutant(
        name="recurrent_state_one_token_late",
        part="prefix",
        killers=DIFFERS,
        plant=batch_plant(late_copies),
        fault="A prefix's recurrent state is taken after its donor computed one more token.",
        trials=everywhere(sharing_cases.state_of_a_runner, cases.HYBRIDS),
    ),
    Mutant(
        name="copy_forgets_the_recurrent_state",
        part="prefix",
        killers=(*DIFFERS, Killer.ENGINE),
        plant=batch_plant(stateless_copies),
        fault="The attention part of a prefix hits, the recurrent part misses.",
        trials=everywhere(sharing_cases.shared_prefix, cases.HYBRIDS),
    ),
    Mutant(
        name="copy_forgotten",
        part="prefix",
        killers=(*ANY_DAMAGE, Killer.BYTES),
        plant=batch_plant(forgotten_copies),
        fault="A shared prefix is in the books but not in the engine.",
        trials=everywhere(sharing_cases.shared_prefix),
    ),
)
