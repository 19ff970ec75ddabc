"""Command-line options of everything that opens an engine; names are vLLM's where
it has them, else llama.cpp's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import click

from parity.cases.policy_options import parse_policy_options, policy_option
from parity.life_signs import LifeSigns
from parity.outputs import OUTPUT_FILE
from parity.run.call_cost import cost_of
from parity.run.profiles import profile_of
from parity.serve.served_model import EngineSettings
from scheduler.limits import Layout

_AT_LEAST_ONE = click.IntRange(1)
AUTO = "auto"
LEAST_LANES = 4  # sessions for which a shard has room, where their number is found


class Shards(click.ParamType):
    """A number of shards, or ``auto``."""

    name = "shards"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | str:
        return AUTO if value == AUTO else _AT_LEAST_ONE.convert(value, param, ctx)


_OPTIONS = (
    click.option(
        "--layout", default="unified", show_default=True, type=click.Choice([x.value for x in Layout])
    ),
    click.option(
        "--n-ctx",
        "pool_cells",
        default=8000,
        show_default=True,
        type=click.IntRange(2),
        help="KV cells of the pool, shared by all sessions (streams: of each session).",
    ),
    click.option(
        "--max-num-seqs", default=32, show_default=True, type=_AT_LEAST_ONE, help="Sessions at once."
    ),
    click.option(
        "--max-num-batched-tokens",
        default=2048,
        show_default=True,
        type=_AT_LEAST_ONE,
        help="Tokens of one step.",
    ),
    click.option(
        "--max-chunk-tokens",
        default=2048,
        show_default=True,
        type=_AT_LEAST_ONE,
        help="Tokens of one session in one step.",
    ),
    click.option(
        "--max-waiting",
        default=256,
        show_default=True,
        type=_AT_LEAST_ONE,
        help="Requests that may wait; beyond it they are refused.",
    ),
    click.option(
        "--state-budget",
        "state_budget_bytes",
        type=click.IntRange(0),
        metavar="BYTES",
        help="At most so much for recurrent states; `parity explain-memory` shows what one costs.",
    ),
    click.option("--prefix-cache/--no-prefix-cache", default=True, show_default=True),
    click.option("--policy", default="fcfs", show_default=True, help="Named scheduling policy."),
    policy_option,
    click.option("--kv-type", default="f16", show_default=True, type=click.Choice(["f16", "f32"])),
    click.option("--threads", "n_threads", default=2, show_default=True, type=_AT_LEAST_ONE),
    click.option(
        "--shards",
        default="1",
        show_default=True,
        type=Shards(),
        metavar="N|auto",
        help="Pools side by side that share cells and threads evenly; a session lives in one. "
        "auto: as many as are fastest by the measured cost of a call.",
    ),
)


telemetry_option = click.option(
    "--telemetry",
    "telemetry_path",
    type=OUTPUT_FILE,
    metavar="FILE",
    help="Write a record of every step here, a line each; `parity telemetry FILE` reads it.",
)


def shared_engine_options(function: Callable) -> Callable:
    """Decorator: the engine's options."""
    for option in reversed(_OPTIONS):
        function = option(function)
    return function


def engine_options(function: Callable) -> Callable:
    """Decorator: the engine's options and, in front of them, MODEL."""
    return click.argument("model")(shared_engine_options(function))


def settings_from(model: str, options: dict[str, Any], *, longest: int = 1) -> EngineSettings:
    """Settings from the decorated command's keyword arguments; ``longest`` is what the longest session needs,
    in cells. Raises ``UsageError``.
    """
    values = {
        **options,
        "layout": Layout(options["layout"]),
        "policy_options": parse_policy_options(options["policy"], options["policy_options"]),
    }
    if values.get("shards") != AUTO:
        return EngineSettings(model=model, **values)
    return in_best_shards(EngineSettings(model=model, **{**values, "shards": 1}), longest)


def in_best_shards(settings: EngineSettings, longest: int) -> EngineSettings:
    """The settings with as many shards as are fastest when all sessions run and the pool is full. Each has
    room for the longest session, and for ``LEAST_LANES`` of them.
    """
    sessions, cells = settings.max_num_seqs, settings.pool_cells
    streams = settings.layout is Layout.STREAMS  # its sessions do not walk each other's cells
    with LifeSigns(f"cost of a call of {settings.model}"):
        shards = cost_of(settings.model).best_shards(
            sessions=sessions,
            cells=cells / sessions,
            threads=settings.n_threads,
            most=1 if streams else min(sessions // LEAST_LANES, cells // longest),
            call_rows=profile_of(settings.model).profile.for_layout(settings.layout).max_call_rows,
        )
    return replace(settings, shards=shards)
