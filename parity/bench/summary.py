"""From records to numbers, named and defined as in ``vllm bench serve``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from parity.bench.bench_run import BenchRun, RequestRecord
from parity.bench.tails import mean, percentile
from parity.errors import UsageError

METRICS = ("ttft", "tpot", "itl", "e2el")


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodput:
    """Latency objectives in ms; a request is good when it meets all that are set."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    e2el_ms: float | None = None

    @staticmethod
    def parse(items: Sequence[str]) -> Goodput:
        """From ``ttft:200 tpot:50 e2el:1000``. Raises ``UsageError``."""
        values: dict[str, float] = {}
        for item in items:
            name, _, text = item.partition(":")
            try:
                value = float(text)
                if name not in ("ttft", "tpot", "e2el") or not value > 0:
                    raise ValueError
            except ValueError:
                raise UsageError(
                    f"goodput objective {item!r}",
                    why="it is not NAME:MS with ttft, tpot or e2el",
                    todo="write for example --goodput ttft:200 --goodput tpot:50",
                ) from None
            values[f"{name}_ms"] = value
        return Goodput(**values)

    @property
    def is_set(self) -> bool:
        return any(value is not None for value in (self.ttft_ms, self.tpot_ms, self.e2el_ms))

    def is_met(self, record: RequestRecord) -> bool:
        """Whether a completed request met every objective; an undefined TPOT counts as met."""
        tpot_s = record.tpot_s
        return (
            (self.ttft_ms is None or record.ttft_s * 1e3 <= self.ttft_ms)
            and (self.tpot_ms is None or tpot_s is None or tpot_s * 1e3 <= self.tpot_ms)
            and (self.e2el_ms is None or record.e2el_s * 1e3 <= self.e2el_ms)
        )


def values_ms(run: BenchRun, metric: str) -> list[float]:
    """All values of a metric in ms over the completed requests."""
    done = run.completed
    if metric == "itl":
        return [value * 1e3 for record in done for value in record.itl_s]
    raw = [getattr(record, f"{metric}_s") for record in done]
    return [value * 1e3 for value in raw if value is not None]


def summarise(
    run: BenchRun,
    *,
    goodput: Goodput = Goodput(),
    metrics: Sequence[str] = METRICS,
    percentiles: Sequence[float] = (50, 99),
) -> dict[str, float | int | None]:
    """One flat row. A percentile that the sample cannot carry is None; throughputs are per second."""
    done, seconds = run.completed, run.duration_s
    inputs, outputs = sum(r.prompt_tokens for r in done), sum(r.output_tokens for r in done)
    row: dict[str, float | int | None] = {
        "duration": seconds,
        "num_requests": len(run.requests),
        "completed": len(done),
        "failed": len(run.requests) - len(done),
        "resent": sum(record.is_resent for record in run.requests),
        "total_input_tokens": inputs,
        "total_output_tokens": outputs,
        "request_throughput": len(done) / seconds if seconds else None,
        "output_throughput": outputs / seconds if seconds else None,
        "total_token_throughput": (inputs + outputs) / seconds if seconds else None,
        "request_goodput": None,
    }
    if goodput.is_set:
        row["request_goodput"] = sum(map(goodput.is_met, done)) / seconds
    for metric in metrics:
        values = values_ms(run, metric)
        row[f"mean_{metric}_ms"] = mean(values)
        for percent in percentiles:
            row[f"p{percent:g}_{metric}_ms"] = percentile(values, percent)
    return {**row, **run.engine}
