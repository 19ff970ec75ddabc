"""Running one check in a process of the pool; whatever breaks on the way is unknown, never pass."""

from __future__ import annotations

import itertools
import traceback
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from time import monotonic
from typing import Any

import numpy as np

from parity.campaign.hunt import run_hunt
from parity.campaign.small_pools import play_slice
from parity.cases.files import save_failing_case
from parity.errors import UsageError
from parity.gate.plan import GateJob
from parity.gate.result import CheckKind, Counts, GateCheck, NoiseHistogram
from parity.golden.regenerate import find_changes
from parity.mutants import all_mutants
from parity.mutants.running import Status, judge_mutants, select_trials
from parity.processes import shared_worker
from parity.records import Outcome, Tier, Verdict
from parity.run.explain import explain_outcome
from parity.run.profiles import profile_of
from parity.suites.machine import run_machine
from parity.suites.policies import check_hash_seeds, check_policy, real_verdicts
from parity.suites.states import LATE
from parity.suites.suite import FAILURES, SuiteResult, pinned_splits, run_split_suite, run_suite
from parity.suites.templates import EXACT_FAMILIES, PER_LAYOUT, TemplateFailed, exact_templates, run_template
from parity.suites.truth import measure_distances
from scheduler.limits import Layout
from scheduler.policies import contracts, policy_names

NOISE_DECADES = range(-8, 3)
HUNTED_CASES = 1500
MACHINE_RUNS = 80


def run_job(job: GateJob) -> GateCheck:
    """The check's verdict. Bad input and bugs of ours end as *unknown* with their message."""
    started = monotonic()
    try:
        check = RUNNERS[job.kind](job)
    except UsageError as error:
        check = _check(job, Verdict.UNKNOWN, reason=error.line)
    except Exception as error:  # the boundary of a check: one that broke must neither pass nor end the others
        check = _check(
            job,
            Verdict.UNKNOWN,
            reason=f"internal error: {type(error).__name__}: {error}",
            explanation=traceback.format_exc(limit=-6),
        )
    return replace(check, seconds=round(monotonic() - started, 2))


def _check(job: GateJob, verdict: Verdict, **evidence: Any) -> GateCheck:
    return GateCheck(
        kind=job.kind,
        name=job.name,
        family=job.family,
        split=job.split,
        verdict=verdict,
        layout=job.layout.value if job.layout else "",
        **evidence,
    )


def _run_suite(job: GateJob) -> GateCheck:
    result = run_suite(
        job.family,
        job.layout,
        model=job.model,
        policy=job.policy,
        policy_options=job.policy_options,
        shards=job.shards,
        min_sessions=job.sessions,
        seed_value=job.seed,
        tier=job.tier,
    )
    return suite_check(job, result)


def _run_split(job: GateJob) -> GateCheck:
    """In this process for the first split of a row, with a process per stage for the others."""
    row = job.model.partition(":")[2] or "tiny"
    splits = {split.name: split for split in pinned_splits(job.family, row)}
    if job.split not in splits:
        return _check(job, Verdict.UNKNOWN, reason=f"row {row} has no split named {job.split}")
    result = run_split_suite(
        job.family,
        splits[job.split],
        min_sessions=job.sessions,
        stage_processes=job.split != next(iter(splits)),
        seed_value=job.seed,
        tier=job.tier,
    )
    return suite_check(job, result)


def suite_check(job: GateJob, result: SuiteResult) -> GateCheck:
    """A suite's result as a check, with its verdict by tier."""
    counts = Counts(
        cases=result.cases,
        sessions=result.sessions,
        bit_identical=result.bit_identical,
        byte_identical=result.byte_identical,
        crashes=result.crashes,
    )
    divergences = result.failure.divergences if result.failure is not None else ()
    measured = job.layout is Layout.STOCK
    bits, in_bytes = (
        (None, None) if measured else tier_verdicts(result, exact_reason=profile_of(result.model).reason)
    )
    return _check(
        job,
        result.verdict,
        reason=result.reason,
        explanation=result.explanation,
        counts=counts,
        bits=bits,
        bytes=in_bytes,
        measured=measured,
        marks=dict(result.marks),
        missing_marks=result.missing,
        divergence=divergences[0] if divergences else None,
        case_file=result.case_file,
        noise=noise_histogram(result.noise) if result.noise else None,
    )


def tier_verdicts(result: SuiteResult, *, exact_reason: str) -> tuple[Verdict, Verdict]:
    """Verdicts of tier bits and tier bytes. Bits are unknown where no numerics profile is exact."""
    bits, in_bytes = (result.judge(tier, inexact=exact_reason)[0] for tier in (Tier.BITS, Tier.BYTES))
    return bits, in_bytes


def noise_histogram(samples: list[float]) -> NoiseHistogram:
    """Counts by power of ten of how far logits moved."""
    values = np.asarray(samples, np.float64)
    edges = np.array([10.0**decade for decade in NOISE_DECADES])
    moved = np.clip(values[values > 0], edges[0], edges[-1] * 0.999)
    counts, _ = np.histogram(moved, bins=edges)
    return NoiseHistogram(
        samples=len(values),
        unmoved=int((values == 0).sum()),
        median=float(np.median(values)),
        largest=float(values.max()),
        edges=tuple(edges.tolist()),
        counts=tuple(counts.tolist()),
    )


def _run_goldens(job: GateJob) -> GateCheck:
    changes, _ = find_changes(job.family, search=False, tier=job.tier)
    verdict = Verdict.merge(change.verdict for change in changes)
    wrong = [change for change in changes if change.verdict is not Verdict.PASS]
    sessions = sum(len(change.golden.sessions) for change in changes if change.golden is not None)
    reason = wrong[0].describe().splitlines()[0] if wrong else ""
    return _check(
        job,
        verdict,
        reason=reason,
        explanation="\n".join(change.describe() for change in wrong),
        counts=Counts(cases=len(changes), sessions=sessions),
        marks={"files": len(changes), "compared_by_bits": sum(not change.context for change in changes)},
    )


def _run_truth(job: GateJob) -> GateCheck:
    distances = measure_distances(job.model)
    wrong = [f"{distance.way}: {line}" for distance in distances for line in distance.beyond]
    claimed = [distance for distance in distances if distance.worst_of_bound is not None]
    return _check(
        job,
        Verdict.merge(distance.verdict for distance in claimed),
        reason=f"{len(wrong)} positions are wrong; {wrong[0]}" if wrong else "",
        explanation="\n".join([*(distance.text for distance in distances), *wrong]),
        marks={
            "positions": sum(distance.positions for distance in claimed),
            "ties": sum(len(distance.ties) for distance in claimed),
        },
        distances=tuple(distances),
    )


def _run_mutants(job: GateJob) -> GateCheck:
    reports = judge_mutants(
        all_mutants(),
        lambda mutant: select_trials(mutant, family=job.family or None, fast=True),
        lambda report: None,
    )
    alive = [report for report in reports if report.status is not Status.KILLED]
    verdict = Verdict.FAIL if alive else Verdict.PASS if reports else Verdict.UNKNOWN
    # Red without its fault: the tree itself is wrong, and what the checker saw says how.
    broken = [t for r in alive for t in r.trials if t.status is Status.BROKEN]
    reason = f"{len(alive)} of {len(reports)} not killed: {', '.join(r.name for r in alive[:5])}"
    return _check(
        job,
        verdict,
        reason=(f"{broken[0].trial}: {broken[0].text}; {reason}" if broken else reason)
        if alive
        else ("" if reports else "no mutant applies"),
        explanation="\n".join(
            f"{r.name}: {t.status.value}, {r.fault} {t.trial}: {t.text}"
            for r in alive
            for t in r.trials
            if t.status is not Status.KILLED
        ),
        marks={"killed": len(reports) - len(alive), "planted": len(reports)},
    )


def _run_policies(job: GateJob) -> GateCheck:
    policies = policy_names()
    checks = [*(check for name in contracts() for check in check_policy(name)), *check_hash_seeds(policies)]
    said = [(f"policy {c.policy}, {c.name}", c.verdict, c.said) for c in checks]
    for name, (verdict, text) in real_verdicts(policies, lambda what: None).items():
        said.append((f"policy {name}, llama.cpp", verdict, text))
    wrong = [f"{name}: {text}" for name, verdict, text in said if verdict is not Verdict.PASS]
    return _check(
        job,
        Verdict.merge(verdict for _, verdict, _ in said),
        reason=wrong[0] if wrong else "",
        explanation="\n".join(wrong),
        marks={"policies": len(contracts()), "checks": len(said)},
    )


def _run_states(job: GateJob) -> GateCheck:
    """Saved where the tests of the default suite do not look: after 127 to 130 and 255 to 257 tokens."""
    arguments = {"family": job.family, "lengths": list(LATE)}
    report = shared_worker(()).call("parity.suites.states:check_states_here", arguments)
    wrong, compared = report["differing"], report["compared"]
    return _check(
        job,
        Verdict.FAIL if wrong else Verdict.PASS if compared else Verdict.UNKNOWN,
        reason=f"{len(wrong)} of {compared} restored states go on otherwise; {wrong[0]}" if wrong else "",
        explanation="\n".join(wrong),
        marks={"compared": compared},
    )


def _of_cases(job: GateJob, cases: int, failures: list[Outcome], marks: Mapping[str, int]) -> GateCheck:
    """The verdict over cases on the exact engine; the first failure is kept as a case file and explained."""
    if not failures:
        verdict = Verdict.PASS if cases else Verdict.UNKNOWN
        return _check(job, verdict, counts=Counts(cases=cases), marks=dict(marks))
    case_file = str(save_failing_case(failures[0].case, FAILURES))
    return _check(
        job,
        Verdict.FAIL,
        reason=f"{len(failures)} of {cases} cases failed",
        explanation=explain_outcome(failures[0], case_file=case_file),
        counts=Counts(cases=cases),
        marks=dict(marks),
        case_file=case_file,
    )


def _run_templates(job: GateJob) -> GateCheck:
    marks: Counter[str] = Counter()
    missing = []
    for scenario, family in itertools.product(exact_templates(), EXACT_FAMILIES):
        try:
            hit = run_template(scenario, family, per_layout=PER_LAYOUT)
        except TemplateFailed as failed:
            return _of_cases(job, 1, [failed.outcome], {scenario.name: 1})
        marks[scenario.name] += 1
        missing += [f"{scenario.name} {family}: {mark}" for mark in scenario.marks if not hit[mark]]
    reason = f"nothing exercised: {', '.join(missing)}" if missing else ""
    return _check(job, Verdict.FAIL if missing else Verdict.PASS, reason=reason, marks=dict(marks))


def _run_small_pools(job: GateJob) -> GateCheck:
    played = play_slice()
    marks = {mark: count for mark, count in played.marks.items() if count}
    return _of_cases(job, played.cases.total(), played.failures, marks)


def _run_hunt(job: GateJob) -> GateCheck:
    first = (job.seed or 0) * HUNTED_CASES
    hunt = run_hunt(range(first, first + HUNTED_CASES))
    marks = {name: found["shared"] for name, found in hunt.marks.items()}
    check = _of_cases(job, hunt.cases.total(), hunt.failures, marks)
    if not hunt.failures and hunt.missing():
        reason = f"policies that never decided otherwise than fcfs: {', '.join(hunt.missing())}"
        check = replace(check, verdict=Verdict.FAIL, reason=reason)
    return check


def _run_machine(job: GateJob) -> GateCheck:
    """The first line is what broke; the rest are the steps that lead there."""
    try:
        run_machine(MACHINE_RUNS)
    except Exception as error:  # a broken law, or whatever the scheduler raised: both are what was looked for
        lines = []
        for one in error.exceptions if isinstance(error, ExceptionGroup) else [error]:
            lines += [f"{type(one).__name__}: {one}", *getattr(one, "__notes__", ())]
        return _check(
            job, Verdict.FAIL, reason=lines[0].splitlines()[0], explanation="\n".join(lines), marks={}
        )
    return _check(job, Verdict.PASS, marks={"runs": MACHINE_RUNS})


RUNNERS: dict[CheckKind, Callable[[GateJob], GateCheck]] = {
    CheckKind.SUITE: _run_suite,
    CheckKind.SHARDS: _run_suite,
    CheckKind.SPLIT: _run_split,
    CheckKind.GOLDEN: _run_goldens,
    CheckKind.TRUTH: _run_truth,
    CheckKind.MUTANTS: _run_mutants,
    CheckKind.POLICIES: _run_policies,
    CheckKind.STATES: _run_states,
    CheckKind.TEMPLATES: _run_templates,
    CheckKind.SMALL_POOLS: _run_small_pools,
    CheckKind.HUNT: _run_hunt,
    CheckKind.MACHINE: _run_machine,
}
