"""Records of the framework: a case says what runs, an outcome what happened, a verdict what that means."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from enum import Enum
from types import MappingProxyType
from typing import Any

from parity.errors import ExitCode, UsageError
from parity.plain_data import load_json, read_record
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
    """What happens during a run. The first three are ordinary events, the rest are failures of something.

    RESUBMIT is a caller that gives up and asks the same again under the same id: a cancel, and as soon as it
    has taken effect a new submission with the next generation.
    """

    CANCEL = "cancel"
    PREEMPT = "preempt"
    RESUBMIT = "resubmit"
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

    ``session`` is an index into the case's sessions for cancel, preempt and resubmit; ``call`` is the native
    call that fails; ``amount`` is ms for a slow step or a clock jump.
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
    cells of the pool (per stream in ``streams``); ``stage_cells`` overrides it per stage of ``split``. With
    ``shards`` there are so many pools of that size, and ``num_sequences`` in each.
    ``kv_type`` is how cells are stored. llama.cpp casts float32 cells to float16 before flash attention, so
    in ``unified`` and ``stock`` f32 costs twice the memory and computes what f16 computes, bit for bit; in
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
    steps_in_flight: int = 1
    shards: int = 1

    def step_limits(self) -> StepLimits:
        """The scheduler's limits of this case."""
        return StepLimits(
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_num_seqs=self.max_num_seqs,
            max_chunk_tokens=self.max_chunk_tokens,
            max_waiting=self.max_waiting,
            prefix_cache=self.prefix_cache,
            prefix_block_tokens=self.prefix_block_tokens,
            steps_in_flight=self.steps_in_flight,
        )

    def to_json(self) -> str:
        """The case as a file's text: stable, indented, one key a line."""
        data = {"format": CASE_FORMAT, **asdict(self, dict_factory=plain)}
        for name in ("steps_in_flight", "shards"):  # files that were written before they were there stay
            if getattr(self, name) == 1:
                del data[name]
        return json.dumps(data, indent=1, sort_keys=False) + "\n"

    @staticmethod
    def from_json(text: str, *, where: str = "case") -> Case:
        """Read what ``to_json`` wrote. Raises ``UsageError`` naming ``where`` and the key that is wrong."""
        try:
            data = load_json(text)
        except ValueError as error:
            raise _unreadable(error, where=where) from error
        return Case.from_data(data, where=where)

    @staticmethod
    def from_data(data: Any, *, where: str = "case") -> Case:
        """The case that such a text holds, from its data. Raises ``UsageError`` like ``from_json``."""
        try:
            if not isinstance(data, dict) or data.get("format") != CASE_FORMAT:
                raise ValueError(f"not a case file of format {CASE_FORMAT}")
            ours = ("format", "brought")  # who ran it is no part of what ran
            case = read_record(Case, {key: value for key, value in data.items() if key not in ours})
            case.step_limits()
            for index, session in enumerate(case.sessions):
                session.to_request(index, arrival_ms=0.0)
            return case
        except ValueError as error:
            raise _unreadable(error, where=where) from error


def _unreadable(error: ValueError, *, where: str) -> UsageError:
    todo = "write it with a failing run or `parity fuzz`"
    return UsageError("case cannot be read", where=where, why=str(error), todo=todo)


def plain(items: list[tuple[str, Any]]) -> dict[str, Any]:
    """A ``dict_factory`` of ``asdict`` for JSON: enums by value, tuples as lists."""
    return {
        key: value.value if isinstance(value, Enum) else list(value) if isinstance(value, tuple) else value
        for key, value in items
    }


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


BITS, BYTES, CRASH, INTERNAL = "bits", "bytes", "crash", "internal"
NOISE = "noise"
_COUNTED_APART = (BITS, BYTES, NOISE, CRASH)  # explained by divergences, or by the engine's own last words


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that a checker found wrong: by whom, in one sentence, and as data.

    ``checker`` is the checker's name. ``data`` is JSON-able and has what is known of: ``step`` (the
    scheduler's), ``session``, ``stage``, ``cells``, ``operation``, and ``exception`` (the type's name)
    where the checker itself broke.
    """

    checker: str
    text: str
    data: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_law(self) -> bool:
        """Found by another check than identity (whose findings divergences explain) and no crash."""
        return self.checker not in _COUNTED_APART

    def __str__(self) -> str:
        return f"{self.checker}: {self.text}"


def earliest_first(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """In order of scheduler steps; those that belong to no step last, otherwise as they were found."""
    return tuple(sorted(findings, key=lambda finding: finding.data.get("step", float("inf"))))


def verdict_of(
    findings: Iterable[Finding],
    *,
    sessions: int,
    tier: Tier,
    layout: Layout,
    marks: Mapping[str, int] = MappingProxyType({}),
    required: Iterable[str] = (),
    inexact: str = "",
) -> tuple[Verdict, str]:
    """The verdict and its reason (empty for a pass): the only place where one is made.

    ``sessions`` were judged; ``required`` names the marks that may not be zero in ``marks``; ``inexact`` says
    why logits cannot be compared here. Other logits than alone count under tier bits, unless they cannot be
    compared; in ``stock`` they are weighed as noise, whose checker has the word. Everything else counts
    always. Where nothing is wrong, nothing compared and bits that could not be compared are unknown.
    """
    compares_bits = tier is Tier.BITS and not inexact and layout is not Layout.STOCK
    measured = (BITS, BYTES) if layout is Layout.STOCK else () if compares_bits else (BITS,)
    if any(finding.checker not in measured for finding in findings):
        return Verdict.FAIL, "a case failed"
    missing = [mark for mark in required if not marks.get(mark)]
    if missing:
        return Verdict.FAIL, f"nothing exercised: {', '.join(missing)}"
    if not sessions:
        return Verdict.UNKNOWN, "no session was compared"
    if tier is Tier.BITS and inexact and layout is not Layout.STOCK:
        return Verdict.UNKNOWN, f"bits not comparable: {inexact}"
    return Verdict.PASS, ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What one case came to. ``findings`` is everything that was found wrong, earliest first.

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
    findings: tuple[Finding, ...] = ()
    marks: Mapping[str, int] = field(default_factory=dict)
    noise: tuple[float, ...] = ()
    changes: Mapping[str, int] = field(default_factory=dict)
    stderr: str = ""

    @property
    def problems(self) -> tuple[str, ...]:
        """Findings other than of identity, one sentence each."""
        return tuple(str(finding) for finding in self.findings if finding.is_law)

    def verdict_for(self, tier: Tier, *, inexact: str = "") -> Verdict:
        """The verdict when ``tier`` is compared."""
        return verdict_of(
            self.findings, sessions=self.sessions, tier=tier, layout=self.case.layout, inexact=inexact
        )[0]


def crashed_outcome(case: Case, reason: str, *, stderr: str = "") -> Outcome:
    """The engine ended its process, hung, or would have: ``reason`` in its own words."""
    return Outcome(
        case=case,
        verdict=Verdict.FAIL,
        crashed=True,
        reason=reason,
        findings=(Finding(CRASH, reason),),
        stderr=stderr,
    )


def broken_outcome(case: Case, error: str, *, stderr: str) -> Outcome:
    """The scheduler under test, or code of ours, raised ``error``: what a case came to, not a run's end."""
    found = Finding(INTERNAL, " ".join(error.split()))
    return Outcome(case=case, verdict=Verdict.FAIL, findings=(found,), stderr=stderr)


def outcome_to_data(outcome: Outcome) -> dict[str, Any]:
    """JSON-able form of an outcome without its case; ``problems`` are the findings' texts."""
    data = asdict(outcome)
    data["case"] = None
    data["verdict"], data["problems"] = outcome.verdict.value, list(outcome.problems)
    return data


def outcome_from_data(case: Case, data: dict[str, Any]) -> Outcome:
    """What ``outcome_to_data`` wrote, its case attached again."""
    made = {
        "case": case,
        "verdict": Verdict(data["verdict"]),
        "divergences": read_record(tuple[Divergence, ...], data["divergences"]),
        "findings": read_record(tuple[Finding, ...], data["findings"]),
        "noise": tuple(data["noise"]),
    }
    kept = {key: value for key, value in data.items() if key != "problems"}
    return Outcome(**{**kept, **made})
