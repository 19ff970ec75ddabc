"""The cutover gate: the scheduler against the single lane on the same workload in one run, a row per claim.

Runs alternate and ratios are medians over pairs, so that what else the machine does hits both sides alike. A
row whose sample cannot carry its percentile is unknown, never passed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from parity.bench.bench_run import BenchRun
from parity.bench.clocks import ClockKind, make_clock
from parity.bench.in_process import InProcessDriver
from parity.bench.summary import Goodput, summarise
from parity.bench.workload import MIXES, Lengths, PrefixShape, Workload, arrival_times
from parity.records import Verdict
from parity.serve.served_model import EngineSettings, ServedModel, open_served

BASELINE = "single_lane"
POISSON_LOAD = 1.5  # offered over what the single lane serves
SINGLE_USER_PAIRS = 15  # at least: a claim of a few percent needs more pairs than a claim of twice as much


@dataclass(frozen=True, slots=True, kw_only=True)
class Margins:
    """What each row asks for; ratios are scheduler over baseline."""

    throughput: float = 2.0
    latency: float = 1.0
    goodput: float = 1.0
    curve: float = 1.0
    single_user: float = 0.97
    prefix_ttft: float = 1.0
    prefix_ttft_recurrent: float = 1.0
    prefix_gain: float = 1.0
    prefix_gain_recurrent: float = 0.9  # a restored state saves rows and costs a copy
    poisson_goodput: float = 1.0
    kv_bytes: float = 1.05


@dataclass(frozen=True, slots=True, kw_only=True)
class CutoverOptions:
    """What is measured. ``curve`` are the concurrencies of the scaling curve,
    ``target`` the one of the main rows.
    """

    target: int = 32
    curve: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    pairs: int = 3
    num_prompts: int = 128
    curve_prompts: int = 32
    lengths: Lengths = MIXES["short/long"]
    prefix_lengths: Lengths = MIXES["long/short"]
    goodput: Goodput = Goodput(ttft_ms=2000.0, tpot_ms=200.0)
    percentile: float = 99
    margins: Margins = Margins()
    seed: int = 0
    clock: ClockKind = ClockKind.WALL


@dataclass(frozen=True, slots=True, kw_only=True)
class GateRow:
    """One claim about one model: what was compared, the number, what was asked for, and whether it held."""

    model: str
    claim: str
    measured: float | None
    bound: str
    verdict: Verdict
    detail: str = ""


def at_least(model: str, claim: str, measured: float | None, margin: float, detail: str = "") -> GateRow:
    """A row that passes when the number is at least the margin; unknown without a number."""
    verdict = Verdict.UNKNOWN if measured is None else Verdict.PASS if measured >= margin else Verdict.FAIL
    return GateRow(
        model=model, claim=claim, measured=measured, bound=f">= {margin:g}", verdict=verdict, detail=detail
    )


def at_most(model: str, claim: str, measured: float | None, margin: float, detail: str = "") -> GateRow:
    """A row that passes when the number is at most the margin; unknown without a number."""
    verdict = Verdict.UNKNOWN if measured is None else Verdict.PASS if measured <= margin else Verdict.FAIL
    return GateRow(
        model=model, claim=claim, measured=measured, bound=f"<= {margin:g}", verdict=verdict, detail=detail
    )


class Cutover:
    """Measures one model. ``report`` hears what runs now."""

    def __init__(
        self,
        settings: EngineSettings,
        options: CutoverOptions,
        report: Callable[[str], None] = lambda what: None,
    ) -> None:
        most = max(*options.curve, options.target)
        self.options, self._report = options, report
        self.settings = replace(settings, max_num_seqs=max(most, settings.max_num_seqs))
        self._clock = make_clock(options.clock, n_threads=settings.n_threads)
        self.served: ServedModel | None = None

    def rows(self) -> list[GateRow]:
        """All performance rows. The correctness row is the caller's: it comes first and decides alone."""
        self.served = open_served(self.settings)
        try:
            rows = [*self._target_rows(), *self._curve_rows(), *self._prefix_rows()]
            return [*rows, *self._poisson_rows(), self._overload_row()]
        finally:
            self.served.close()

    # -- measuring

    def _workload(self, name: str, lengths: Lengths, count: int, shape: PrefixShape) -> Workload:
        return Workload(name=name, lengths=lengths, num_prompts=count, shape=shape, seed=self.options.seed)

    def _run(self, workload: Workload, concurrency: int, **variant: Any) -> dict[str, Any]:
        run = InProcessDriver(self.served, clock=self._clock, **variant).run_closed(
            workload.jobs(), concurrency=concurrency
        )
        return self._summary(run)

    def _summary(self, run: BenchRun) -> dict[str, Any]:
        return summarise(run, goodput=self.options.goodput, percentiles=(50, self.options.percentile))

    def _pairs(
        self,
        workload: Workload,
        concurrency: int,
        old: dict[str, Any],
        new: dict[str, Any],
        *,
        fewest: int = 1,
    ) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        """(old, new) summaries; the order within a pair alternates. One run before them warms both up."""
        pairs = []
        warm = replace(workload, num_prompts=min(workload.num_prompts, 4))
        self._run(warm, 1, **new)
        for number in range(max(self.options.pairs, fewest)):
            self._report(f"{workload.name} {workload.shape.value}, N={concurrency}, pair {number + 1}")
            order = (old, new) if number % 2 == 0 else (new, old)
            first, second = (self._run(workload, concurrency, **variant) for variant in order)
            pairs.append((first, second) if number % 2 == 0 else (second, first))
        return pairs

    # -- rows

    def _target_rows(self) -> list[GateRow]:
        options, margins, model = self.options, self.options.margins, self.settings.model
        workload = self._workload("short/long", options.lengths, options.num_prompts, PrefixShape.UNIQUE)
        pairs = self._pairs(workload, options.target, {"policy": BASELINE}, {})
        at = f"N={options.target}"
        tail, first = f"p{options.percentile:g}_e2el_ms", f"p{options.percentile:g}_ttft_ms"
        return [
            at_least(
                model,
                f"throughput, {at}",
                median_ratio(pairs, "output_throughput"),
                margins.throughput,
                sides(pairs, "output_throughput", "tokens/s"),
            ),
            at_most(
                model,
                f"p{options.percentile:g} latency, {at}",
                median_ratio(pairs, tail),
                margins.latency,
                sides(pairs, tail, "ms"),
            ),
            at_most(
                model,
                f"p{options.percentile:g} TTFT, {at}",
                median_ratio(pairs, first),
                margins.latency,
                sides(pairs, first, "ms"),
            ),
            at_least(
                model,
                f"goodput, {at}",
                median_ratio(pairs, "request_goodput"),
                margins.goodput,
                sides(pairs, "request_goodput", "requests/s"),
            ),
            at_most(
                model,
                f"KV bytes per session, {at}",
                median_ratio(pairs, "kv_bytes_per_session"),
                margins.kv_bytes,
                sides(pairs, "kv_bytes_per_session", "bytes"),
            ),
        ]

    def _curve_rows(self) -> list[GateRow]:
        """No regression for a single user, and more than the baseline everywhere else."""
        options, margins, model = self.options, self.options.margins, self.settings.model
        workload = self._workload("short/long", options.lengths, options.curve_prompts, PrefixShape.UNIQUE)
        rows = []
        for concurrency in options.curve:
            count = max(
                options.curve_prompts // 4 if concurrency == 1 else options.curve_prompts, concurrency
            )
            pairs = self._pairs(
                replace(workload, num_prompts=count),
                concurrency,
                {"policy": BASELINE},
                {},
                fewest=SINGLE_USER_PAIRS if concurrency == 1 else 1,
            )
            margin = margins.single_user if concurrency == 1 else margins.curve
            rows.append(
                at_least(
                    model,
                    f"scaling curve, N={concurrency}",
                    median_ratio(pairs, "output_throughput"),
                    margin,
                    sides(pairs, "output_throughput", "tokens/s"),
                )
            )
        return rows

    def _poisson_rows(self) -> list[GateRow]:
        """Both at the same Poisson arrivals, at a rate that the baseline cannot keep up with:
        latencies count from the arrival.
        """
        options, margins, model = self.options, self.options.margins, self.settings.model
        workload = self._workload("short/long", options.lengths, options.num_prompts, PrefixShape.UNIQUE)
        alone = self._run(replace(workload, num_prompts=options.curve_prompts), 1, policy=BASELINE)
        rate = POISSON_LOAD * (alone["request_throughput"] or 1.0)
        times_s = arrival_times(options.num_prompts, request_rate=rate, burstiness=1.0, seed=options.seed)
        pairs = []
        for number in range(options.pairs):
            self._report(f"Poisson arrivals, {rate:.3g} a second, pair {number + 1}")
            sides_of = [{"policy": BASELINE}, {}]
            found = [
                self._summary(
                    InProcessDriver(self.served, clock=self._clock, **variant).run_open(
                        workload.jobs(), times_s=times_s
                    )
                )
                for variant in (sides_of if number % 2 == 0 else sides_of[::-1])
            ]
            pairs.append(tuple(found if number % 2 == 0 else found[::-1]))
        at, tail = f"Poisson {POISSON_LOAD:g} x single lane", f"p{options.percentile:g}_ttft_ms"
        return [
            at_least(
                model,
                f"goodput, {at}",
                median_ratio(pairs, "request_goodput"),
                margins.poisson_goodput,
                sides(pairs, "request_goodput", "requests/s"),
            ),
            at_most(
                model,
                f"p{options.percentile:g} TTFT, {at}",
                median_ratio(pairs, tail),
                margins.latency,
                sides(pairs, tail, "ms"),
            ),
        ]

    def _prefix_rows(self) -> list[GateRow]:
        """Time to first token and throughput with and without sharing; a recurrent family restores a
        state and has its own margins.
        """
        options, margins = self.options, self.options.margins
        recurrent = self.served.family.is_hybrid
        workload = self._workload(
            "long/short", options.prefix_lengths, options.curve_prompts, PrefixShape.SHARED
        )
        pairs = self._pairs(workload, 1, {"prefix_cache": False}, {"prefix_cache": True})
        ratio = median_ratio(pairs, "p50_ttft_ms")
        hits = median([new["prefix_hit_rate"] for _, new in pairs])
        model, how = self.settings.model, " (state restore)" * recurrent
        many = self._pairs(workload, options.target, {"prefix_cache": False}, {"prefix_cache": True})
        return [
            at_least(
                model,
                f"shared-prefix TTFT, times faster{how}",
                None if not ratio else 1 / ratio,
                margins.prefix_ttft_recurrent if recurrent else margins.prefix_ttft,
                f"{sides(pairs, 'p50_ttft_ms', 'ms')}, hit rate {hits:.2f}",
            ),
            at_least(
                model,
                f"shared-prefix gain in throughput, N={options.target}{how}",
                median_ratio(many, "output_throughput"),
                margins.prefix_gain_recurrent if recurrent else margins.prefix_gain,
                sides(many, "output_throughput", "tokens/s"),
            ),
        ]

    def _overload_row(self) -> GateRow:
        """Past the ceiling every request is served or refused: nothing fails, whatever the pool can hold."""
        options = self.options
        self._report("overload")
        workload = self._workload("short/long", options.lengths, 4 * options.target, PrefixShape.UNIQUE)
        small = replace(
            self.settings,
            pool_cells=4 * workload.longest_session(),
            max_waiting=options.target,
            max_num_seqs=options.target,
        )
        served = open_served(small)
        try:
            jobs = workload.jobs()
            run = InProcessDriver(served).run_open(jobs, times_s=[0.0] * len(jobs))
        finally:
            served.close()
        return overload_row(self.settings.model, run)


def overload_row(model: str, run: BenchRun) -> GateRow:
    """Judge an overloaded run: all requests have an end, some were refused, none failed in the engine."""
    refused = sum(record.error.startswith("queue is full") for record in run.requests)
    failed = len(run.requests) - len(run.completed) - refused
    broken = failed + int(run.engine["engine_failures"])
    verdict = Verdict.FAIL if broken else Verdict.PASS if refused and run.completed else Verdict.UNKNOWN
    return GateRow(
        model=model,
        claim="overload, failures",
        measured=float(broken),
        bound="== 0",
        verdict=verdict,
        detail=f"{len(run.completed)} served, {refused} refused, of {len(run.requests)}",
    )


def median_ratio(pairs: list[tuple[dict[str, Any], dict[str, Any]]], name: str) -> float | None:
    """Median over pairs of new over old; None where a side has no number or failed requests, or where neither
    side has anything: 0 against 0 shows nothing.
    """
    ratios = []
    for old, new in pairs:
        if old.get(name) is None or new.get(name) is None or old.get("failed") or new.get("failed"):
            return None
        if old[name]:
            ratios.append(new[name] / old[name])
        elif new[name]:
            ratios.append(float("inf"))
        else:
            return None
    return median(ratios) if ratios else None


def sides(pairs: list[tuple[dict[str, Any], dict[str, Any]]], name: str, unit: str) -> str:
    """Both sides' medians as text."""
    if failed := sum(side.get("failed") or 0 for pair in pairs for side in pair):
        return f"{failed} requests failed"
    values = [
        [side[name] for side in column if side.get(name) is not None] for column in zip(*pairs, strict=True)
    ]
    if not all(values):
        return "insufficient sample"
    old, new = map(median, values)
    return f"{old:.4g} -> {new:.4g} {unit}"
