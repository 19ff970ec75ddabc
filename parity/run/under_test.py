"""What users bring: ``package.module:factory``, from ``--engine`` and ``--scheduler``.

An engine factory takes the limits of its pools, one per stage, and returns an idle engine
(``scheduler.engine.Engine``); it is called for every case and every answer alone, so keep what is
costly between calls. A scheduler factory takes what ``scheduler.loop.Scheduler`` takes (an engine, a
policy, ``scheduler.limits.StepLimits`` and ``model_digest=""``) and returns what that class offers:
``begin`` gives a ``Flight`` whose batch the caller runs, ``finish`` and ``fail`` give the step's
``StepRecord``, from which marks are counted.
"""

from __future__ import annotations

import functools
import importlib
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import click

from parity.cases.files import brought_parts
from parity.engines.exact import ExactEngine
from parity.errors import UsageError
from parity.protocol.schedulers import PeerFailure, make_process_scheduler, open_peer
from parity.records import Tier
from scheduler.engine import Batch, Engine, EngineFailure, MemoryOp
from scheduler.limits import PoolLimits, StepLimits
from scheduler.loop import Scheduler
from scheduler.policies import make_policy
from scheduler.records import IterationPlan, IterationResult, Request

SoloAnswer = Callable[[tuple[PoolLimits, ...], Request], tuple[int, ...]]


class Exhaustible:
    """An engine whose next step can be made to break off: after the engine ran
    it, so that memory is in doubt.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine, self.limits = engine, engine.limits
        self.breaks = False

    def execute(self, plan: IterationPlan, batch: Batch, now_ms: float) -> IterationResult:
        result = self.engine.execute(plan, batch, now_ms)
        if self.breaks:
            self.breaks = False
            raise EngineFailure("exhausted: an injected failure")
        return result

    def apply(self, stages: Sequence[Sequence[MemoryOp]]) -> None:
        self.engine.apply(stages)


def solo_by(engine_factory: EngineFactory) -> SoloAnswer:
    """An oracle for engines that have none: the session alone, in one call a step, on a fresh engine."""
    answers: dict[tuple, tuple[int, ...]] = {}

    def answer(limits: tuple[PoolLimits, ...], request: Request) -> tuple[int, ...]:
        key = (limits, request)
        if key not in answers:
            scheduler = Scheduler(engine_factory(limits), make_policy("fcfs"), StepLimits(prefix_cache=False))
            if scheduler.submit(request, 0.0) is not None:
                raise AssertionError(f"solo of {request} was refused")
            for _ in range(4 * request.num_rows):
                if scheduler.is_idle:
                    break
                scheduler.step(0.0)
            answers[key] = scheduler.take_completions()[0].tokens
        return answers[key]

    return answer


EngineFactory = Callable[[tuple[PoolLimits, ...]], Engine]
SchedulerFactory = Callable[..., Scheduler]

ENGINE_OFFERS = ("limits", "execute", "apply")
SCHEDULER_OFFERS = (
    "submit",
    "cancel",
    "preempt",
    "step",
    "begin",
    "finish",
    "fail",
    "take_completions",
    "is_idle",
)
# An engine with this attribute calls what is put there for each sampled row: request id, position of the new
# token, logits float32 [n_vocab].
OBSERVED = "observe_logits"


def load_factory(specification: str) -> Callable[..., Any]:
    """The callable named by ``package.module:name``. Raises ``UsageError`` saying which part is wrong."""
    module_name, colon, name = specification.partition(":")
    if not colon or not module_name or not name:
        raise UsageError(
            f"{specification!r} names no factory",
            why="it must be written package.module:factory",
            todo="for instance tests.machine.examples:make_engine",
        )
    if os.getcwd() not in sys.path:  # a script's path begins at the script, a caller's package lies here
        sys.path.append(os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # whatever the module raises when it is imported is the caller's to mend
        raise UsageError(
            f"module {module_name!r} cannot be imported",
            where=specification,
            why=f"{type(error).__name__}: {error}",
            todo="install it, or run where it can be imported",
        ) from error
    factory = getattr(module, name, None)
    if factory is None:
        raise UsageError(
            f"module {module_name!r} has no {name!r}",
            where=specification,
            todo="name a function of that module",
        )
    if not callable(factory):
        raise UsageError(
            f"{name!r} is a {type(factory).__name__}, not a factory",
            where=specification,
            todo="name a function or a class",
        )
    return factory


def check_offers(made: object, offers: tuple[str, ...], *, specification: str) -> None:
    """Raise ``UsageError`` unless a factory's product has every attribute that the protocol names."""
    missing = [name for name in offers if not hasattr(made, name)]
    if missing:
        raise UsageError(
            f"{type(made).__name__} lacks {', '.join(missing)}",
            where=specification,
            todo="see scheduler/engine.py for the two protocols",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What a scheduler declares that it can do. A factory in Python declares it by an attribute
    ``capabilities``, a process in its ``ready``; what is declared as absent must not be seen either.
    """

    prefix_cache: bool = True
    preemption: bool = True

    @property
    def absent_marks(self) -> tuple[str, ...]:
        """Marks that such a scheduler never has."""
        preempted = () if self.preemption else ("preempted", "resumed", "rebuilt")
        return (*(() if self.prefix_cache else ("shared",)), *preempted)


TRIED_ON = (PoolLimits(num_cells=64, num_sequences=8),)


@dataclass(frozen=True, slots=True, kw_only=True)
class Brought:
    """The scheduler and the engine that a user brings; None is ours. A scheduler is a factory in Python or a
    command, which is started for every scheduler and speaks the JSON-lines protocol (``parity/protocol``).
    """

    scheduler: str | None = None
    engine: str | None = None
    scheduler_command: str | None = None

    def __post_init__(self) -> None:
        if self.scheduler is not None and self.scheduler_command is not None:
            raise UsageError("--scheduler with --scheduler-command", why="one scheduler is under test")

    @property
    def scheduler_factory(self) -> SchedulerFactory:
        """Makes the scheduler under test. Raises ``UsageError``."""
        if self.scheduler_command is not None:
            return make_process_scheduler(self.scheduler_command)
        return Scheduler if self.scheduler is None else _checked(self.scheduler, SCHEDULER_OFFERS)

    @property
    def engine_factory(self) -> EngineFactory:
        """Makes the engine under test; ours is the exact one. Raises ``UsageError``."""
        return ExactEngine if self.engine is None else _checked(self.engine, ENGINE_OFFERS)

    @property
    def tier(self) -> Tier:
        """What is compared unless somebody says otherwise: a user's engine need not show its logits."""
        return Tier.BITS if self.engine is None else Tier.BYTES

    @property
    def parts(self) -> dict[str, str]:
        """What was brought, by field; what a case file records."""
        named = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in named.items() if value is not None}

    @property
    def options(self) -> str:
        """As options of a command line, each with a space before it."""
        return "".join(
            f" --{name.replace('_', '-')} {shlex.quote(value)}" for name, value in self.parts.items()
        )

    def why_no_bits(self) -> str:
        """Why the logits of a user's engine can't be compared; empty if they can. Makes both once.

        Raises ``UsageError`` when a factory can't be loaded or called, or its product lacks the protocol.
        """
        engine = self.engine_factory(TRIED_ON)
        if self.scheduler_command is None:
            self.scheduler_factory(engine, make_policy("fcfs"), StepLimits(), model_digest="")
        else:
            capabilities_of_command(self.scheduler_command)
        return "" if self.engine is None or hasattr(engine, OBSERVED) else f"the engine offers no {OBSERVED}"

    @property
    def capabilities(self) -> Capabilities:
        """What the scheduler declares; ours can do all of it. Raises ``UsageError``."""
        if self.scheduler_command is not None:
            return capabilities_of_command(self.scheduler_command)
        if self.scheduler is None:
            return Capabilities()
        return getattr(load_factory(self.scheduler), "capabilities", Capabilities())


@functools.cache
def capabilities_of_command(command: str) -> Capabilities:
    """What a scheduler's process declares. Raises ``UsageError`` for one that gives no such answer."""
    try:
        peer, ready = open_peer(command, ExactEngine(TRIED_ON), StepLimits())
    except PeerFailure as failure:
        raise UsageError(
            "scheduler cannot be used", where=command, why=str(failure), todo="see parity/protocol/README.md"
        ) from failure
    peer.close()
    return Capabilities(prefix_cache=ready.prefix_cache, preemption=ready.preemption)


OURS = Brought()


def scheduler_options(command: Callable) -> Callable:
    """``--scheduler`` and ``--scheduler-command`` of a subcommand."""
    said = "Run with the scheduler that this program is; it speaks JSON lines (parity/protocol/README.md)."
    command = click.option("--scheduler-command", metavar="COMMAND", help=said)(command)
    return _part_option("scheduler")(command)


def brought_options(command: Callable) -> Callable:
    """``scheduler_options`` and ``--engine`` of a subcommand."""
    return scheduler_options(_part_option("engine")(command))


def _part_option(name: str) -> Callable[[Callable], Callable]:
    said = f"Run with this {name} of your own instead of ours."
    return click.option(f"--{name}", metavar="PACKAGE:FACTORY", help=said)


def whose_options(command: Callable) -> Callable:
    """``--as-recorded`` and ``--ours`` of a subcommand that runs a case file."""
    said = "Run our own scheduler and engine, whatever the file names."
    command = click.option("--ours", is_flag=True, help=said)(command)
    said = "Run the scheduler and the engine that the file names: this executes what it says."
    return click.option("--as-recorded", is_flag=True, help=said)(command)


def brought_for(file: Path, *, ours: bool, as_recorded: bool, **options: str | None) -> Brought:
    """What a case in a file is run with: the parts that the options name, or those on record in the file. A
    file may come from anybody, so what it names is executed only when that is asked for. Raises
    ``UsageError`` when it names parts and nobody said whose to take, and for contradictions.
    """
    named = Brought(**options)
    if ours + as_recorded + (named != OURS) > 1:
        given = [name for name, is_there in (("--ours", ours), ("--as-recorded", as_recorded)) if is_there]
        raise UsageError(f"{' with '.join(given)}{named.options}", why="they contradict each other")
    if ours or named != OURS:
        return named
    recorded = Brought(**brought_parts(file))
    if recorded != OURS and not as_recorded:
        raise UsageError(
            "the case file names what it was run with",
            where=str(file),
            why=f"it says{recorded.options}",
            todo="--as-recorded executes that, --ours takes our own",
        )
    return recorded


def _checked(specification: str, offers: tuple[str, ...]) -> Callable[..., Any]:
    """A factory that answers for its product."""
    factory = load_factory(specification)

    def make(*arguments: Any, **named: Any) -> Any:
        try:
            made = factory(*arguments, **named)
        except Exception as error:  # a user's code: whatever it raises, it gave nothing to test
            raise UsageError(
                f"{specification} cannot make one",
                why=f"{type(error).__name__}: {error}",
                todo="see parity/run/under_test.py for what a factory is given",
            ) from error
        check_offers(made, offers, specification=specification)
        return made

    return make
