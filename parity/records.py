"""Records of the framework: a case says what runs, an outcome what happened, a verdict what that means."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from enum import Enum
from typing import Any

from parity.errors import ExitCode, UsageError
from scheduler.limits import Layout, StepLimits
from scheduler.records import Request, SamplingParams, ServiceLevel

CASE_FORMAT = 1


class Verdict(Enum):
    """Three values, to the exit code. Merging takes the worst: pass < unknown < fail."""

    PASS = "pass"
    UNKNOWN = "unknown"
    FAIL = "fail"

    @property
    def exit_code(self) -> ExitCode:
        return {Verdict.PASS: ExitCode.PASS, Verdict.UNKNOWN: ExitCode.UNKNOWN, Verdict.FAIL: ExitCode.FAIL}[
            self
        ]

    @staticmethod
    def merge(verdicts: Iterable[Verdict]) -> Verdict:
        """The worst of the verdicts; of none at all, unknown: a run that judged nothing proves nothing."""
        order = [Verdict.PASS, Verdict.UNKNOWN, Verdict.FAIL]
        return order[max((order.index(verdict) for verdict in verdicts), default=1)]


class Tier(Enum):
    """What is compared: float32 logits of every generated step, or output tokens."""

    BITS = "bits"
    BYTES = "bytes"


class FaultKind(Enum):
    """What happens during a run. The first two are ordinary events, the rest are failures of something."""

    CANCEL = "cancel"
    PREEMPT = "preempt"
    NO_SLOT = "no_slot"
    DECODE_ERROR = "decode_error"
    SLOW_STEP = "slow_step"
    CLOCK_JUMP = "clock_jump"
    WORKER_KILLED = "worker_killed"
    OUT_OF_MEMORY = "out_of_memory"
    STAGE_LOST = "stage_lost"
    DISK_FULL = "disk_full"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault: before step ``step``, or, with ``in_flight``, between that step's launch and its result.

    ``session`` is an index into the case's sessions for cancel and preempt; ``call`` is the native call that
    fails; ``amount`` is ms for a slow step or a clock jump.
    """

    kind: FaultKind
    step: int
    session: int = 0
    in_flight: bool = False
    call: int = 0
    amount: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """One request of a case and what the scheduler may not know: how long its output really is."""

    prompt: tuple[int, ...]
    max_tokens: int
    arrival_step: int = 0
    sampling: SamplingParams = SamplingParams()
    priority: int = 0
    client_id: str = "default"
    slo: ServiceLevel = ServiceLevel()
    stop_token_ids: tuple[int, ...] = ()
    hidden_output_tokens: int | None = None

    def to_request(self, index: int, *, arrival_ms: float, generation: int = 0) -> Request:
        """The visible part as a scheduler request named ``s<index>``."""
        return Request(
            request_id=f"s{index}",
            prompt=self.prompt,
            max_tokens=self.max_tokens,
            generation=generation,
            client_id=self.client_id,
            priority=self.priority,
            arrival_ms=arrival_ms,
            slo=self.slo,
            sampling=self.sampling,
            stop_token_ids=self.stop_token_ids,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A complete description of a run; equal cases give equal traces.

    ``model`` is a model specification (``llama``, ``qwen3next:q8_0``, a path); ``pool_cells`` counts usable
    cells of the pool (per stream in ``streams``); ``stage_cells`` overrides it per stage of ``split``.
    ``kv_type`` is how cells are stored. llama.cpp casts float32 cells to float16 before flash attention, so in
    ``unified`` and ``stock`` f32 costs twice the memory and computes what f16 computes, bit for bit; in
    ``streams``, where flash attention is off, it is another computation.
    """

    family: str
    model: str
    sessions: tuple[Session, ...]
    layout: Layout = Layout.UNIFIED
    kv_type: str = "f16"
    pool_cells: int = 1000
    num_sequences: int = 32
    max_num_batched_tokens: int = 64
    max_num_seqs: int = 16
    max_chunk_tokens: int = 2048
    max_waiting: int = 1_000_000
    prefix_cache: bool = True
    prefix_block_tokens: int = 16
    policy: str = "fcfs"
    policy_options: tuple[tuple[str, Any], ...] = ()
    faults: tuple[Fault, ...] = ()
    split: str | None = None
    stage_cells: tuple[int, ...] = ()
    ms_per_step: float = 10.0

    def step_limits(self) -> StepLimits:
        """The scheduler's limits of this case."""
        return StepLimits(
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_num_seqs=self.max_num_seqs,
            max_chunk_tokens=self.max_chunk_tokens,
            max_waiting=self.max_waiting,
            prefix_cache=self.prefix_cache,
            prefix_block_tokens=self.prefix_block_tokens,
        )

    def to_json(self) -> str:
        """The case as a file's text: stable, indented, one key a line."""
        data = {"format": CASE_FORMAT, **asdict(self, dict_factory=plain)}
        return json.dumps(data, indent=1, sort_keys=False) + "\n"

    @staticmethod
    def from_json(text: str, *, where: str = "case") -> Case:
        """Read what ``to_json`` wrote. Raises ``UsageError`` naming ``where`` and the key that is wrong."""
        try:
            data = json.loads(text)
            if not isinstance(data, dict) or data.pop("format", None) != CASE_FORMAT:
                raise ValueError(f"not a case file of format {CASE_FORMAT}")
            data["layout"] = Layout(data["layout"])
            data["sessions"] = tuple(_session(item) for item in data["sessions"])
            data["faults"] = tuple(
                Fault(**{**item, "kind": FaultKind(item["kind"])}) for item in data["faults"]
            )
            data["policy_options"] = tuple((key, value) for key, value in data["policy_options"])
            data["stage_cells"] = tuple(data["stage_cells"])
            case = Case(**data)
            case.step_limits()
            for index, session in enumerate(case.sessions):
                session.to_request(index, arrival_ms=0.0)
            return case
        except (KeyError, TypeError, ValueError) as error:
            raise UsageError(
                "case cannot be read",
                where=where,
                why=str(error),
                todo="write it with a failing run or `parity fuzz`",
            ) from error


def plain(items: list[tuple[str, Any]]) -> dict[str, Any]:
    """A ``dict_factory`` of ``asdict`` for JSON: enums by value, tuples as lists."""
    return {
        key: value.value if isinstance(value, Enum) else list(value) if isinstance(value, tuple) else value
        for key, value in items
    }


def _session(item: dict[str, Any]) -> Session:
    return Session(
        **{
            **item,
            "prompt": tuple(item["prompt"]),
            "stop_token_ids": tuple(item["stop_token_ids"]),
            "sampling": SamplingParams(**item["sampling"]),
            "slo": ServiceLevel(**item["slo"]),
        }
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """What a result holds for."""

    commit: str
    engine: str
    engine_build: str
    cpu: str
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """The first step at which one session differs from itself alone.

    ``step`` counts the session's generated tokens from 0; ``margin`` is the reference's top-1 minus top-2
    logit there; ``distance`` the largest absolute logit difference; ``neighbours`` who else was in that
    batch; ``chunks`` the session's intervals so far, ``cells`` where its rows lay (stage 0). ``distances`` go
    on from ``distance`` over the next tokens, as long as both have seen the same text.
    """

    session: int
    step: int
    scheduler_step: int
    expected_token: int | None
    actual_token: int | None
    margin: float
    distance: float
    neighbours: tuple[int, ...]
    chunks: tuple[tuple[int, int], ...]
    cells: tuple[int, ...]
    distances: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What one case came to. ``problems`` are failed checks other than identity, one sentence each.

    In ``stock`` ``noise`` is how far logits moved, ``changes`` counts changed tokens by why they changed, and
    ``divergences`` are only those that noise does not explain.
    """

    case: Case
    verdict: Verdict
    sessions: int = 0
    bit_identical: int = 0
    byte_identical: int = 0
    crashed: bool = False
    reason: str = ""
    divergences: tuple[Divergence, ...] = ()
    problems: tuple[str, ...] = ()
    marks: Mapping[str, int] = field(default_factory=dict)
    noise: tuple[float, ...] = ()
    changes: Mapping[str, int] = field(default_factory=dict)
    stderr: str = ""

    def reaches(self, tier: Tier) -> bool:
        """Whether nothing went wrong and every session is identical as far as ``tier`` compares."""
        identical = self.bit_identical if tier is Tier.BITS else self.byte_identical
        return not self.crashed and not self.problems and identical == self.sessions


def outcome_to_data(outcome: Outcome) -> dict[str, Any]:
    """JSON-able form of an outcome without its case."""
    data = asdict(replace(outcome, case=None))
    data["verdict"] = outcome.verdict.value
    return data


def outcome_from_data(case: Case, data: dict[str, Any]) -> Outcome:
    """What ``outcome_to_data`` wrote, its case attached again."""
    tuples = {key: tuple(data[key]) for key in ("problems", "noise")}
    divergences = tuple(
        Divergence(
            **{
                key: tuple(map(tuple, value))
                if key == "chunks"
                else tuple(value)
                if isinstance(value, list)
                else value
                for key, value in item.items()
            }
        )
        for item in data["divergences"]
    )
    return Outcome(
        **{**data, **tuples, "case": case, "divergences": divergences, "verdict": Verdict(data["verdict"])}
    )
