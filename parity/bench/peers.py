"""Side by side in one run, alternating: ours against raw calls, against other
layouts, and against llama-server.
"""

from __future__ import annotations

import contextlib
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from time import perf_counter

from parity.bench.bench_run import BenchRun
from parity.bench.in_process import InProcessDriver
from parity.bench.over_http import HttpDriver
from parity.bench.replay import CallRecorder, replay_s
from parity.bench.workload import Lengths, Workload
from parity.errors import UsageError
from parity.models import resolve_model
from parity.serve.served_model import EngineSettings, ServedModel, open_served
from parity.systems.server_process import ServerDied, ServerProcess
from scheduler.limits import Layout

START_TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerRow:
    """Ours against one peer: tokens/s of both as medians, and the median of the
    pairs' ratios (ours over peer).
    """

    model: str
    peer: str
    concurrency: int
    input_len: int
    ours_tokens_per_s: float
    peer_tokens_per_s: float
    ratio: float
    note: str = ""


def tokens_per_s(run: BenchRun, *, of: str = "") -> float:
    """Output tokens per second; raises ``UsageError`` that names ``of`` when a request failed, because then
    rates mean nothing.
    """
    failed = [record for record in run.requests if not record.is_complete]
    if failed:
        raise UsageError(
            f"{len(failed)} of {len(run.requests)} requests failed", where=of, why=failed[0].error
        )
    return sum(record.output_tokens for record in run.completed) / run.duration_s


def make_row(
    model: str,
    peer: str,
    workload: Workload,
    concurrency: int,
    pairs: Sequence[tuple[float, float]],
    note: str = "",
) -> PeerRow:
    """A row from (ours, peer) pairs of tokens/s."""
    return PeerRow(
        model=model,
        peer=peer,
        concurrency=concurrency,
        input_len=workload.lengths.input_len,
        ours_tokens_per_s=median(ours for ours, _ in pairs),
        peer_tokens_per_s=median(other for _, other in pairs),
        ratio=median(ours / other for ours, other in pairs),
        note=note,
    )


def alternate(count: int, ours: Callable[[], float], peer: Callable[[], float]) -> list[tuple[float, float]]:
    """(ours, peer) ``count`` times, the order within a pair alternating, after one unmeasured run of each."""
    ours()
    peer()
    pairs = []
    for number in range(count):
        if number % 2 == 0:
            pairs.append((ours(), peer()))
        else:
            other = peer()
            pairs.append((ours(), other))
    return pairs


# -- raw llama_decode


def raw_row(
    served: ServedModel,
    workload: Workload,
    concurrency: int,
    pairs: int,
    clock: Callable[[], float] = perf_counter,
) -> PeerRow:
    """Ours against the same calls with no scheduler and no sampling: how near the physical limit is."""
    pool = served.engine.pool
    recorder = CallRecorder(served.engine)
    run = InProcessDriver(served, recorder=recorder).run_closed(workload.jobs(), concurrency=concurrency)
    tokens = sum(record.output_tokens for record in run.completed)

    def ours() -> float:
        driver = InProcessDriver(served, clock=clock)
        return tokens_per_s(driver.run_closed(workload.jobs(), concurrency=concurrency))

    measured = alternate(pairs, ours, lambda: tokens / replay_s(pool, recorder.calls, clock))
    return make_row(
        served.settings.model,
        "raw llama_decode",
        workload,
        concurrency,
        measured,
        f"{sum(len(call.tokens) > 0 for call in recorder.calls)} calls",
    )


# -- layouts

LAYOUTS: dict[str, tuple[Layout, bool | None]] = {
    "stock, flash attention": (Layout.STOCK, True),
    "stock, no flash attention": (Layout.STOCK, False),
    "streams, no flash attention": (Layout.STREAMS, False),
    "streams, flash attention": (Layout.STREAMS, True),
}


def price_rows(
    settings: EngineSettings,
    workloads: Sequence[Workload],
    concurrencies: Sequence[int],
    pairs: int,
    report: Callable[[str], None] = lambda what: None,
    clock: Callable[[], float] = perf_counter,
) -> list[PeerRow]:
    """The price of exactness: our exact layout against what others would run, exact or not."""
    rows = []
    ours = open_served(settings)
    try:
        for peer, (layout, flash_attention) in LAYOUTS.items():
            other_settings = replace(settings, layout=layout, flash_attention=flash_attention)
            if (
                layout is Layout.STREAMS
            ):  # the same cells in all, cut into private parts that hold one session each
                longest = max(workload.longest_session() for workload in workloads)
                other_settings = replace(other_settings, pool_cells=longest)
            other = open_served(other_settings)
            try:
                for workload in workloads:
                    for n in concurrencies:
                        report(f"{peer}, N={n}, prompts of {workload.lengths.input_len}")
                        jobs = replace(workload, num_prompts=2 * n).jobs()
                        measured = alternate(
                            pairs,
                            lambda jobs=jobs, n=n: tokens_per_s(
                                InProcessDriver(ours, prefix_cache=False, clock=clock).run_closed(
                                    jobs, concurrency=n
                                )
                            ),
                            lambda jobs=jobs, n=n, other=other: tokens_per_s(
                                InProcessDriver(other, prefix_cache=False, clock=clock).run_closed(
                                    jobs, concurrency=n
                                )
                            ),
                        )
                        rows.append(make_row(settings.model, peer, workload, n, measured))
            finally:
                other.close()
    finally:
        ours.close()
    return rows


# -- servers


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextlib.contextmanager
def running_server(command: Sequence[str], url: str) -> Iterator[str]:
    """A server process from when its ``/health`` answers 200; nothing of it is left
    afterwards. Raises ``UsageError``.
    """
    try:
        process = ServerProcess(command, url=url, start_timeout_s=START_TIMEOUT_S)
    except ServerDied as death:
        raise UsageError("server ended while starting", where=command[0], why=str(death)) from death
    with process:
        yield url


def llama_server_command(binary: Path, settings: EngineSettings, port: int) -> list[str]:
    """llama-server with the same model, threads, context, slots and KV type;
    prompts are cached as by default.
    """
    return [
        str(binary),
        "-m",
        str(resolve_model(settings.model).path),
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "-t",
        str(settings.n_threads),
        "-tb",
        str(settings.n_threads),
        "-c",
        str(settings.pool_cells),
        "-np",
        str(settings.max_num_seqs),
        "-ctk",
        settings.kv_type,
        "-ctv",
        settings.kv_type,
        "-kvu",
        "--alias",
        settings.model,
    ]


def own_server_command(settings: EngineSettings, port: int) -> list[str]:
    """``parity serve`` with the same settings, in a process of its own."""
    options = {
        "--port": port,
        "--threads": settings.n_threads,
        "--n-ctx": settings.pool_cells,
        "--max-num-seqs": settings.max_num_seqs,
        "--state-budget": settings.state_budget_bytes,
        "--kv-type": settings.kv_type,
        "--layout": settings.layout.value,
    }
    given = [str(part) for pair in options.items() if pair[1] is not None for part in pair]
    return [sys.executable, "-m", "parity.cli", "serve", settings.model, *given]


def server_row(
    settings: EngineSettings,
    workload: Workload,
    concurrency: int,
    pairs: int,
    *,
    ours_url: str,
    peer_url: str,
    peer_name: str,
    peer_model: str,
) -> PeerRow:
    """Two servers under the same streaming clients, alternating."""

    def rate(name: str, url: str, model: str) -> float:
        run = HttpDriver(url, model).run_closed(workload.jobs(), concurrency=concurrency)
        return tokens_per_s(run, of=f"{name}, {workload.name} at concurrency {concurrency}")

    measured = alternate(
        pairs,
        lambda: rate("parity serve", ours_url, settings.model),
        lambda: rate(peer_name, peer_url, peer_model),
    )
    return make_row(settings.model, peer_name, workload, concurrency, measured, "over HTTP")


def workload_of(input_len: int, output_len: int, count: int, seed: int) -> Workload:
    """Unique prompts of one length."""
    lengths = Lengths(input_len=input_len, output_len=output_len)
    return Workload(name=f"{input_len}/{output_len}", lengths=lengths, num_prompts=count, seed=seed)
