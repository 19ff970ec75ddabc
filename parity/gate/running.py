"""The gate's run: jobs in a bounded pool of processes, progress, and the tests that stand for the checks."""

from __future__ import annotations

import ast
import contextlib
import functools
from collections.abc import Callable, Iterator
from concurrent.futures import Future, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from pathlib import Path
from time import monotonic

from parity.gate.jobs import run_job
from parity.gate.plan import GateJob, plan_gate
from parity.gate.result import CheckKind, GateCheck, GateOptions, GateResult
from parity.processes import process_pool
from parity.records import Verdict
from parity.run.profiles import provenance
from parity.store import REPOSITORY

OnCheck = Callable[[GateCheck, int, int], None]

# The pytest module and test that say the same as a check, for annotations: file, function.
TESTS: dict[CheckKind, tuple[str, str]] = {
    CheckKind.SUITE: ("tests/families/test_concurrent_parity.py", "test_concurrent_parity"),
    CheckKind.GOLDEN: ("tests/families/test_golden.py", "test_outputs_are_the_golden_ones"),
    CheckKind.TRUTH: ("tests/families/test_truth.py", "test_tiny_model_is_right"),
    CheckKind.SPLIT: ("tests/families/test_stages.py", "test_concurrent_parity_across_stages"),
    CheckKind.SHARDS: ("tests/families/test_concurrent_parity.py", "test_concurrent_parity_in_shards"),
    CheckKind.MUTANTS: ("tests/selftest/test_mutants.py", "test_exact_engine_mutant_is_killed"),
    CheckKind.POLICIES: ("tests/scheduler/policies/test_fairness.py", ""),
    CheckKind.STATES: ("tests/families/test_stages.py", "test_cache_state_restore_matches_recompute"),
    CheckKind.TEMPLATES: (
        "tests/families/test_scenarios.py",
        "test_template_is_green_on_the_exact_engine_and_hits_its_marks",
    ),
    CheckKind.SMALL_POOLS: (
        "tests/scheduler/test_small_pools_in_every_policy.py",
        "test_small_pools_end_in_every_policy",
    ),
    CheckKind.HUNT: ("tests/parity/test_hunt.py", ""),
    CheckKind.MACHINE: (
        "tests/machine/test_serving_machine.py",
        "test_scheduler_keeps_the_laws_on_the_engine",
    ),
}


def run_gate(options: GateOptions, on_check: OnCheck = lambda check, done, total: None) -> GateResult:
    """Run everything that was asked for. Raises ``UsageError`` for options that cannot be run at all.

    After an interrupt what had not ended is unknown, and the rest is kept.
    """
    started = monotonic()
    jobs, decided, models = plan_gate(options)
    total = len(jobs) + len(decided)
    checks = []
    for check in decided:
        checks.append(located(check))
        on_check(check, len(checks), total)
    try:
        with contextlib.closing(_run_jobs(jobs, options.jobs)) as ended:
            for check in ended:
                checks.append(located(check))
                on_check(check, len(checks), total)
    except KeyboardInterrupt:
        known = {check.name for check in checks}
        checks += [located(unfinished(job, "interrupted")) for job in jobs if job.name not in known]
    order = {job.name: index for index, job in enumerate(jobs)}
    checks.sort(key=lambda check: order.get(check.name, -1))
    return GateResult(
        options=options,
        provenance=provenance(seed=options.seed or 0),
        checks=tuple(checks),
        models=models,
        seconds=round(monotonic() - started, 1),
    )


def _run_jobs(jobs: list[GateJob], limit: int) -> Iterator[GateCheck]:
    """Checks as they end. A process that dies makes unknown what had not ended."""
    if not jobs:
        return
    with process_pool(min(limit, len(jobs))) as pool:
        futures: dict[Future, GateJob] = {pool.submit(run_job, job): job for job in by_cost(jobs)}
        for future in as_completed(futures):
            job = futures[future]
            try:
                yield future.result()
            except BrokenProcessPool as error:
                yield unfinished(job, f"a process of the gate died: {error}")


def unfinished(job: GateJob, reason: str) -> GateCheck:
    """The check of a job that did not end: nothing is known."""
    return GateCheck(
        kind=job.kind,
        name=job.name,
        family=job.family,
        split=job.split,
        layout=job.layout.value if job.layout else "",
        verdict=Verdict.UNKNOWN,
        reason=reason,
    )


def by_cost(jobs: list[GateJob]) -> list[GateJob]:
    """Longest first, so that no core waits at the end."""
    cost = {
        CheckKind.MUTANTS: 0,
        CheckKind.SUITE: 1,
        CheckKind.POLICIES: 0,
        CheckKind.HUNT: 0,
        CheckKind.SMALL_POOLS: 0,
        CheckKind.MACHINE: 0,
        CheckKind.TEMPLATES: 2,
        CheckKind.STATES: 3,
        CheckKind.TRUTH: 2,
        CheckKind.SHARDS: 3,
        CheckKind.SPLIT: 3,
        CheckKind.GOLDEN: 4,
    }
    return sorted(jobs, key=lambda job: cost[job.kind])


def located(check: GateCheck) -> GateCheck:
    """The check with the file and line that an annotation points to: its test, else its family's manifest."""
    if check.kind in TESTS:
        file, function = TESTS[check.kind]
        if (REPOSITORY / file).is_file():
            return replace(check, test_file=file, test_line=line_of(file, function))
    manifest = f"manifests/{check.family}.yaml"
    return replace(check, test_file=manifest if check.family else "pyproject.toml", test_line=1)


@functools.cache
def line_of(file: str, function: str) -> int:
    """Line of a function in a file of the checkout; of its first test without a name; 1 if there is none."""
    tree = ast.parse(Path(REPOSITORY / file).read_text(encoding="utf-8"))
    tests = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
        and (node.name == function or not function and node.name.startswith("test_"))
    ]
    return min((node.lineno for node in tests), default=1)
