"""Records of the gate: what is asked for, one check's verdict with its evidence, and the whole."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from parity.cases.policy_options import PolicyOptions
from parity.records import Divergence, Provenance, Tier, Verdict
from parity.suites.truth import Distance

DEFAULT_SESSIONS = 200
DEFAULT_SPLIT_SESSIONS = 20


class CheckKind(StrEnum):
    """What a check judges."""

    MODEL = "model"  # a row's file is there, verified and pinned
    SUITE = "suite"  # concurrent against alone, one family and layout
    SPLIT = "split"  # the same on a chain of stages
    SHARDS = "shards"  # the same in several pools side by side
    GOLDEN = "golden"  # outputs are those on record
    TRUTH = "truth"  # answers are right, up to what rounding can do
    STATES = "states"  # a restored state goes on like a recomputed one
    TEMPLATES = "templates"  # shapes of input behind faults that engines had, on the exact engine
    SMALL_POOLS = "small_pools"  # a slice of all small pools, in every policy
    HUNT = "hunt"  # tight pools and deep shared trees, in every policy
    MACHINE = "machine"  # the laws of serving, under a state machine
    POLICIES = "policies"  # every policy keeps its promises
    MUTANTS = "mutants"  # every planted fault is noticed
    SYSTEM = "system"  # a server against a known-good one, both in this run


@dataclass(frozen=True, slots=True, kw_only=True)
class GateOptions:
    """What a gate run is asked for. ``required`` maps a family to the tier that its sessions must reach;
    ``only`` names the kinds of checks to run, none for all; ``policy`` with its options schedules the suites.
    """

    families: tuple[str, ...]
    is_selection: bool
    required: Mapping[str, Tier]
    row: str = "tiny"
    sessions: int = DEFAULT_SESSIONS
    split_sessions: int = DEFAULT_SPLIT_SESSIONS
    frozen: bool = False
    only: tuple[CheckKind, ...] = ()
    jobs: int = 2
    seed: int | None = None
    policy: str = "fcfs"
    policy_options: PolicyOptions = ()

    def tier_of(self, family: str) -> Tier:
        """Bits, unless the family is required to reach bytes only."""
        return self.required.get(family, Tier.BITS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """What a suite compared."""

    cases: int = 0
    sessions: int = 0
    bit_identical: int = 0
    byte_identical: int = 0
    crashes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class NoiseHistogram:
    """How far logits of ``stock`` moved: samples that did not move, and counts by
    power of ten below ``edges[i]``.
    """

    samples: int
    unmoved: int
    median: float
    largest: float
    edges: tuple[float, ...]
    counts: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GateCheck:
    """One check's verdict and its evidence.

    ``bits`` and ``bytes`` are the verdicts by tier, None where sessions are not compared.
    ``measured`` checks (stock placement) fail only for what rounding cannot explain. ``divergence``
    is the first one of the failing case. ``distances``: how far each way of running is from the truth.
    """

    kind: CheckKind
    name: str
    verdict: Verdict
    family: str = ""
    layout: str = ""
    split: str = ""
    bits: Verdict | None = None
    bytes: Verdict | None = None
    measured: bool = False
    reason: str = ""
    explanation: str = ""
    seconds: float = 0.0
    counts: Counts | None = None
    marks: Mapping[str, int] = field(default_factory=dict)
    missing_marks: tuple[str, ...] = ()
    divergence: Divergence | None = None
    case_file: str = ""
    noise: NoiseHistogram | None = None
    distances: tuple[Distance, ...] = ()
    test_file: str = ""
    test_line: int = 1

    @property
    def replay(self) -> str:
        """The command that shows the failure again."""
        return f"parity replay {self.case_file}" if self.case_file else ""

    @property
    def headline(self) -> str:
        """One line for a summary or an annotation: what, where, and how to see it again."""
        parts = [f"{self.name}: {self.verdict.value}"]
        if self.reason:
            parts.append(self.reason)
        if self.divergence is not None:
            d = self.divergence
            parts.append(
                f"family {self.family}, session {d.session}, generated token {d.step} "
                f"(scheduler step {d.scheduler_step})"
            )
        if self.replay:
            parts.append(f"replay: {self.replay}")
        return "; ".join(parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class GateResult:
    """Everything that a gate run found."""

    options: GateOptions
    provenance: Provenance
    checks: tuple[GateCheck, ...]
    models: Mapping[str, str]
    seconds: float

    @property
    def verdict(self) -> Verdict:
        """The worst of the checks; of none, unknown."""
        return Verdict.merge(check.verdict for check in self.checks)

    def of_family(self, family: str) -> tuple[GateCheck, ...]:
        """The checks of one family (``""``: those of none)."""
        return tuple(check for check in self.checks if check.family == family)

    def count(self, verdict: Verdict) -> int:
        return sum(check.verdict is verdict for check in self.checks)
