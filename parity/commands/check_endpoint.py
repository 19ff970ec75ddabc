"""``parity check-endpoint``: does a server give the same answers alone and under load?"""

from __future__ import annotations

import json
from pathlib import Path

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from parity.endpoint.check import EndpointOptions, check_endpoint, summary_lines
from parity.errors import ExitCode
from parity.outputs import OUTPUT_FILE, save_output
from parity.records import Tier

_AT_LEAST_ONE = click.IntRange(1)


@click.command()
@click.argument("url")
@click.option("--model", required=True, help="The model's name at the server.")
@click.option("--concurrency", default=16, show_default=True, type=_AT_LEAST_ONE)
@click.option("--prompts", default=24, show_default=True, type=_AT_LEAST_ONE)
@click.option("--max-tokens", default=24, show_default=True, type=_AT_LEAST_ONE)
@click.option("--rounds", default=2, show_default=True, type=_AT_LEAST_ONE, help="Rounds under load.")
@click.option("--temperature", default=0.0, show_default=True, help="Above 0 every request carries a seed.")
@click.option("--seed", default=0, show_default=True)
@click.option(
    "--tier",
    type=click.Choice([tier.value for tier in Tier]),
    help="bits: log probabilities must be equal too.  [default: bits if the server gives them, else bytes]",
)
@click.option(
    "--disconnects",
    default=4,
    show_default=True,
    type=click.IntRange(0),
    help="Clients that leave, per round.",
)
@click.option("--api-key", envvar="OPENAI_API_KEY", default="", help="Also from OPENAI_API_KEY.")
@click.option("--timeout", "timeout_s", default=120.0, show_default=True, metavar="SECONDS")
@click.option(
    "--retries", default=2, show_default=True, type=click.IntRange(0), help="Further attempts a request."
)
@click.option("--request-rate", "requests_per_s", type=float, help="At most so many requests a second.")
@click.option("--stream", is_flag=True, help="Ask for streamed answers.")
@click.option(
    "--duration",
    "duration_s",
    default=0.0,
    metavar="SECONDS",
    help="Go on with rounds under load for so long.",
)
@click.option("--chat", is_flag=True, help="Ask /v1/chat/completions.")
@click.option(
    "--results",
    type=OUTPUT_FILE,
    help="Keep answers here as JSON lines and go on from there after an interruption.",
)
@click.option("--json", "json_path", type=OUTPUT_FILE, help="Write the report here.")
def command(url: str, model: str, tier: str | None, json_path: Path | None, **options) -> ExitCode:
    """Ask the server at URL every prompt alone, twice, then all at once, and compare.

    Exit code 0: same answers, 1: an answer differs, 2: not proved (requests failed or nothing overlapped).
    """
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("answers", total=None)
        verdict, report = check_endpoint(
            url,
            model,
            EndpointOptions(tier=tier and Tier(tier), **options),
            lambda done, total: progress.update(task, completed=done, total=total),
        )
    for line in summary_lines(report):
        click.echo(line)
    click.echo(f"verdict: {verdict.value} (tier {report['tier']})")
    if json_path is not None:
        save_output(json_path, json.dumps(report, indent=1) + "\n")
    return verdict.exit_code
