"""The main job as tests: per family and layout, generated concurrent cases against each session alone.

Marks that every suite must hit are the manifest's; a suite that exercised nothing is red by itself.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from parity.cases.strategies import landmark
from parity.gate.plan import GateJob
from parity.gate.result import CheckKind
from parity.models.families import load_family
from parity.plugin import family_params, gate_params
from parity.records import Tier, Verdict
from parity.run.contained import run_case
from parity.run.explain import explain_outcome
from parity.run.under_test import Brought
from parity.suites.suite import run_suite
from scheduler.limits import Layout


@pytest.mark.parametrize("job", gate_params(CheckKind.SUITE, Layout.UNIFIED, Layout.STREAMS))
def test_concurrent_parity(job: GateJob, brought: Brought, tmp_path: Path) -> None:
    result = run_suite(
        job.family,
        job.layout,
        model=job.model,
        tier=brought.tier,
        min_sessions=job.sessions,
        brought=brought,
        failures=tmp_path,
    )

    assert result.verdict is Verdict.PASS, f"{result.reason}\n{result.explanation}"
    assert result.sessions >= job.sessions == 200
    assert result.byte_identical == result.sessions
    assert result.bit_identical == result.sessions or brought.tier is Tier.BYTES
    assert all(result.marks[mark.value] for mark in load_family(job.family).marks)


@pytest.mark.parametrize("job", gate_params(CheckKind.SHARDS))
def test_concurrent_parity_in_shards(job: GateJob, tmp_path: Path) -> None:
    result = run_suite(
        job.family,
        job.layout,
        model=job.model,
        shards=job.shards,
        min_sessions=job.sessions,
        failures=tmp_path,
    )

    assert result.verdict is Verdict.PASS, f"{result.reason}\n{result.explanation}"
    assert result.bit_identical == result.sessions >= job.sessions == 50
    assert result.marks["sharded"] and result.marks["moved"]


@pytest.mark.parametrize("job", gate_params(CheckKind.SUITE, Layout.STOCK))
def test_stock_layout_of_llama_cpp_differs_only_by_noise(job: GateJob, tmp_path: Path) -> None:
    """Measured, not gated: what people run today moves the logits, and only by what rounding explains."""
    result = run_suite(job.family, job.layout, model=job.model, min_sessions=job.sessions, failures=tmp_path)

    assert result.verdict is Verdict.PASS, f"{result.reason}\n{result.explanation}"
    assert result.bit_identical < result.sessions, (
        "stock placement is not expected to be exact: does anything compare?"
    )
    assert result.noise


@pytest.mark.parametrize("family", family_params())
def test_thread_count_of_the_concurrent_run_does_not_change_bits(family: str) -> None:
    """Two threads in the shared pool against one thread alone."""
    outcome = run_case(landmark(family, Layout.UNIFIED), n_threads=2)

    assert outcome.verdict is Verdict.PASS, explain_outcome(outcome)
    assert outcome.bit_identical == outcome.sessions == 9
    assert outcome.marks["mixed_step"] and outcome.marks["shared"] and outcome.marks["preempted"]


@pytest.mark.quantised
@pytest.mark.parametrize("quantisation", ["q8_0", "q4_0", "q4_k_m"])
@pytest.mark.parametrize("family", family_params())
def test_concurrent_parity_of_quantised_models(family: str, quantisation: str, tmp_path: Path) -> None:
    result = run_suite(
        family, Layout.UNIFIED, model=f"{family}:{quantisation}", min_sessions=30, failures=tmp_path
    )

    assert result.verdict is Verdict.PASS, f"{result.reason}\n{result.explanation}"
    assert result.bit_identical == result.sessions >= 30
