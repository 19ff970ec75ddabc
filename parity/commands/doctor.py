"""``parity doctor``: which numerics profiles are exact for a model on this CPU
and build, and what each costs.
"""

from __future__ import annotations

import click
from rich.console import Console
from rich.table import Table

from parity.errors import ExitCode
from parity.life_signs import LifeSigns
from parity.models import resolve_model
from parity.run.profiles import choose, profile_of, provenance_line, try_all


@click.command()
@click.argument("model")
@click.option("--again", is_flag=True, help="Test again instead of showing what is remembered.")
def command(model: str, again: bool) -> ExitCode:
    """Show the candidates for MODEL: bit-identical sessions of the self-test, and tokens per second."""
    file = resolve_model(model)
    click.echo(provenance_line(None))
    with LifeSigns(f"self-test of {file.path.name}"):
        choice = choose(try_all(model)) if again else profile_of(model)
    table = Table(
        "profile",
        "environment",
        "repacked weights",
        "flash attention",
        "rows per call",
        "bit-identical",
        "tokens/s",
        "problem",
    )
    for trial in choice.trials:
        profile = trial.profile
        table.add_row(
            profile.name + (" (chosen)" if profile == choice.profile and choice.exact else ""),
            " ".join(f"{key}={value}" for key, value in profile.environment) or "-",
            "yes" if profile.use_extra_bufts else "no",
            "on" if profile.flash_attention else "off",
            f"{2 if profile.pad_lone_rows else 1} to {profile.max_call_rows}",
            f"{trial.bit_identical} of {trial.sessions}",
            f"{trial.tokens_per_s:.0f}",
            trial.problem,
        )
    Console(width=170).print(table)
    if not choice.exact:
        click.echo(f"tier bits is unknown: {choice.reason}")
        return ExitCode.UNKNOWN
    click.echo(f"exact: {choice.profile.name}")
    return ExitCode.PASS
