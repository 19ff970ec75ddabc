"""Command-line options of everything that opens an engine; names are vLLM's where
it has them, else llama.cpp's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from parity.cases.policy_options import parse_policy_options, policy_option
from parity.outputs import OUTPUT_FILE
from parity.serve.served_model import EngineSettings
from scheduler.limits import Layout

_AT_LEAST_ONE = click.IntRange(1)
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
        default=1,
        show_default=True,
        type=_AT_LEAST_ONE,
        help="Pools side by side that share cells and threads evenly; a session lives in one.",
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


def settings_from(model: str, options: dict[str, Any]) -> EngineSettings:
    """Settings from the decorated command's keyword arguments. Raises ``UsageError``."""
    values = {
        **options,
        "layout": Layout(options["layout"]),
        "policy_options": parse_policy_options(options["policy"], options["policy_options"]),
    }
    return EngineSettings(model=model, **values)
