"""The only composer: a case becomes an engine, a scheduler, a run, answers of the oracle, and a verdict.

``Runner`` works in the process that it is in; ``parity.contained.run_case`` does the same in
a worker process that may die.
"""

from __future__ import annotations

import functools
from typing import Any

from parity.drive import Driver
from parity.engines.llama import LlamaModel
from parity.engines.pool import LlamaEngine, PoolContext, SamplingEngine
from parity.engines.remote import RemoteEngine
from parity.engines.stages_build import StageChains
from parity.errors import UsageError
from parity.families import Family, load_family
from parity.faults import full_disk, inject_fault, needs_own_process
from parity.judge import Attempt, LogitsRecorder, judge
from parity.models import ModelFile, resolve_model
from parity.models.facts import KV_VALUE_BYTES
from parity.numerics import ROW, NumericsProfile
from parity.oracle import Oracle
from parity.plugins import Brought, SchedulerFactory
from parity.records import Case, Fault, FaultKind, Outcome, Verdict, outcome_to_data
from scheduler.limits import Layout, PoolLimits, Sharing
from scheduler.loop import Scheduler
from scheduler.policies import make_policy

STREAM_SEQUENCES = 20


def pool_limits(case: Case, family: Family, profile: NumericsProfile) -> PoolLimits:
    """The scheduler's limits for a case's pool under a profile."""
    streams = case.layout is Layout.STREAMS
    sharing = Sharing.WHOLE_STATE if streams or family.shares_whole_states else Sharing.POSITIONAL
    return PoolLimits(
        layout=case.layout,
        num_sequences=case.num_sequences,
        recurrent=family.is_hybrid,
        num_cells=case.pool_cells * (case.num_sequences if streams else 1),
        sharing=sharing if case.prefix_cache else Sharing.NONE,
        max_call_rows=profile.max_call_rows,
        pad_lone_rows=profile.pad_lone_rows,
    )


known_family = functools.cache(load_family)
known_model = functools.cache(resolve_model)  # verified once per process


class Runner:
    """Keeps models, contexts and oracles of one process between cases, so
    that a case costs only its steps.
    """

    def __init__(self, *, n_threads: int = 1, remember: bool = True, stage_processes: bool = False) -> None:
        self.n_threads, self.remember = n_threads, remember
        self._models: dict[tuple, LlamaModel] = {}
        self._engines: dict[tuple, LlamaEngine | RemoteEngine] = {}
        self._oracles: dict[tuple, Oracle] = {}
        self.chains = StageChains(n_threads=n_threads, in_processes=stage_processes)

    # -- what is kept

    def model(self, file: ModelFile, profile: NumericsProfile) -> LlamaModel:
        key = (file.sha256, profile.use_extra_bufts)
        if key not in self._models:
            self._models[key] = LlamaModel(file.path, use_extra_bufts=profile.use_extra_bufts)
        return self._models[key]

    def engine(self, case: Case, file: ModelFile, family: Family, profile: NumericsProfile) -> SamplingEngine:
        """The engine of a case, its contexts large enough for the family's engine settings or the case."""
        if case.split is not None:
            return self.chains.chain(case, file, family, profile, pool_limits(case, family, profile))
        shadow = family.needs_shadow and case.layout is not Layout.STREAMS
        settings = family.engine
        if case.layout is Layout.STREAMS:
            num_sequences, num_cells = (
                max(STREAM_SEQUENCES, case.num_sequences),
                max(512, case.pool_cells + 1),
            )
        else:
            most = settings.n_seq_max // (2 if shadow else 1) - (1 if family.is_hybrid else 0)
            num_sequences, num_cells = max(most, case.num_sequences), max(settings.n_ctx, case.pool_cells + 2)
        pool = {
            "layout": case.layout,
            "num_sequences": num_sequences,
            "num_cells": num_cells,
            "shadow": shadow,
            "recurrent": family.is_hybrid,
            "profile": profile,
            "kv_type": case.kv_type,
            "n_threads": self.n_threads,
            "swa_full": settings.swa_full,
        }
        alone = needs_own_process(case)
        key = (file.sha256, profile, case.layout, case.kv_type, num_sequences, num_cells, alone)
        if key not in self._engines and alone:
            bufts = profile.use_extra_bufts
            self._engines[key] = RemoteEngine(file.path, use_extra_bufts=bufts, settings=pool)
        elif key not in self._engines:
            self._engines[key] = LlamaEngine(PoolContext(self.model(file, profile), **pool))
        return self._engines[key]

    def oracle(self, case: Case, file: ModelFile, family: Family, profile: NumericsProfile) -> Oracle:
        """The oracle of a case: the case's kernels; for ``stock``, which has
        none that are exact, row numerics.
        """
        longest = max(len(s.prompt) + s.max_tokens for s in case.sessions)
        n_ctx = 1024 if 2 * longest < 1000 else -(-(2 * longest + 64) // 256) * 256
        key = (file.sha256, profile, case.kv_type, n_ctx)
        if key not in self._oracles:
            self._oracles[key] = Oracle(
                self.model(file, profile),
                file.sha256,
                profile,
                shadow=family.needs_shadow,
                kv_type=case.kv_type,
                n_ctx=n_ctx,
                remember=self.remember,
            )
        return self._oracles[key]

    # -- running

    def attempt(
        self,
        case: Case,
        engine: SamplingEngine,
        family: Family,
        profile: NumericsProfile,
        file: ModelFile,
        make_scheduler: SchedulerFactory = Scheduler,
    ) -> Attempt:
        """Run a case once on an idle engine."""
        whole = pool_limits(case, family, profile)
        engine.configure(*((whole,) if case.split is None else self.chains.limits(case, file, whole)))
        recorder = LogitsRecorder()
        engine.observe_logits = recorder
        policy = make_policy(case.policy, **dict(case.policy_options))

        def inject(fault: Fault) -> bool:
            return inject_fault(engine, fault, split=case.split is not None)

        try:
            scheduler = make_scheduler(engine, policy, case.step_limits(), model_digest=file.sha256)
            run = Driver(case, scheduler, engine, inject).drive()
        finally:
            engine.observe_logits, engine.fail_before_call = None, None
        return Attempt(run, recorder, engine.leftover_sequences(), getattr(engine, "lost", ""))

    def run(
        self, case: Case, profile: NumericsProfile, make_scheduler: SchedulerFactory = Scheduler
    ) -> Outcome:
        """Run a case twice, judge it against the oracle, and say what it came to."""
        family, file = known_family(case.family), known_model(case.model)
        layout_profile = profile.for_layout(case.layout)
        engine = self.engine(case, file, family, layout_profile)
        attempts = []
        for _ in range(2):
            attempt = self.attempt(case, engine, family, layout_profile, file, make_scheduler)
            if attempt.lost and not any(fault.kind is FaultKind.STAGE_LOST for fault in attempt.run.fired):
                return Outcome(case=case, verdict=Verdict.FAIL, crashed=True, reason=attempt.lost)
            attempts.append(attempt)
        first, second = attempts
        oracle_profile = profile if case.layout is Layout.STOCK else layout_profile
        oracle = self.oracle(case, file, family, oracle_profile)
        with full_disk(any(fault.kind is FaultKind.DISK_FULL for fault in first.run.fired)):
            return judge(case, first, second, oracle)


# -- in a worker process


@functools.cache
def process_runner(n_threads: int, stage_processes: bool = False) -> Runner:
    """The runner of this process."""
    return Runner(n_threads=n_threads, stage_processes=stage_processes)


def run_case_here(arguments: dict[str, Any]) -> dict[str, Any]:
    """Entry point of the worker: JSON in, JSON out."""
    case = Case.from_json(arguments["case"])
    profile = NumericsProfile.from_json(arguments["profile"])
    brought = Brought(scheduler=arguments.get("scheduler"))
    runner = process_runner(arguments.get("n_threads", 1), arguments.get("stage_processes", False))
    return outcome_to_data(runner.run(case, profile, brought.scheduler_factory))


def check_settings(case: Case) -> None:
    """Refuse a case that no engine can run. Raises ``UsageError``."""
    try:
        if not case.sessions:
            raise ValueError("it has no sessions")
        if case.kv_type not in KV_VALUE_BYTES:
            raise ValueError(f"unknown kv_type {case.kv_type!r}; known: {', '.join(KV_VALUE_BYTES)}")
        pool_limits(case, known_family(case.family), ROW.for_layout(case.layout))
        make_policy(case.policy, **dict(case.policy_options))
    except (TypeError, ValueError) as error:
        raise UsageError("case cannot be run", why=str(error)) from error


def check_case(case: Case) -> None:
    """Refuse a case that llama.cpp cannot run at all. Raises ``UsageError``."""
    if case.stage_cells and case.split is None:
        raise UsageError("stage_cells", where="case", why="no split is named", todo="name one")
    check_settings(case)
    family = known_family(case.family)
    if case.layout is not Layout.STREAMS:
        most = family.engine.n_seq_max // (2 if family.needs_shadow else 1) - (1 if family.is_hybrid else 0)
        if case.num_sequences > most:
            raise UsageError(
                f"{case.num_sequences} sequences",
                where="case",
                why=f"family {family.name} has {most}",
                todo="lower num_sequences",
            )
