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
from typing import NamedTuple

from parity.bench.bench_run import BenchRun
from parity.bench.in_process import InProcessDriver
from parity.bench.over_http import HttpDriver
from parity.bench.replay import record_calls, replay_s
from parity.bench.workload import Lengths, PrefixShape, Workload
from parity.errors import UsageError
from parity.models import resolve_model
from parity.serve.served_model import EngineSettings, ServedModel, open_served
from parity.systems.server_process import ServerDied, ServerProcess
from scheduler.limits import Layout

START_TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerRow:
    """Ours against one peer: tokens/s of both as medians, and the median, the least and the greatest of the
    pairs' ratios (ours over peer).
    """

    model: str
    peer: str
    concurrency: int
    input_len: int
    ours_tokens_per_s: float
    peer_tokens_per_s: float
    ratio: float
    least: float
    greatest: float
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
    ratios = [ours / other for ours, other in pairs]
    return PeerRow(
        model=model,
        peer=peer,
        concurrency=concurrency,
        input_len=workload.lengths.input_len,
        ours_tokens_per_s=median(ours for ours, _ in pairs),
        peer_tokens_per_s=median(other for _, other in pairs),
        ratio=median(ratios),
        least=min(ratios),
        greatest=max(ratios),
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
    """Ours against the same calls with no scheduler and no sampling: how near the physical limit is.

    The calls of several shards are made side by side as theirs are, with no step that waits for all.
    """
    recorded, recorders = record_calls(served.engine)
    run = InProcessDriver(served, recorder=recorded).run_closed(workload.jobs(), concurrency=concurrency)
    tokens = sum(record.output_tokens for record in run.completed)
    calls = [recorder.calls for recorder in recorders]

    def ours() -> float:
        driver = InProcessDriver(served, clock=clock)
        return tokens_per_s(driver.run_closed(workload.jobs(), concurrency=concurrency))

    def replay() -> float:
        return replay_s(served.pools, calls, clock, num_threads=getattr(served.engine, "num_threads", 1))

    measured = alternate(pairs, ours, lambda: tokens / replay())
    return make_row(
        served.settings.model,
        "raw llama_decode",
        workload,
        concurrency,
        measured,
        f"{sum(len(call.tokens) > 0 for each in calls for call in each)} calls",
    )


# -- layouts


class Way(NamedTuple):
    """How somebody else would run the model: settings that replace ours; None leaves what ours are."""

    layout: Layout
    flash_attention: bool | None
    shards: int | None = 1


LAYOUTS: dict[str, Way] = {
    "one pool": Way(Layout.UNIFIED, None),
    "stock, flash attention": Way(Layout.STOCK, True),
    "stock, no flash attention": Way(Layout.STOCK, False),
    "streams, no flash attention": Way(Layout.STREAMS, False),
    "streams, flash attention": Way(Layout.STREAMS, True),
}


def chosen_layouts(names: Sequence[str], settings: EngineSettings) -> tuple[str, ...]:
    """Names of ``LAYOUTS`` to compare with, by default all. Raises ``UsageError`` where ours are the same."""
    is_one_pool = settings.layout is Layout.UNIFIED and settings.shards == 1
    if is_one_pool and "one pool" in names:
        raise UsageError("--peer-layout 'one pool'", why="ours are one pool", todo="give --shards 2 or more")
    return tuple(names) or tuple(name for name in LAYOUTS if not (is_one_pool and name == "one pool"))


def price_rows(
    settings: EngineSettings,
    workloads: Sequence[Workload],
    concurrencies: Sequence[int],
    pairs: int,
    *,
    layouts: Sequence[str] = tuple(LAYOUTS),
    report: Callable[[str], None] = lambda what: None,
    clock: Callable[[], float] = perf_counter,
) -> Iterator[PeerRow]:
    """The price of exactness: ours against what others would run, exact or not; each row as it is known.

    Prompts that share nothing are run without the prefix cache; others with it, and the tokens that it saved
    are told.
    """
    with contextlib.closing(open_served(settings)) as ours:
        for peer in layouts:
            way = LAYOUTS[peer]
            other_settings = replace(settings, **way._asdict())
            if way.layout is Layout.STREAMS:
                # the same cells in all, cut into private parts that hold one session each
                longest = max(workload.longest_session() for workload in workloads)
                other_settings = replace(other_settings, pool_cells=longest)
            with contextlib.closing(open_served(other_settings)) as other:
                for workload in workloads:
                    for n in concurrencies:
                        report(f"{peer}, N={n}, prompts of {workload.lengths.input_len}")
                        yield price_row(ours, other, peer, workload, n, pairs, clock)


def price_row(
    ours: ServedModel,
    other: ServedModel,
    peer: str,
    workload: Workload,
    concurrency: int,
    pairs: int,
    clock: Callable[[], float] = perf_counter,
) -> PeerRow:
    """Ours against one other way to run the model."""
    jobs = replace(workload, num_prompts=2 * concurrency).jobs()
    shares = workload.shape is not PrefixShape.UNIQUE
    saved: dict[str, float] = {}

    def rate(served: ServedModel, side: str) -> float:
        driver = InProcessDriver(served, prefix_cache=shares, clock=clock)
        run = driver.run_closed(jobs, concurrency=concurrency)
        saved[side] = run.engine["prefix_tokens_saved"]
        return tokens_per_s(run)

    measured = alternate(pairs, lambda: rate(ours, "ours"), lambda: rate(other, "peer"))
    note = f"prefix tokens saved: {saved['ours']:.0f}, peer {saved['peer']:.0f}" if shares else ""
    return make_row(ours.settings.model, peer, workload, concurrency, measured, note)


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
        "--shards": settings.shards,
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


def workload_of(
    input_len: int, output_len: int, count: int, seed: int, shape: PrefixShape = PrefixShape.UNIQUE
) -> Workload:
    """Prompts of one length."""
    lengths = Lengths(input_len=input_len, output_len=output_len)
    name = f"{input_len}/{output_len}"
    return Workload(name=name, lengths=lengths, num_prompts=count, seed=seed, shape=shape)
