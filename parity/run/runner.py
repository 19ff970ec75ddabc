"""The only composer: a case becomes an engine, a scheduler, a run, answers of the oracle, and a verdict.

``Runner`` works in the process that it is in; ``parity.run.contained.run_case`` does the same in
a worker process that may die.
"""

from __future__ import annotations

import functools
import hashlib
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol

from parity.checkers.checker import Alone
from parity.checkers.ends import ENGINE_FAULTS
from parity.engines.chain_processes import ProcessChain
from parity.engines.exact import EngineAbort, ExactEngine, ExactModel, expected_tokens, hidden_stops
from parity.engines.geometry import round_cells
from parity.engines.llama import LlamaModel
from parity.engines.numerics import ROW, NumericsProfile
from parity.engines.pool import LlamaEngine, PoolContext, SamplingEngine
from parity.engines.sampling import logits_digest
from parity.engines.shards import ShardedEngine, cores, in_shards
from parity.engines.stage import StageSettings
from parity.errors import UsageError
from parity.history import Answer, Run, session_index
from parity.models import ModelFile, resolve_model
from parity.models.facts import KV_VALUE_BYTES
from parity.models.families import Family, load_family
from parity.protocol.schedulers import IntervalScheduler, PlacingScheduler
from parity.records import Case, Fault, FaultKind, Outcome, broken_outcome, crashed_outcome, outcome_to_data
from parity.run.chains import STREAM_SEQUENCES, StageChains
from parity.run.drive import Driver
from parity.run.faults import full_disk, inject_fault, needs_own_process
from parity.run.judge import LogitsRecorder, OracleAnswers, judge
from parity.run.oracle import Oracle
from parity.run.under_test import OBSERVED, Brought, Exhaustible, SchedulerFactory, solo_by
from scheduler.engine import Engine
from scheduler.limits import Layout, PoolLimits, Sharing
from scheduler.loop import Scheduler
from scheduler.policies import make_policy, option_types
from scheduler.policy.base import Policy
from scheduler.records import Request


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
        self._engines: dict[tuple, LlamaEngine | ProcessChain | ShardedEngine] = {}
        self._oracles: dict[tuple, Oracle] = {}
        self.chains = StageChains(n_threads=n_threads, in_processes=stage_processes)

    # -- what is kept

    def model(self, file: ModelFile, profile: NumericsProfile) -> LlamaModel:
        key = (file.sha256, profile.use_extra_bufts)
        if key not in self._models:
            self._models[key] = LlamaModel(file.path, use_extra_bufts=profile.use_extra_bufts)
        return self._models[key]

    def engine(
        self, case: Case, file: ModelFile, family: Family, profile: NumericsProfile
    ) -> SamplingEngine | ShardedEngine:
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
            num_sequences = max(family.most_sequences, case.num_sequences)
            num_cells = max(settings.n_ctx, case.pool_cells + 2)
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
        key = (file.sha256, profile, case.layout, case.kv_type, num_sequences, num_cells, alone, case.shards)
        if key not in self._engines and alone:
            stage = StageSettings(
                path=str(file.path),
                index=0,
                num_stages=1,
                start=0,
                stop=self.model(file, profile).n_layer,
                **pool,
            )
            self._engines[key] = in_shards(case.shards, lambda: ProcessChain([stage], restarts=True))
        elif key not in self._engines:
            model = self.model(file, profile)
            self._engines[key] = in_shards(
                case.shards,
                lambda: LlamaEngine(PoolContext(model, **pool)),
                num_threads=cores() // self.n_threads,
            )
        return self._engines[key]

    def oracle(self, case: Case, file: ModelFile, family: Family, profile: NumericsProfile) -> Oracle:
        """The oracle of a case: the case's kernels; for ``stock``, which has
        none that are exact, row numerics.
        """
        longest = max(len(s.prompt) + s.max_tokens for s in case.sessions)
        n_ctx = 1024 if 2 * longest < 1000 else round_cells(2 * longest + 64)
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
        engine: SamplingEngine | ShardedEngine,
        family: Family,
        profile: NumericsProfile,
        file: ModelFile,
        make_scheduler: SchedulerFactory = Scheduler,
    ) -> Run:
        """Run a case once on an idle engine."""
        whole = pool_limits(case, family, profile)
        engine.configure(*((whole,) if case.split is None else self.chains.limits(case, file, whole)))
        recorder = LogitsRecorder()
        engine.observe_logits = recorder

        def inject(fault: Fault) -> bool:
            return inject_fault(engine, fault, split=case.split is not None)

        try:
            scheduler = make_scheduler(engine, policy_of(case), case.step_limits(), model_digest=file.sha256)
            run = drive_and_close(Driver(case, scheduler, engine, inject))
        finally:
            engine.observe_logits, engine.fail_before_call = None, None
        left = engine.leftover_sequences()
        run.leftovers = f"sequences {left} still hold cells" if left else ""
        run.lost = getattr(engine, "lost", "")
        return observed(run, recorder)

    def run(
        self, case: Case, profile: NumericsProfile, make_scheduler: SchedulerFactory = Scheduler
    ) -> Outcome:
        """``run_twice`` on llama.cpp."""
        return run_twice(LlamaSystem(self, profile, make_scheduler), case)


# -- One runner over every system under test.


class System(Protocol):
    """What serves a case: a scheduler and an engine, ours or brought."""

    def attempt(self, case: Case) -> Run:
        """Run the case once on an idle engine."""

    def alone(self, case: Case) -> Alone:
        """What each of its sessions gives alone."""


def run_twice(system: System, case: Case) -> Outcome:
    """Run a case twice, judge it against each session alone, and say what it came to."""
    first = system.attempt(case)
    second = system.attempt(case) if not was_lost(first) else first
    if lost := was_lost(first) or was_lost(second):
        return crashed_outcome(case, lost)
    with full_disk(any(fault.kind is FaultKind.DISK_FULL for fault in first.fired)):
        return judge(case, first, second, system.alone(case))


def was_lost(run: Run) -> str:
    """Which stage ended, and how, although nobody asked for it."""
    asked = any(fault.kind is FaultKind.STAGE_LOST for fault in run.fired)
    return "" if asked else run.lost


def policy_of(case: Case) -> Policy:
    """A new policy as the case names it."""
    return make_policy(case.policy, **dict(case.policy_options))


def drive_and_close(driver: Driver) -> Run:
    """A driver's run; a scheduler that holds a process ends it then."""
    try:
        return driver.drive()
    finally:
        if isinstance(driver.scheduler, (IntervalScheduler, PlacingScheduler)):
            driver.scheduler.close()


def observed(run: Run, recorder: LogitsRecorder) -> Run:
    """The run with its answers, and the rows that its engine showed."""
    run.logits = {index: recorder.rows(index) for index in sorted(run.completions)}
    run.answers = {
        index: Answer(end.tokens, tuple(map(logits_digest, run.logits[index])))
        for index, end in sorted(run.completions.items())
    }
    return run


@dataclass(frozen=True, slots=True)
class LlamaSystem:
    """A scheduler on llama.cpp: one context, or a chain of stages where the case names a split."""

    runner: Runner
    profile: NumericsProfile
    make_scheduler: SchedulerFactory = Scheduler

    def attempt(self, case: Case) -> Run:
        family, file, profile = self._made_of(case)
        engine = self.runner.engine(case, file, family, profile)
        return self.runner.attempt(case, engine, family, profile, file, self.make_scheduler)

    def alone(self, case: Case) -> OracleAnswers:
        family, file, profile = self._made_of(case)
        profile = self.profile if case.layout is Layout.STOCK else profile
        return OracleAnswers(case, self.runner.oracle(case, file, family, profile))

    def _made_of(self, case: Case) -> tuple[Family, ModelFile, NumericsProfile]:
        return known_family(case.family), known_model(case.model), self.profile.for_layout(case.layout)


# -- in a worker process


@functools.cache
def process_runner(n_threads: int, stage_processes: bool = False) -> Runner:
    """The runner of this process."""
    return Runner(n_threads=n_threads, stage_processes=stage_processes)


def run_case_here(arguments: dict[str, Any]) -> dict[str, Any]:
    """Entry point of the worker: JSON in, JSON out."""
    case = Case.from_json(arguments["case"])
    profile = NumericsProfile.from_json(arguments["profile"])
    brought = brought_of(arguments)
    runner = process_runner(arguments.get("n_threads", 1), arguments.get("stage_processes", False))
    return outcome_to_data(runner.run(case, profile, brought.scheduler_factory))


def brought_of(arguments: Mapping[str, Any]) -> Brought:
    """The brought parts that the arguments of a worker's entry point name."""
    return Brought(**{part.name: arguments.get(part.name) for part in fields(Brought)})


def check_settings(case: Case) -> None:
    """Refuse a case that no engine can run. Raises ``UsageError``."""
    try:
        if not case.sessions:
            raise ValueError("it has no sessions")
        if case.kv_type not in KV_VALUE_BYTES:
            raise ValueError(f"unknown kv_type {case.kv_type!r}; known: {', '.join(KV_VALUE_BYTES)}")
        limits = pool_limits(case, known_family(case.family), ROW.for_layout(case.layout))
        policy = make_policy(case.policy, **dict(case.policy_options))
        policy.check_limits(case.step_limits(), max_session_tokens=limits.max_session_rows + 1)
    except (TypeError, ValueError) as error:
        raise UsageError("case cannot be run", why=str(error)) from error


def check_case(case: Case) -> None:
    """Refuse a case that llama.cpp cannot run at all. Raises ``UsageError``."""
    if case.stage_cells and case.split is None:
        raise UsageError("stage_cells", where="case", why="no split is named", todo="name one")
    check_settings(case)
    family = known_family(case.family)
    if case.layout is not Layout.STREAMS:
        most = family.most_sequences
        if case.num_sequences > most:
            raise UsageError(
                f"{case.num_sequences} sequences",
                where="case",
                why=f"family {family.name} has {most}",
                todo="lower num_sequences",
            )


# -- Runs a case on the exact engine: no model, no process, the same driver and the
# same checkers, in milliseconds.

EXACT_VOCABULARY = 1 << 30  # so that a wrong row is a wrong token: two digests agree once in a billion
EXACT_WINDOW = 8


def exact_model(case: Case) -> ExactModel:
    """What the sessions of a case see on the exact engine."""
    family = known_family(case.family)
    window = EXACT_WINDOW if family.needs_shadow else None
    return ExactModel(window=window, recurrent=family.is_hybrid, vocabulary=EXACT_VOCABULARY)


def exact_limits(case: Case) -> tuple[PoolLimits, ...]:
    """Limits of a case's pools, one per stage; ``stage_cells`` gives the number of stages and their sizes."""
    limits = pool_limits(case, known_family(case.family), ROW.for_layout(case.layout))
    return tuple(replace(limits, num_cells=cells) for cells in case.stage_cells) or (limits,)


def expected_answers(case: Case) -> dict[int, Answer]:
    """What each session gives alone; a token's digest is the token itself."""
    return {index: exact_solo(case, index) for index in range(len(case.sessions))}


def exact_solo(case: Case, index: int) -> Answer:
    """What one session gives alone, by the definition."""
    session = case.sessions[index]
    tokens = expected_tokens(
        exact_model(case),
        session.prompt,
        session.max_tokens,
        request_id=f"s{index}",
        sampling=session.sampling,
        stop_token_ids=session.stop_token_ids,
        stop=hidden_stops(case.sessions).get(f"s{index}"),
        stages=max(1, len(case.stage_cells)),
    )
    return exact_answer(tokens)


def exact_answer(tokens: tuple[int, ...]) -> Answer:
    """Tokens of the exact engine as an answer: a wrong logit and a wrong token are the same thing."""
    return Answer(tokens, tuple(map(str, tokens)))


@dataclass(frozen=True, slots=True)
class AnswersOf:
    """``Alone`` of an engine without logits to compare: ``of`` gives a session's answer."""

    of: Callable[[int], Answer]

    def answer(self, session: int) -> Answer:
        return self.of(session)

    def margin(self, session: int, step: int) -> float:
        return 0.0

    def logits(self, session: int) -> Sequence:
        return ()


class ExactSystem:
    """Our scheduler on the exact engine."""

    def attempt(self, case: Case) -> Run:
        engine = exact_engine(case)
        run = drive_exact(case, engine)
        shards = engine.shards if isinstance(engine, ShardedEngine) else (engine,)
        used = sum(pool.num_used() for shard in shards for pool in shard.pools)
        if used and not run.findings:
            run.leftovers = f"{used} cells still have an owner"
        return run

    def alone(self, case: Case) -> AnswersOf:
        return AnswersOf(functools.partial(exact_solo, case))


def exact_engine(case: Case, **options: Any) -> ExactEngine | ShardedEngine:
    """A new exact engine for a case."""
    limits, model, stops = exact_limits(case), exact_model(case), hidden_stops(case.sessions)
    return in_shards(case.shards, lambda: ExactEngine(limits, model, stops=stops, **options))


def drive_exact(case: Case, engine: ExactEngine | ShardedEngine, scheduler: Scheduler | None = None) -> Run:
    """One run of a case on an idle engine, under the scheduler that was made for it."""
    if scheduler is None:
        scheduler = Scheduler(engine, policy_of(case), case.step_limits())

    def inject(fault: Fault) -> bool:
        if fault.kind in ENGINE_FAULTS:
            engine.fail_before_call = fault.call
            return True
        return False

    run = Driver(case, scheduler, engine, inject).drive()
    run.answers = {index: exact_answer(end.tokens) for index, end in sorted(run.completions.items())}
    return run


def run_exact_case(case: Case) -> Outcome:
    """``run_twice`` on the exact engine, contained: a call that would abort llama.cpp is an outcome
    (``crashed``), and so is an exception of the scheduler.
    """
    try:
        return run_twice(ExactSystem(), case)
    except EngineAbort as abort:
        return crashed_outcome(case, str(abort))
    except Exception as error:  # a bug of ours is what a case came to, not the end of the run
        return broken_outcome(case, f"{type(error).__name__}: {error}", stderr=traceback.format_exc())


# -- Runs a case on an engine that a user brings: no model of ours; the truth is the same engine, alone.


def run_own_engine_here(arguments: dict[str, Any]) -> dict[str, Any]:
    """Entry point of the worker: JSON in, JSON out."""
    brought = brought_of(arguments)
    return outcome_to_data(run_own_engine_case(Case.from_json(arguments["case"]), brought))


def run_own_engine_case(case: Case, brought: Brought) -> Outcome:
    """``run_twice`` on an engine that a user brings.

    Logits are compared where the engine shows them; elsewhere no session counts as bit-identical.
    """
    return run_twice(BroughtSystem(brought), case)


@dataclass(frozen=True, slots=True)
class BroughtSystem:
    """A user's engine under ours or a user's scheduler; each run and each answer alone on a new engine."""

    brought: Brought

    def attempt(self, case: Case) -> Run:
        recorder = LogitsRecorder()
        engine = Exhaustible(observe(self.brought.engine_factory(exact_limits(case)), recorder))

        def inject(fault: Fault) -> bool:
            engine.breaks = engine.breaks or fault.kind in ENGINE_FAULTS
            return fault.kind in ENGINE_FAULTS

        make_scheduler = self.brought.scheduler_factory
        scheduler = make_scheduler(engine, policy_of(case), case.step_limits(), model_digest="")
        return observed(drive_and_close(Driver(case, scheduler, engine, inject)), recorder)

    def alone(self, case: Case) -> AnswersOf:
        limits = exact_limits(case)

        def answer(index: int) -> Answer:
            return solo(self.brought, limits, case.sessions[index].to_request(index, arrival_ms=0.0))

        return AnswersOf(answer)


@functools.lru_cache(maxsize=4096)
def solo(brought: Brought, limits: tuple[PoolLimits, ...], request: Request) -> Answer:
    """What a session gives alone, on an engine of its own under our scheduler."""
    recorder = LogitsRecorder()
    tokens = solo_by(lambda limits: observe(brought.engine_factory(limits), recorder))(limits, request)
    return Answer(tokens, tuple(map(logits_digest, recorder.rows(session_index(request.request_id)))))


def observe(engine: Engine, recorder: LogitsRecorder) -> Engine:
    """The engine, its logits recorded if it shows them."""
    if hasattr(engine, OBSERVED):
        setattr(engine, OBSERVED, recorder)
    return engine


# -- Replays a case on the exact engine under a virtual clock: each step takes ``case.ms_per_step``.
#
# Contracts live here.


@dataclass(frozen=True, slots=True)
class Replay:
    """A run and the scheduler that it left behind, with the policy's memory in it."""

    run: Run
    scheduler: Scheduler

    @property
    def outputs(self) -> dict[int, tuple[int, ...]]:
        """Tokens of every session that ended, by session."""
        return {index: end.tokens for index, end in sorted(self.run.completions.items())}

    @property
    def schedule(self) -> list[tuple]:
        """Who ran which interval in which step, and every intent: what policies differ in."""
        return [
            (
                traced.step,
                tuple((c.request_id, c.start, c.stop) for c in traced.flight.plan.chunks),
                tuple((i.kind.value, i.request_id) for i in traced.flight.plan.intents),
            )
            for traced in self.run.trace
        ]

    @property
    def digest(self) -> str:
        """One line for the whole schedule and all outputs: equal in every process."""
        return hashlib.blake2b(repr((self.schedule, self.outputs)).encode(), digest_size=16).hexdigest()


def replay(case: Case, policy: Policy | None = None, make: Callable[[Case], Policy] | None = None) -> Replay:
    """Run a case once; ``policy`` or ``make`` takes the place of the policy that the case names."""
    engine = exact_engine(case, duration_ms=lambda batch: case.ms_per_step)
    if policy is None:
        policy = (policy_of if make is None else make)(case)
    scheduler = Scheduler(engine, policy, case.step_limits())
    return Replay(drive_exact(case, engine, scheduler), scheduler)


BASELINE = "fcfs"


def policy_mattered(case: Case, played: Replay | None = None) -> bool:
    """Whether the policy of a case, with the case's options, plans it otherwise than fcfs with the same
    reservation and overload, on the exact engine, where both are given the same tokens. ``played``: the
    case's replay, if there is one.
    """
    seams = tuple(item for item in case.policy_options if item[0] in option_types(BASELINE))
    plain = replace(case, policy=BASELINE, policy_options=seams)
    return case.policy != BASELINE and (played or replay(case)).schedule != replay(plain).schedule
