"""One model, its engine and its limits, ready to be scheduled: what the server
and the bench both start from.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from parity.engines.chain_processes import ProcessChain
from parity.engines.geometry import ids_per_sequence, spare_ids
from parity.engines.llama import LlamaModel
from parity.engines.numerics import NumericsProfile
from parity.engines.pool import LlamaEngine, PoolContext
from parity.engines.shards import in_shards
from parity.engines.stage import StageSettings
from parity.errors import UsageError
from parity.models import ModelFile, resolve_model
from parity.models.facts import ModelFacts, derive_facts, read_facts
from parity.models.families import Family, load_family
from parity.models.gguf import read_header
from parity.models.memory import Assumptions, binding_component, model_components
from parity.run.profiles import profile_of
from scheduler.limits import LLAMA_MAX_SEQ, Layout, PoolLimits, Sharing, StepLimits
from scheduler.loop import Scheduler
from scheduler.policies import make_policy
from scheduler.policy.base import Policy
from scheduler.policy.plan import MAX_IMBALANCE
from scheduler.telemetry import StepRecord

SPARE_IDS = 2  # at least: padding, and a prefix or a session that has ended


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """What an engine is opened with. ``pool_cells`` counts KV cells over all sessions
    (in ``streams``: per session); ``shards`` divide them, and the threads.

    ``flash_attention`` None takes what the layout's numerics use; anything else is for
    measurements and may not be exact. ``contained`` runs every shard's engine in a process of its own, which
    is started anew when it ends.
    """

    model: str
    layout: Layout = Layout.UNIFIED
    pool_cells: int = 8000
    max_num_seqs: int = 32
    max_num_batched_tokens: int = 2048
    max_chunk_tokens: int = 2048
    max_waiting: int = 256
    state_budget_bytes: int | None = None
    prefix_cache: bool = True
    prefix_block_tokens: int = 16
    policy: str = "fcfs"
    policy_options: tuple[tuple[str, Any], ...] = ()
    kv_type: str = "f16"
    n_threads: int = 2
    flash_attention: bool | None = None
    shards: int = 1
    contained: bool = False

    @property
    def shard_cells(self) -> int:
        """``pool_cells`` of one shard."""
        return self.pool_cells if self.layout is Layout.STREAMS else self.pool_cells // self.shards

    @property
    def shard_lanes(self) -> int:
        """Sessions that one shard can have at once: its part, and what prefixes may draw there."""
        most = self.max_num_seqs
        return most if self.shards == 1 else min(most, -(-most // self.shards) + MAX_IMBALANCE)

    def step_limits(self) -> StepLimits:
        """Limits of a step. Raises ``UsageError``."""
        try:
            return StepLimits(
                max_num_batched_tokens=self.max_num_batched_tokens,
                max_num_seqs=self.max_num_seqs,
                max_chunk_tokens=self.max_chunk_tokens,
                prefix_cache=self.prefix_cache,
                prefix_block_tokens=self.prefix_block_tokens,
                max_waiting=self.max_num_seqs + self.max_waiting,
            )
        except ValueError as error:
            raise UsageError("limits are out of range", why=str(error)) from error


def policy_of(settings: EngineSettings, name: str | None = None) -> Policy:
    """A new policy: the settings' one, or the one that is named, with its defaults. Raises ``UsageError``."""
    name = settings.policy if name is None else name
    options = dict(settings.policy_options) if name == settings.policy else {}
    try:
        return make_policy(name, **options)
    except (TypeError, ValueError) as error:
        raise UsageError("policy cannot be made", where=f"--policy {name}", why=str(error)) from error


class ServedModel:
    """A loaded model with an engine that is configured and idle. Close it when done."""

    def __init__(
        self, settings: EngineSettings, file: ModelFile, family: Family, profile: NumericsProfile
    ) -> None:
        header = read_header(file.path)
        self.settings, self.file, self.family, self.profile = settings, file, family, profile
        self.note_step: Callable[[StepRecord], None] = lambda record: None  # hears of every step
        self.facts: ModelFacts = derive_facts(header)
        template = header.value("tokenizer.chat_template")
        self.chat_template: str | None = template if isinstance(template, str) else None
        self.model = LlamaModel(
            file.path, use_extra_bufts=profile.use_extra_bufts, vocab_only=settings.contained
        )
        self.steps = settings.step_limits()
        streams = settings.layout is Layout.STREAMS
        shadow = family.needs_shadow and not streams
        num_sequences = sequence_count(settings, family, self.facts)
        self.limits = PoolLimits(
            layout=settings.layout,
            num_sequences=num_sequences,
            recurrent=family.is_hybrid,
            num_cells=settings.shard_cells * (num_sequences if streams else 1),
            sharing=sharing_of(settings, family),
            max_call_rows=profile.max_call_rows,
            pad_lone_rows=profile.pad_lone_rows,
            cell_bytes=self.row_bytes(),
        )
        threads = max(1, settings.n_threads // settings.shards)
        pool: dict[str, Any] = {
            "layout": settings.layout,
            "num_sequences": num_sequences,
            "num_cells": settings.shard_cells + 2,
            "shadow": shadow,
            "recurrent": family.is_hybrid,
            "profile": profile,
            "kv_type": settings.kv_type,
            "n_threads": threads,
            "swa_full": family.engine.swa_full,
        }
        # The contexts of this process: none where every engine has a process of its own.
        self.pools: tuple[PoolContext, ...] = ()
        engines: Iterator[LlamaEngine | ProcessChain]
        if settings.contained:
            stage = StageSettings(
                path=str(file.path), index=0, num_stages=1, start=0, stop=self.facts.n_layer, **pool
            )
            engines = (ProcessChain([stage], restarts=True) for _ in range(settings.shards))
        else:
            self.pools = tuple(PoolContext(self.model, **pool) for _ in range(settings.shards))
            engines = map(LlamaEngine, self.pools)
        side_by_side = settings.n_threads // threads
        self.engine = in_shards(settings.shards, lambda: next(engines), num_threads=side_by_side)
        self.engine.configure(self.limits)

    @property
    def max_session_tokens(self) -> int:
        """Prompt and output together: the last token of an output needs no cell."""
        return self.limits.max_session_rows + 1

    def make_scheduler(
        self,
        *,
        observer: Callable[..., None] | None = None,
        policy: str | None = None,
        prefix_cache: bool | None = None,
    ) -> Scheduler:
        """A scheduler over the engine, which must be idle: its memory is cleared. ``policy`` and
        ``prefix_cache`` replace the settings' ones. Raises ``UsageError``.
        """
        chosen = policy_of(self.settings, policy)
        try:
            chosen.check_limits(self.steps, max_session_tokens=self.max_session_tokens)
        except ValueError as error:
            raise UsageError("policy cannot be made", why=str(error)) from error
        steps = self.steps if prefix_cache is None else replace(self.steps, prefix_cache=prefix_cache)
        self.engine.configure(self.limits)
        return Scheduler(self.engine, chosen, steps, model_digest=self.file.sha256, observer=observer)

    def row_bytes(self) -> int:
        """Bytes of one token's cells over all layers; gemma2's window caches
        are as large as the full ones.
        """
        kv_type = self.settings.kv_type
        return self.facts.attention_cell_bytes(kv_type) + self.facts.window_cell_bytes(kv_type)

    def close(self) -> None:
        self.engine.close()
        self.model.close()


def sequence_count(settings: EngineSettings, family: Family, facts: ModelFacts) -> int:
    """Sequence ids of the context: one a lane, and more for padding, resident prefixes and retired sessions.

    An id costs nothing in attention families; in recurrent ones it costs a state, so they get few. Raises
    ``UsageError`` when a component of memory does not allow so many lanes, and names it.
    """
    lanes, streams = settings.shard_lanes, settings.layout is Layout.STREAMS
    budget = settings.state_budget_bytes
    empty = spare_ids(family.is_hybrid)
    per_session = ids_per_sequence(family.needs_shadow and not streams)
    assumed = Assumptions(
        pool_cells=settings.shard_cells * (LLAMA_MAX_SEQ if streams else 1),
        floor_tokens=1,
        num_sequences=LLAMA_MAX_SEQ,
        reserved_ids=empty + (0 if streams else SPARE_IDS),
        ids_per_session=per_session,
        kv_type=settings.kv_type,
        state_budget_bytes=None if budget is None else budget // settings.shards,
    )
    components = {component.name: component for component in model_components(facts, assumed)}
    binding = binding_component([*components.values()])
    if lanes > binding.sessions:
        raise UsageError(
            f"{lanes} sessions at once",
            where="--max-num-seqs",
            why=f"the {binding.name} of {settings.model} allow {binding.sessions}: {binding.why}",
            todo=f"use at most {binding.sessions}" if binding.sessions else "give more memory",
        )
    if streams:
        return lanes
    most = components["sequence ids"].units // per_session
    return min(components["recurrent slots"].units - empty, 3 * lanes + 8) if empty else most


def sharing_of(settings: EngineSettings, family: Family) -> Sharing:
    """What a prefix hit can give in this layout and family."""
    if not settings.prefix_cache:
        return Sharing.NONE
    if settings.layout is Layout.STREAMS or family.shares_whole_states:
        return Sharing.WHOLE_STATE
    return Sharing.POSITIONAL


def open_served(settings: EngineSettings) -> ServedModel:
    """Resolve, choose numerics, set the process's environment, load. Raises ``UsageError``.

    llama.cpp reads the environment at its first product, so a process serves models of one environment only.
    """
    if settings.shard_cells < 2:
        shards = f" in {settings.shards} shards" if settings.shards > 1 else ""
        raise UsageError(
            f"pool of {settings.pool_cells} cells{shards}", todo=f"use at least {2 * settings.shards}"
        )
    settings.step_limits()
    policy_of(settings)  # a bad one is known before anything is loaded
    file = resolve_model(settings.model)
    family = load_family(file.family)
    sequence_count(settings, family, read_facts(file.path))
    profile = profile_of(settings.model).profile.for_layout(settings.layout)
    if settings.flash_attention is not None:
        profile = replace(profile, flash_attention=settings.flash_attention)
    apply_environment(profile)
    return ServedModel(settings, file, family, profile)


_applied: list[tuple[tuple[str, str], ...]] = []


def apply_environment(profile: NumericsProfile) -> None:
    """Set what the profile asks for. Raises ``UsageError`` if this process already
    runs under another environment.
    """
    if _applied and _applied[0] != profile.environment:
        raise UsageError(
            "this process runs under another numerics environment",
            why=f"{dict(_applied[0])} is set, the model needs {dict(profile.environment)}",
            todo="start another process",
        )
    if not _applied:
        os.environ.update(profile.environment)
        _applied.append(profile.environment)
