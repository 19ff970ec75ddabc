"""``parity bench``: throughput, latency and goodput of the scheduler in this
process, or of a server over HTTP.
"""

from __future__ import annotations

import contextlib
import cProfile
import io
import json
import pstats
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import click
import httpx
from rich.console import Console
from rich.table import Table

from parity.bench.fairness import goodput_by_rate, outcome_lines
from parity.bench.in_process import InProcessDriver
from parity.bench.over_http import HttpDriver, check_reachable
from parity.bench.plots import save_plots
from parity.bench.summary import METRICS, Goodput
from parity.bench.sweep import Point, SweepOptions, csv_text, run_sweep
from parity.bench.workload import MIXES, Lengths, PrefixShape, Workload
from parity.errors import ExitCode, UsageError
from parity.life_signs import LifeSigns
from parity.models import resolve_model
from parity.outputs import OUTPUT_FILE, check_output_folder, save_output
from parity.run.call_cost import cost_of
from parity.run.profiles import profile_of, provenance, provenance_line
from parity.serve.options import engine_options, settings_from, telemetry_option
from parity.serve.served_model import EngineSettings, open_served
from parity.store import save_text
from parity.telemetry import step_log
from scheduler.limits import Layout
from scheduler.records import ServiceLevel

DEFAULT_CONCURRENCIES = (1, 2, 4, 8, 16, 32, 64)
_AT_LEAST_ONE = click.IntRange(1)
_POSITIVE = click.FloatRange(0, min_open=True)


@click.command()
@engine_options
@click.option(
    "--base-url", default=None, metavar="URL", help="Measure this server over HTTP; MODEL is its name there."
)
@click.option(
    "--api-key", envvar="OPENAI_API_KEY", default="", help="For --base-url; also from OPENAI_API_KEY."
)
@click.option(
    "--max-concurrency",
    "concurrencies",
    multiple=True,
    type=_AT_LEAST_ONE,
    help="Closed loop at this concurrency (repeatable); with --request-rate: a bound on the open loop.",
)
@click.option(
    "--request-rate", "rates", multiple=True, type=float, help="Open loop at so many requests/s (repeatable)."
)
@click.option("--burstiness", default=1.0, show_default=True, help="Gamma shape of the gaps; 1 is Poisson.")
@click.option("--num-prompts", default=128, show_default=True, type=_AT_LEAST_ONE, help="Requests per point.")
@click.option(
    "--mix", "mixes", multiple=True, type=click.Choice([*MIXES, "all"]), help="Length mix (repeatable)."
)
@click.option("--random-input-len", type=_AT_LEAST_ONE, help="Prompt tokens, instead of a mix.")
@click.option("--random-output-len", type=_AT_LEAST_ONE, help="Output tokens, instead of a mix.")
@click.option(
    "--random-range-ratio", default=0.0, show_default=True, type=click.FloatRange(0, 1, max_open=True)
)
@click.option(
    "--prefix",
    "shapes",
    multiple=True,
    type=click.Choice([shape.value for shape in PrefixShape]),
    help="Prefix shape (repeatable).  [default: unique]",
)
@click.option(
    "--goodput", "objectives", multiple=True, metavar="NAME:MS", help="ttft:MS, tpot:MS or e2el:MS."
)
@click.option(
    "--allow-failures", is_flag=True, help="Exit 0 though requests failed, e.g. past the ceiling on purpose."
)
@click.option("--clients", default=1, show_default=True, type=_AT_LEAST_ONE, help="Clients that take turns.")
@click.option(
    "--priorities",
    default=1,
    show_default=True,
    type=_AT_LEAST_ONE,
    help="Priorities that take turns, from 0, the favoured one.",
)
@click.option("--slo-ttft", type=_POSITIVE, metavar="MS", help="Objective of every request.")
@click.option("--slo-tbt", type=_POSITIVE, metavar="MS", help="The same, from emission to emission.")
@click.option(
    "--alpha",
    default=0.9,
    show_default=True,
    type=click.FloatRange(0, 1, min_open=True),
    help="Attainment of offered requests that dist_goodput asks for; with several --request-rate.",
)
@click.option("--percentile-metrics", default="ttft,tpot,itl,e2el", show_default=True)
@click.option("--metric-percentiles", default="50,99", show_default=True)
@click.option("--seed", default=0, show_default=True)
@telemetry_option
@click.option(
    "--profile",
    "profile_path",
    type=OUTPUT_FILE,
    metavar="FILE",
    help="Profile the steps (cProfile): the costliest functions are printed, all are written here. What "
    "shards do on other threads shows as waiting; with --threads 1 they run in this one.",
)
@click.option(
    "--save-result", is_flag=True, help="Keep every point, JSON, CSV and plots in --result-dir, and reuse it."
)
@click.option("--save-detailed", is_flag=True, help="With --save-result: keep every request's times too.")
@click.option(
    "--result-dir", default=Path("bench"), show_default=True, type=click.Path(file_okay=False, path_type=Path)
)
def command(
    model: str,
    base_url: str | None,
    api_key: str,
    result_dir: Path,
    save_result: bool,
    save_detailed: bool,
    objectives: tuple[str, ...],
    percentile_metrics: str,
    metric_percentiles: str,
    allow_failures: bool,
    telemetry_path: Path | None,
    profile_path: Path | None,
    **options: Any,
) -> ExitCode:
    """Measure MODEL. Percentiles that a sample cannot carry are left empty, never guessed.

    Exit code 0: every request was served, 1: some failed, and the numbers are those of the others, 2:
    at some point none was served.
    """
    if save_result:
        check_output_folder(result_dir)
    points = make_points(options)
    longest = max(point.workload.longest_session() for point in points)
    of_engine = {name: options[name] for name in ENGINE_NAMES if name in options}
    settings = settings_from(model, of_engine, longest=longest)
    most = max(point.concurrency or point.max_concurrency or settings.max_num_seqs for point in points)
    settings = replace(settings, max_num_seqs=max(settings.max_num_seqs, most))
    sweep = SweepOptions(
        target={"url": base_url, "model": model}
        if base_url
        else {"settings": {**asdict(settings), "layout": settings.layout.value}},
        goodput=Goodput.parse(objectives),
        metrics=metric_names(percentile_metrics),
        percentiles=percent_values(metric_percentiles),
        result_dir=result_dir if save_result else None,
        save_detailed=save_detailed,
        held_for=held_for(settings, base_url),
    )
    click.echo(provenance_line(options["seed"]))
    if base_url is None:
        rows = rows_in_process(settings, points, sweep, telemetry_path, profile_path)
    elif profile_path is not None:
        raise UsageError("--profile with --base-url", why="a server's steps are not seen from outside")
    elif telemetry_path is not None:
        raise UsageError("--telemetry with --base-url", why="a server's steps are not seen from outside")
    else:
        check_reachable(base_url)
        rows = sweep_with_progress(points, sweep, lambda: HttpDriver(base_url, model, api_key=api_key))
    Console(width=200).print(rows_table(rows))
    print_outcomes(rows, alpha=options["alpha"])
    if base_url is None:
        print_prediction(rows, settings)
    if save_result:
        save_text(
            result_dir / "rows.json",
            json.dumps({"target": sweep.target, "rows": rows}, indent=1, default=str),
        )
        save_text(result_dir / "rows.csv", csv_text(rows))
        for path in save_plots(rows, result_dir):
            click.echo(f"plot: {path}")
    if report_failures(rows) and not allow_failures:
        return ExitCode.FAIL
    return ExitCode.PASS if all(row["completed"] for row in rows) else ExitCode.UNKNOWN


def held_for(settings: EngineSettings, base_url: str | None) -> dict[str, Any]:
    """Coordinates of all rows: the model (its bytes, where known), the processor, how it was measured."""
    cpu = provenance().cpu
    if base_url is not None:
        hardware = {"cpu": cpu, "server": httpx.URL(base_url).host}
        return {"model": settings.model, "hardware": hardware, "evidence": "measured over HTTP"}
    return {
        "model": resolve_model(settings.model).sha256,
        "hardware": {"cpu": cpu, "threads": settings.n_threads, "kv_type": settings.kv_type},
        "evidence": "measured in process",
    }


def rows_in_process(
    settings: EngineSettings,
    points: list[Point],
    sweep: SweepOptions,
    telemetry_path: Path | None,
    profile_path: Path | None,
) -> list[dict[str, Any]]:
    """Rows of the scheduler in this process, its steps logged and profiled."""
    with step_log(telemetry_path) as write:
        served = open_served(settings)
        served.note_step = write
        try:
            with profiled(profile_path):
                return sweep_with_progress(points, sweep, lambda: InProcessDriver(served))
        finally:
            served.close()


MOST_FUNCTIONS = 15  # of a profile, in print


@contextlib.contextmanager
def profiled(path: Path | None) -> Iterator[None]:
    """Profile what runs meanwhile in this thread, print where the time went and write it all; with None do
    nothing.
    """
    if path is None:
        yield
        return
    profile = cProfile.Profile()
    with profile:
        yield
    text = io.StringIO()
    pstats.Stats(profile, stream=text).strip_dirs().sort_stats("tottime").print_stats(MOST_FUNCTIONS)
    click.echo(text.getvalue().strip())
    with tempfile.NamedTemporaryFile() as file:
        profile.dump_stats(file.name)
        save_output(path, file.read())


def print_outcomes(rows: list[dict[str, Any]], *, alpha: float) -> None:
    """How every row's requests ended, who got the service, what may be claimed, and the rates that hold."""
    for row in rows:
        for line in outcome_lines(row):
            click.echo(f"{row['mix']} {row['prefix']}, {load_of(row)}: {line}")
    for name, found in goodput_by_rate(rows, alpha=alpha).items():
        points = ", ".join(f"{share:.3f} at {rate:g}" for rate, share in found.points)
        click.echo(f"{name}: dist_goodput {found.rate:g} requests/s at alpha {alpha:g} (attainment {points})")


def print_prediction(rows: list[dict[str, Any]], settings: EngineSettings) -> None:
    """What the cost of a call foretells of the fullest decode steps, beside what they took."""
    if settings.layout is not Layout.UNIFIED or not any(row.get("decode_rows") for row in rows):
        return  # elsewhere sessions do not walk each other's cells, or other kernels run
    with LifeSigns("cost of a call"):
        cost, profile = cost_of(settings.model), profile_of(settings.model).profile
    for row in rows:
        if not row.get("decode_rows"):
            continue
        foretold_ms = 1e3 * cost.step_s(
            sessions=row["decode_rows"],
            cells=row["p50_decode_cells"] / row["decode_rows"],
            shards=settings.shards,
            threads=settings.n_threads,
            call_rows=profile.for_layout(settings.layout).max_call_rows,
        )
        measured_ms = row["p50_decode_step_ms"]
        click.echo(
            f"{row['mix']} {row['prefix']}, {load_of(row)}: a step of {row['decode_rows']:.0f} rows over "
            f"{row['p50_decode_cells']:.0f} cells in {settings.shards} shards: "
            f"{foretold_ms:.3g} ms foretold, {measured_ms:.3g} ms measured ({measured_ms / foretold_ms:.2f})"
        )


def load_of(row: dict[str, Any]) -> str:
    return " ".join(f"{name} {row[name]:g}" for name in ("concurrency", "request_rate") if row[name])


def report_failures(rows: list[dict[str, Any]]) -> bool:
    """Print a line for every row with failed requests, or some that were sent twice; whether any failed."""
    for row in rows:
        if row.get("resent"):
            click.echo(
                f"{row['mix']} {row['prefix']}, {load_of(row)}: {row['resent']} requests were sent again, "
                "the server had closed a kept-alive connection"
            )
    failed = [row for row in rows if row["failed"]]
    for row in failed:
        click.echo(
            f"{row['mix']} {row['prefix']}, {load_of(row)}: {row['failed']} of {row['num_requests']} "
            f"requests failed, the first with: {row['first_error']}"
        )
    return bool(failed)


ENGINE_NAMES = tuple(field.name for field in fields(EngineSettings) if field.name != "model")


def make_points(options: dict[str, Any]) -> list[Point]:
    """The grid of mixes, prefix shapes and loads. Raises ``UsageError``."""
    lengths = chosen_lengths(options)
    shapes = [PrefixShape(shape) for shape in options["shapes"] or ("unique",)]
    workloads = [
        Workload(
            name=name,
            lengths=replace(length, range_ratio=options["random_range_ratio"]),
            num_prompts=options["num_prompts"],
            shape=shape,
            seed=options["seed"],
            clients=options["clients"],
            priorities=options["priorities"],
            slo=ServiceLevel(ttft_ms=options["slo_ttft"], tbt_ms=options["slo_tbt"]),
        )
        for name, length in lengths.items()
        for shape in shapes
    ]
    concurrencies, rates = options["concurrencies"], options["rates"]
    if rates and len(concurrencies) > 1:
        raise UsageError(
            "several --max-concurrency with --request-rate", todo="give one, as the open loop's bound"
        )
    if rates:
        bound = concurrencies[0] if concurrencies else None
        return [
            Point(workload=w, request_rate=rate, burstiness=options["burstiness"], max_concurrency=bound)
            for w in workloads
            for rate in rates
        ]
    return [
        Point(workload=w, concurrency=n) for w in workloads for n in concurrencies or DEFAULT_CONCURRENCIES
    ]


def chosen_lengths(options: dict[str, Any]) -> dict[str, Lengths]:
    """Named length mixes, or the one that was given in tokens."""
    given = options["random_input_len"], options["random_output_len"]
    if any(given):
        if options["mixes"]:
            raise UsageError(
                "--mix together with --random-input-len or --random-output-len", todo="choose one"
            )
        input_len, output_len = given[0] or 32, given[1] or 64
        return {f"{input_len}/{output_len}": Lengths(input_len=input_len, output_len=output_len)}
    names = options["mixes"] or ("short/long",)
    return dict(MIXES) if "all" in names else {name: MIXES[name] for name in names}


def metric_names(text: str) -> tuple[str, ...]:
    """Metric names of a comma-separated list. Raises ``UsageError``."""
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    if unknown := [name for name in names if name not in METRICS]:
        raise UsageError(
            f"unknown metric {unknown[0]!r}",
            where="--percentile-metrics",
            why=f"known are {', '.join(METRICS)}",
        )
    return names


def percent_values(text: str) -> tuple[float, ...]:
    """Percentiles of a comma-separated list. Raises ``UsageError``."""
    try:
        values = tuple(float(part) for part in text.split(","))
        if not all(0 < value < 100 for value in values):
            raise ValueError
    except ValueError:
        raise UsageError(
            f"percentiles {text!r}",
            where="--metric-percentiles",
            why="they are not numbers between 0 and 100",
        ) from None
    return values


def sweep_with_progress(
    points: list[Point], sweep: SweepOptions, make_driver: Callable[..., Any]
) -> list[dict[str, Any]]:
    """``run_sweep`` under a progress bar."""
    with LifeSigns("points", total=len(points)) as signs:

        def report(point: Point, reused: bool) -> None:
            signs.advance(f"{point.label}{' (kept)' if reused else ''}")

        return run_sweep(points, sweep, make_driver, report)


def rows_table(rows: list[dict[str, Any]]) -> Table:
    """The most telling columns; an empty number says that the sample is too small."""
    shown = [
        "mix",
        "prefix",
        "concurrency",
        "request_rate",
        "completed",
        "failed",
        "output_throughput",
        "request_throughput",
        "request_goodput",
        "p50_ttft_ms",
        "p99_ttft_ms",
        "p50_tpot_ms",
        "p99_tpot_ms",
        "p99_e2el_ms",
        "prefix_hit_rate",
        "calls_per_step",
        "native_share",
    ]
    columns = [name for name in shown if any(row.get(name) is not None for row in rows)]
    table = Table(*columns)
    for row in rows:
        values = (row.get(name) for name in columns)
        table.add_row(*("" if v is None else f"{v:.4g}" if isinstance(v, float) else str(v) for v in values))
    return table
