"""Planting at the seam between scheduler and engine: a batch is changed on its way
down, on whichever engine runs.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

from parity.engines.exact import ExactEngine
from parity.engines.pool import LlamaEngine
from parity.mutants.mutant import Plant, Reach, replaced
from scheduler.engine import Batch, Call, MemoryOp
from scheduler.records import IterationPlan, IterationResult

Change = Callable[[IterationPlan, Batch], Batch]
ResultChange = Callable[[IterationPlan, Batch, IterationResult], IterationResult]
ENGINES = (ExactEngine, LlamaEngine)


def in_batches(make_change: Callable[[], Change]) -> Plant:
    """A plant that passes every batch through ``make_change()``, which may keep
    what it saw of earlier batches.
    """

    @contextmanager
    def plant(reach: Reach) -> Iterator[None]:
        changes: dict[int, Change] = {}  # per engine, so that one engine's history is not another's

        def make(original: Callable[..., Any]) -> Callable[..., Any]:
            def execute(self: Any, plan: IterationPlan, batch: Batch, now_ms: float) -> IterationResult:
                changed = changes.setdefault(id(self), make_change())(plan, batch)
                if changed != batch:
                    reach()
                return original(self, plan, changed, now_ms)

            return execute

        with ExitStack() as stack:
            for engine in ENGINES:
                stack.enter_context(replaced(engine, "execute", make))
            yield

    return plant


def in_method(
    owner: Any, name: str
) -> Callable[[Callable[[Callable[..., Any], Reach], Callable[..., Any]]], Plant]:
    """Plants that replace one method or function: ``make(original, reach)`` gives the faulty one."""

    def planting(make: Callable[[Callable[..., Any], Reach], Callable[..., Any]]) -> Plant:
        @contextmanager
        def plant(reach: Reach) -> Iterator[None]:
            with replaced(owner, name, lambda original: make(original, reach)):
                yield

        return plant

    return planting


def in_source(module: Any, name: str, old: str, new: str) -> Plant:
    """A plant that writes ``new`` for ``old`` in the source of a module's generator function ``name``.

    A fault that is one comparison is planted as that and nothing else. It is reached where the function says
    something else than it did. Raises ValueError unless ``old`` stands there once: the function was changed.
    """

    @contextmanager
    def plant(reach: Reach) -> Iterator[None]:
        def make(original: Callable[..., Any]) -> Callable[..., Any]:
            source = inspect.getsource(original)
            if source.count(old) != 1:
                raise ValueError(f"{old!r} stands {source.count(old)} times in {name}")
            # Its globals are the module's own, so that what else is planted there is seen.
            code = compile(f"from __future__ import annotations\n{source.replace(old, new)}", name, "exec")
            made: dict[str, Any] = {}
            exec(code, vars(module), made)

            def faulty(*arguments: Any, **named: Any) -> Iterator[Any]:
                said = [*made[name](*arguments, **named)]
                if said != [*original(*arguments, **named)]:
                    reach()
                yield from said

            return faulty

        with replaced(module, name, make):
            yield

    return plant


def in_results(
    make_change: Callable[[], ResultChange],
) -> Plant:
    """A plant that passes every result through ``make_change()``."""

    @contextmanager
    def plant(reach: Reach) -> Iterator[None]:
        changes: dict[int, ResultChange] = {}

        def make(original: Callable[..., Any]) -> Callable[..., Any]:
            def execute(self: Any, plan: IterationPlan, batch: Batch, now_ms: float) -> IterationResult:
                result = original(self, plan, batch, now_ms)
                changed = changes.setdefault(id(self), make_change())(plan, batch, result)
                if changed != result:
                    reach()
                return changed

            return execute

        with ExitStack() as stack:
            for engine in ENGINES:
                stack.enter_context(replaced(engine, "execute", make))
            yield

    return plant


def with_calls(batch: Batch, change: Callable[[Call], Call | None]) -> Batch:
    """The batch with every call of every stage changed; None drops the call."""
    stages = tuple(
        tuple(changed for call in calls if (changed := change(call)) is not None) for calls in batch.stages
    )
    return replace(batch, stages=stages)


def with_ops(batch: Batch, change: Callable[[MemoryOp], tuple[MemoryOp, ...]]) -> Batch:
    """The batch with every memory operation replaced by those that ``change`` returns."""
    return with_calls(
        batch, lambda call: replace(call, ops=tuple(new for op in call.ops for new in change(op)))
    )


def rows_of(batch: Batch, plan: IterationPlan, request_id: str) -> range:
    """Batch rows of one session in this step, empty if it has none."""
    for index, chunk in enumerate(plan.chunks):
        if chunk.request_id == request_id:
            return range(batch.offsets[index], batch.offsets[index + 1])
    return range(0)


def shifted(values: tuple[int, ...], rows: range, by: int) -> tuple[int, ...]:
    """``values`` with ``by`` added at ``rows``."""
    return tuple(value + by if index in rows else value for index, value in enumerate(values))
