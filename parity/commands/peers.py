"""``parity peers``: the same work on ours and on others, in one run, alternating; ratios are printed."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from time import monotonic
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from parity.bench import peers
from parity.bench.clocks import ClockKind, make_clock
from parity.bench.workload import PrefixShape
from parity.commands.cutover import whole_numbers
from parity.errors import ExitCode, UsageError
from parity.life_signs import LifeSigns
from parity.outputs import OUTPUT_FILE, save_output
from parity.run.profiles import provenance_line
from parity.serve.options import engine_options, settings_from
from parity.serve.served_model import EngineSettings, open_served


@click.command()
@engine_options
@click.option(
    "--against",
    "kinds",
    multiple=True,
    type=click.Choice(["raw", "layouts", "server"]),
    help="raw llama_decode, other layouts, another server (repeatable).  [default: raw]",
)
@click.option("--llama-server", type=click.Path(path_type=Path), help="Binary to start for --against server.")
@click.option("--peer-url", metavar="URL", help="A server that runs already, instead of --llama-server.")
@click.option("--peer-model", help="The model's name there.  [default: MODEL]")
@click.option("--concurrency", "counts", default="32", show_default=True, metavar="N,N,...")
@click.option("--input-lens", default="32", show_default=True, metavar="TOKENS,...", help="Prompt lengths.")
@click.option("--output-len", default=64, show_default=True, type=click.IntRange(1))
@click.option(
    "--pairs", default=3, show_default=True, type=click.IntRange(1), help="Alternating runs per ratio."
)
@click.option(
    "--clock",
    default="wall",
    show_default=True,
    type=click.Choice([kind.value for kind in ClockKind]),
    help="cpu: this thread's CPU time, for a busy machine; with --threads 1, not for servers.",
)
@click.option(
    "--peer-layout",
    "layouts",
    multiple=True,
    type=click.Choice(list(peers.LAYOUTS)),
    help="Only these, for --against layouts (repeatable); one pool is for --shards.",
)
@click.option(
    "--prefix",
    "shape",
    default="unique",
    show_default=True,
    type=click.Choice([shape.value for shape in PrefixShape]),
    help="What prompts share; if anything, the prefix cache is on.",
)
@click.option(
    "--minutes",
    type=click.FloatRange(0, min_open=True),
    help="Begin no further row after so long; what was not reached is said.",
)
@click.option("--seed", default=0, show_default=True)
@click.option("--json", "json_path", type=OUTPUT_FILE, help="Write the rows here, each as it comes.")
def command(
    model: str,
    kinds: tuple[str, ...],
    counts: str,
    input_lens: str,
    output_len: int,
    pairs: int,
    seed: int,
    clock: str,
    layouts: tuple[str, ...],
    shape: str,
    minutes: float | None,
    llama_server: Path | None,
    peer_url: str | None,
    peer_model: str | None,
    json_path: Path | None,
    **options: Any,
) -> ExitCode:
    """Compare MODEL on our scheduler with peers; numbers of different runs are never compared.

    \b
    raw       the same native calls, recorded from a run, with no scheduler: the physical limit
    layouts   the price of exactness: unified against stock and streams, flash attention on and off;
              issue: --against layouts --concurrency 1,8,32 --input-lens 32,200
    server    llama-server with the same model, threads, context, slots and KV type, both over HTTP with
              streaming clients: --llama-server /path/to/llama-server (build llama.cpp at the commit of
              `parity doctor`), or --peer-url for a server that runs already
    """
    settings = settings_from(model, options)
    ticks = make_clock(ClockKind(clock), n_threads=settings.n_threads)
    concurrency = whole_numbers(counts, where="--concurrency")
    settings = with_room(settings, max(concurrency))
    lengths = whole_numbers(input_lens, where="--input-lens")
    if layouts and "layouts" not in kinds:
        raise UsageError("--peer-layout without --against layouts", why="it would change nothing")
    names = peers.chosen_layouts(layouts, settings)
    works = [
        (peers.workload_of(length, output_len, 2 * n, seed, PrefixShape(shape)), n)
        for length in lengths
        for n in concurrency
    ]
    until = None if minutes is None else monotonic() + 60 * minutes
    click.echo(provenance_line(seed))
    rows = Rows(json_path, until)
    with rows, LifeSigns(f"peers of {model}") as signs:
        for kind in dict.fromkeys(kinds or ("raw",)):
            if kind == "layouts":
                workloads = [peers.workload_of(n, output_len, 1, seed, PrefixShape(shape)) for n in lengths]
                made = peers.price_rows(
                    settings, workloads, concurrency, pairs, layouts=names, report=signs.say, clock=ticks
                )
                rows.take(kind, made, len(names) * len(works))
            elif kind == "raw":
                rows.take(kind, raw_rows(settings, works, pairs, ticks), len(works))
            else:
                made = server_rows(settings, works, pairs, llama_server, peer_url, peer_model or model)
                rows.take(kind, made, len(works))
    return ExitCode.UNKNOWN if rows.left else ExitCode.PASS


class Rows:
    """Rows as they come: each is told and stored at once, all are shown at the end, also when a later one
    failed. None is begun after ``until`` (seconds of the system's monotonic clock).
    """

    def __init__(self, json_path: Path | None, until: float | None) -> None:
        self.json_path, self.until = json_path, until
        self.rows: list[peers.PeerRow] = []
        self.left = 0  # rows that were not begun

    def __enter__(self) -> Rows:
        return self

    def __exit__(self, *error: object) -> None:
        if self.rows:
            Console(width=150).print(rows_table(self.rows))
        if self.left:
            click.echo(f"{self.left} rows were not reached")
        self._save()

    def take(self, kind: str, made: Iterator[peers.PeerRow], count: int) -> None:
        """Take ``count`` rows of one kind, as far as time allows."""
        with contextlib.closing(made):
            for number in range(count):
                if self.until is not None and monotonic() >= self.until:
                    self.left += count - number
                    return
                row = next(made)
                self.rows.append(row)
                click.echo(
                    f"{kind}: {row.peer}, N={row.concurrency}, prompts of {row.input_len}: {row.ratio:.3f}"
                )
                self._save()

    def _save(self) -> None:
        if self.json_path is not None:
            save_output(self.json_path, json.dumps([asdict(row) for row in self.rows], indent=1) + "\n")


def with_room(settings: EngineSettings, most: int) -> EngineSettings:
    """Lanes for the largest concurrency."""
    return replace(settings, max_num_seqs=max(settings.max_num_seqs, most))


def raw_rows(
    settings: EngineSettings, works: list, pairs: int, clock: Callable[[], float]
) -> Iterator[peers.PeerRow]:
    """A row per workload against raw calls, each as it is finished."""
    with contextlib.closing(open_served(settings)) as served:
        for workload, n in works:
            yield peers.raw_row(served, workload, n, pairs, clock)


def server_rows(
    settings: EngineSettings,
    works: list,
    pairs: int,
    binary: Path | None,
    peer_url: str | None,
    peer_model: str,
) -> Iterator[peers.PeerRow]:
    """A row per workload against another server, each as it is finished. Raises ``UsageError``."""
    if (binary is None) == (peer_url is None):
        raise UsageError(
            "--against server needs one of --llama-server and --peer-url",
            todo="point --llama-server at a llama-server binary",
        )
    with contextlib.ExitStack() as stack:
        port = peers.free_port()
        ours_url = stack.enter_context(
            peers.running_server(peers.own_server_command(settings, port), f"http://127.0.0.1:{port}")
        )
        if binary is not None:
            port = peers.free_port()
            command = peers.llama_server_command(binary, settings, port)
            peer_url = stack.enter_context(peers.running_server(command, f"http://127.0.0.1:{port}"))
        name = "llama-server" if binary is not None else peer_url
        for workload, n in works:
            yield peers.server_row(
                settings,
                workload,
                n,
                pairs,
                ours_url=ours_url,
                peer_url=peer_url,
                peer_name=name,
                peer_model=peer_model,
            )


def rows_table(rows: list[peers.PeerRow]) -> Table:
    """Rows as a table."""
    table = Table(
        "model", "peer", "N", "prompt", "ours, tokens/s", "peer, tokens/s", "ours / peer", "of pairs", "note"
    )
    for row in rows:
        table.add_row(
            row.model,
            row.peer,
            str(row.concurrency),
            str(row.input_len),
            f"{row.ours_tokens_per_s:.4g}",
            f"{row.peer_tokens_per_s:.4g}",
            f"{row.ratio:.3f}",
            f"{row.least:.2f} to {row.greatest:.2f}",
            row.note,
        )
    return table
