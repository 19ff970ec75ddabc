"""``parity check-endpoint``: another name of ``parity check --endpoint``; and what both do."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from parity.endpoint.check import EndpointOptions, check_and_calibrate, summary_lines
from parity.endpoint.connect import KINDS
from parity.endpoint.judge import SystemTier
from parity.endpoint.noise import Baseline, load_baseline, save_baseline
from parity.endpoint.pair import BASELINE_SEEDS
from parity.errors import ExitCode, UsageError
from parity.life_signs import LifeSigns
from parity.outputs import OUTPUT_FILE, OUTPUT_FOLDER, save_output
from parity.records import Verdict

_AT_LEAST_ONE = click.IntRange(1)
TIERS = [tier.value for tier in SystemTier]

# Options of a server under test, beside --model, --seed, --tier and --json.
_OPTIONS = (
    click.option("--concurrency", default=16, show_default=True, type=_AT_LEAST_ONE),
    click.option("--prompts", default=24, show_default=True, type=_AT_LEAST_ONE),
    click.option("--max-tokens", default=24, show_default=True, type=_AT_LEAST_ONE),
    click.option(
        "--prompt-tokens", type=_AT_LEAST_ONE, help="Length of the long prompts.  [default: what fits]"
    ),
    click.option("--rounds", default=2, show_default=True, type=_AT_LEAST_ONE, help="Rounds under load."),
    click.option(
        "--temperature",
        default=0.0,
        show_default=True,
        type=click.FloatRange(0),
        help="Above 0 every request is sampled, with a seed; at 0 some are.",
    ),
    click.option(
        "--disconnects",
        default=4,
        show_default=True,
        type=click.IntRange(0),
        help="Clients that leave, per round, beside those that come back; 0: none of either.",
    ),
    click.option("--api-key", envvar="OPENAI_API_KEY", default="", help="Also from OPENAI_API_KEY."),
    click.option("--timeout", "timeout_s", default=120.0, show_default=True, metavar="SECONDS"),
    click.option(
        "--retries",
        default=2,
        show_default=True,
        type=click.IntRange(0),
        help="Further attempts a request; those after a 5xx are counted as faults.",
    ),
    click.option(
        "--request-rate",
        "requests_per_s",
        type=click.FloatRange(0, min_open=True),
        help="At most so many requests a second.",
    ),
    click.option(
        "--stream/--no-stream",
        default=True,
        show_default=True,
        help="Ask for streamed answers; without them only a server's own counters show overlap.",
    ),
    click.option(
        "--duration",
        "duration_s",
        default=0.0,
        metavar="SECONDS",
        help="Go on with rounds under load for so long.",
    ),
    click.option("--chat", is_flag=True, help="Ask /v1/chat/completions."),
    click.option(
        "--api",
        "kind",
        default="auto",
        show_default=True,
        type=click.Choice(KINDS),
        help="How to ask; auto takes llama-server's and SGLang's own interfaces where they are there.",
    ),
    click.option(
        "--extra-body", metavar="JSON", help="Fields for every request, for instance to turn a cache off."
    ),
    click.option(
        "--baseline",
        metavar="FILE|URL",
        help="Noise of a known-good server: a file of --calibrate, or such a server to ask now.",
    ),
    click.option(
        "--calibrate",
        type=OUTPUT_FILE,
        help="Add this run to FILE as a known-good server's; refused where it is at fault.",
    ),
    click.option(
        "--cases",
        default=Path("parity-cases"),
        show_default=True,
        type=OUTPUT_FOLDER,
        help="Folder for the small case of a fault.",
    ),
    click.option(
        "--results",
        type=OUTPUT_FILE,
        help="Keep answers here as JSON lines and go on from there after an interruption.",
    ),
)
OPTION_NAMES = (
    "concurrency prompts max_tokens prompt_tokens rounds temperature disconnects api_key timeout_s retries "
    "requests_per_s stream duration_s chat kind extra_body baseline calibrate cases results"
).split()


# What a pair of servers in one run has no use for: the baseline is the other server, and it runs once.
NOT_FOR_A_PAIR = ("baseline", "calibrate", "results", "duration_s")
PAIR_OPTION_NAMES = [name for name in OPTION_NAMES if name not in NOT_FOR_A_PAIR]


def endpoint_options(function: Callable) -> Callable:
    """Decorator: the options of a server under test."""
    for option in reversed(_OPTIONS):
        function = option(function)
    return function


def pair_options(function: Callable) -> Callable:
    """Decorator: those that a pair of servers takes, too."""
    function = endpoint_options(function)
    kept = [option for option in function.__click_params__ if option.name not in NOT_FOR_A_PAIR]
    function.__click_params__ = kept
    return function


@click.command()
@click.argument("url")
@click.option("--model", required=True, help="The model's name at the server.")
@click.option("--seed", default=0, show_default=True)
@click.option(
    "--tier", type=click.Choice(TIERS), help="Tier to reach.  [default: the strongest that is kept]"
)
@endpoint_options
@click.option("--json", "json_path", type=OUTPUT_FILE, help="Write the report here.")
def command(
    url: str, model: str, seed: int, tier: str | None, json_path: Path | None, **options: Any
) -> ExitCode:
    """Another name of `parity check --endpoint URL`, with the same options.

    Asks the server every prompt alone, cold and warm, then all together, and compares. URL may also name
    package.module:factory of a SystemUnderTest.

    Exit code 0: the tier is kept, 1: a fault, 2: not proved.
    """
    return run_endpoint(url, model, seed=seed, tier=tier, json_path=json_path, options=options)


def run_endpoint(
    url: str, model: str, *, seed: int, tier: str | None, json_path: Path | None, options: dict[str, Any]
) -> ExitCode:
    """Both commands. ``options`` are those of ``endpoint_options``."""
    baseline, calibrate = options.pop("baseline"), options.pop("calibrate")
    if tier is not None and tier not in TIERS:
        raise UsageError(f"unknown tier {tier!r}", todo=f"choose {', '.join(TIERS)}")
    if baseline is not None and calibrate is not None:
        raise UsageError("--baseline with --calibrate", why="a known-good server is judged by nothing")
    wanted = EndpointOptions(
        seed=seed,
        tier=SystemTier(tier) if tier else None,
        **{**options, "extra_body": read_extra_body(options["extra_body"])},
    )
    if baseline is not None:
        wanted = replace(wanted, baseline=find_baseline(baseline, model, wanted))
    found, report, noise = _run_with_progress(url, model, wanted)
    for line in summary_lines(report):
        click.echo(line)
    if calibrate is not None:
        if found.faults or found.counts["failed"]:
            click.echo(f"nothing is added to {calibrate}: this is no known-good server")
        else:
            known = load_baseline(calibrate).merged(noise) if calibrate.exists() else noise
            save_baseline(known, calibrate)
            click.echo(f"{calibrate}: {known.runs} runs, {len(known.samples)} questions")
    if json_path is not None:
        save_output(json_path, json.dumps(report, indent=1) + "\n")
    reached = f"tier {report['tier']}" if report["tier"] else "no tier"
    click.echo(f"verdict: {found.verdict.value} ({reached})")
    return found.verdict.exit_code


def read_extra_body(text: str | None) -> dict[str, Any]:
    """A JSON object. Raises ``UsageError``."""
    try:
        data = json.loads(text) if text is not None else {}
    except ValueError as error:
        raise UsageError("no JSON", where="--extra-body", why=str(error)) from error
    if not isinstance(data, dict):
        raise UsageError("not a JSON object", where="--extra-body", todo="""write for instance '{"a": 1}'""")
    return data


def find_baseline(source: str, model: str, options: EndpointOptions) -> Baseline:
    """From a file, or by asking a known-good server the same questions and others. Raises ``UsageError``."""
    if not source.startswith(("http://", "https://")):
        return load_baseline(Path(source))
    known: Baseline | None = None
    for more in BASELINE_SEEDS:
        again = replace(options, seed=options.seed + more, results=None, tier=None, shrink_runs=0)
        found, report, noise = _run_with_progress(source, model, again)
        if found.verdict is Verdict.FAIL:
            raise UsageError(
                "the baseline's server is at fault itself", where=source, why=report["faults"][0]["text"]
            )
        known = noise if known is None else known.merged(noise)
    return known


def _run_with_progress(url: str, model: str, options: EndpointOptions) -> Any:
    with LifeSigns("answers") as signs:
        return check_and_calibrate(url, model, options, lambda done, total: signs.update(done, total=total))
