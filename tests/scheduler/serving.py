"""A scheduler on the exact engine for the tests of this folder: small pools, named requests, solo answers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from parity.engines.exact import ExactEngine, ExactModel, expected_tokens
from parity.telemetry import Totals
from scheduler.limits import Layout, PoolLimits, Sharing, StepLimits
from scheduler.loop import Scheduler
from scheduler.policies import make_policy
from scheduler.records import Completion, Request
from scheduler.telemetry import StepRecord


class _Everyone(dict):
    """The same forecast for every request."""

    def get(self, key: str, default: Any = None) -> dict[str, int]:
        return {"point": 1}


# room for the prompt is room enough
OPTIMISTIC = {"reservation": {"kind": "point", "forecasts": _Everyone()}}
VOCABULARY = 1 << 30  # digests practically never agree by chance


def request(name: str, prompt: int | Iterable[int], max_tokens: int = 1, **fields: Any) -> Request:
    """A request; a number stands for that many tokens of its own."""
    if isinstance(prompt, int):
        base = 1000 * (sum(map(ord, name)) + 1)
        prompt = range(base, base + prompt)
    return Request(request_id=name, prompt=tuple(prompt), max_tokens=max_tokens, **fields)


class Serving:
    """One scheduler on one exact engine, with everything that it was given and gave."""

    def __init__(
        self,
        *,
        cells: int = 64,
        ids: int = 16,
        layout: Layout = Layout.UNIFIED,
        recurrent: bool = False,
        window: int | None = None,
        stages: int = 1,
        policy: str = "fcfs",
        stops: dict[str, tuple[int, int]] | None = None,
        options: dict[str, Any] | None = None,
        max_call_rows: int = 63,
        cell_bytes: int = 0,
        **steps: Any,
    ) -> None:
        whole = recurrent or layout is Layout.STREAMS
        self.limits = tuple(
            PoolLimits(
                layout=layout,
                num_cells=cells,
                num_sequences=ids,
                recurrent=recurrent,
                max_call_rows=max_call_rows,
                cell_bytes=cell_bytes,
                sharing=Sharing.WHOLE_STATE if whole else Sharing.POSITIONAL,
            )
            for _ in range(stages)
        )
        self.model = ExactModel(recurrent=recurrent, window=window, vocabulary=VOCABULARY)
        self.stops = stops or {}
        self.engine = ExactEngine(self.limits, self.model, stops=self.stops)
        self.trace: list = []
        self.scheduler = Scheduler(
            self.engine,
            make_policy(policy, **(options or {})),
            StepLimits(**steps),
            observer=lambda flight, result: self.trace.append((flight, result)),
        )
        self.requests: dict[str, Request] = {}
        self.ends: dict[str, Completion] = {}
        self.records: list[StepRecord] = []
        self.totals = Totals()
        self.now_ms = 0.0

    def submit(self, *requests: Request) -> list:
        """Refusals, None for accepted ones."""
        self.requests |= {item.request_id: item for item in requests}
        return [self.scheduler.submit(item, self.now_ms) for item in requests]

    def step(self, count: int = 1) -> StepRecord | None:
        """The record of the last of ``count`` steps; None without one."""
        record = None
        for _ in range(count):
            record = self.scheduler.step(self.now_ms)
            self._note(record)
        return record

    def _note(self, record: StepRecord) -> None:
        self.records.append(record)
        self.totals.add(record.as_dict())
        self.now_ms += 10.0
        self.collect()

    def launch(self) -> Any:
        return self.scheduler.begin(self.now_ms)

    def commit(self, flight: Any) -> StepRecord:
        result = self.engine.execute(flight.plan, flight.batch, self.now_ms) if flight.plan.chunks else None
        record = self.scheduler.finish(result, self.now_ms)
        self._note(record)
        return record

    def collect(self) -> None:
        for completion in self.scheduler.take_completions():
            assert completion.request_id not in self.ends, f"ended twice: {completion}"
            self.ends[completion.request_id] = completion

    def run(self, most: int = 2000) -> dict[str, Completion]:
        """Step until nothing is live; then the pool must be empty."""
        for _ in range(most):
            if self.scheduler.is_idle:
                break
            self.step()
        self.collect()
        assert self.scheduler.is_idle, f"not idle after {most} steps"
        self.scheduler.drain_prefixes()
        assert [pool.num_used() for pool in self.engine.pools] == [0] * len(self.engine.pools)
        return self.ends

    def view(self, name: str) -> Any:
        return self.scheduler.table.views[name]

    def solo(self, name: str) -> tuple[int, ...]:
        """What the session gives alone."""
        item = self.requests[name]
        return expected_tokens(
            self.model,
            item.prompt,
            item.max_tokens,
            request_id=name,
            sampling=item.sampling,
            stop_token_ids=item.stop_token_ids,
            stop=self.stops.get(name),
            stages=len(self.limits),
        )

    def check_all_as_alone(self) -> None:
        """Every session that ended gave what it gives alone, and no step failed."""
        assert {name: end.tokens for name, end in self.ends.items()} == {
            name: self.solo(name) for name in self.ends
        }
        assert self.totals.values["engine_failures"] == 0


class OneShard:
    """Base of stand-ins for a memory of which policies ask facts: it is the only shard."""

    @property
    def shards(self) -> tuple[OneShard, ...]:
        return (self,)

    def home(self, request_id: str) -> OneShard:
        return self
