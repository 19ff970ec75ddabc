"""Results of gate runs made by hand: a clean one, one with a divergence, one with an unknown check."""

from __future__ import annotations

from parity.gate.result import CheckKind, Counts, GateCheck, GateOptions, GateResult, NoiseHistogram
from parity.records import Divergence, Provenance, Tier, Verdict
from parity.suites.truth import Distance

PROVENANCE = Provenance(
    commit="abc123",
    engine="llama-cpp-python 0.3.36",
    engine_build="AVX2 = 1",
    cpu="a <cpu>",
)
COUNTS = Counts(cases=5, sessions=20, bit_identical=20, byte_identical=20)
NOISE = NoiseHistogram(
    samples=10, unmoved=6, median=0.0, largest=0.02, edges=(1e-3, 1e-2, 1e-1), counts=(1, 3)
)
DIVERGENCE = Divergence(
    session=3,
    step=7,
    scheduler_step=19,
    expected_token=65,
    actual_token=66,
    margin=0.25,
    distance=1.5,
    neighbours=(1, 2),
    chunks=((0, 8), (8, 9)),
    cells=(4, 5, 6),
)


def distance(
    way: str, *, bound: float | None = None, same_bits: bool = True, beyond: tuple[str, ...] = ()
) -> Distance:
    """How far one way of running llama is from the truth."""
    return Distance(
        model="llama",
        way=way,
        positions=391,
        rms=1e-5,
        worst_row_rms=1e-3,
        other_tokens=2,
        same_bits=same_bits,
        worst_of_bound=bound,
        beyond=beyond,
        ties=(),
    )


CLEAN = (
    GateCheck(kind=CheckKind.MODEL, name="llama model tiny", family="llama", verdict=Verdict.PASS),
    GateCheck(
        kind=CheckKind.SUITE,
        name="llama unified",
        family="llama",
        layout="unified",
        verdict=Verdict.PASS,
        bits=Verdict.PASS,
        bytes=Verdict.PASS,
        counts=COUNTS,
        marks={"mixed_step": 4, "shared": 2},
        seconds=1.5,
        test_file="tests/families/test_concurrent_parity.py",
        test_line=17,
    ),
    GateCheck(
        kind=CheckKind.SUITE,
        name="llama stock",
        family="llama",
        layout="stock",
        verdict=Verdict.PASS,
        measured=True,
        counts=Counts(cases=5, sessions=20, bit_identical=12, byte_identical=19),
        noise=NOISE,
    ),
    GateCheck(
        kind=CheckKind.MUTANTS, name="mutants", verdict=Verdict.PASS, marks={"planted": 9, "killed": 9}
    ),
)
TRUTH = GateCheck(
    kind=CheckKind.TRUTH,
    name="llama truth",
    family="llama",
    verdict=Verdict.FAIL,
    distances=(
        distance("plain", bound=0.25),
        distance("unified", bound=1.5, beyond=("position 3",)),
        distance("stock", same_bits=False),
    ),
)
FAILED = GateCheck(
    kind=CheckKind.SUITE, name="llama streams", family="llama", layout="streams", verdict=Verdict.FAIL,
    bits=Verdict.FAIL, bytes=Verdict.FAIL, reason="a case failed",
    explanation="session 3 differs first: 100% wrong\n~~~\n<script>alert(1)</script>\x00",
    counts=Counts(cases=2, sessions=9, bit_identical=8, byte_identical=8), divergence=DIVERGENCE,
    case_file="reports/failures/llama-streams-1234.json", test_file="tests/a,b:c.py", test_line=4,
)  # fmt: skip
UNKNOWN = GateCheck(
    kind=CheckKind.SPLIT, name="llama split halves", family="llama", layout="unified", split="halves",
    verdict=Verdict.UNKNOWN, reason="no model: model llama:real is unlocked",
)  # fmt: skip


def gate_result(*more: GateCheck, checks: tuple[GateCheck, ...] = CLEAN) -> GateResult:
    """A result for the llama family with the clean checks and ``more``."""
    options = GateOptions(families=("llama",), is_selection=True, required={"llama": Tier.BITS})
    return GateResult(
        options=options,
        provenance=PROVENANCE,
        checks=(*checks, *more),
        models={"llama": "ab" * 32},
        seconds=12.5,
    )
