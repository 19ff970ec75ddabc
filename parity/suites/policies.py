"""The battery that every policy must pass: parity on the exact engine, and what
the contract of any policy says.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from parity.cases.strategies import landmark, option_values, tokens_of, within_limits
from parity.checkers.policy import (
    check_hidden_truth,
    check_logical_plans,
    check_original_ages,
    check_original_clocks,
    check_published_service,
)
from parity.checkers.service import client_reports, service_of, starved_clients
from parity.errors import UsageError
from parity.models.families import load_families
from parity.records import Case, Fault, FaultKind, Finding, Outcome, Session, Verdict
from parity.run.contained import run_case
from parity.run.runner import BASELINE, policy_mattered, replay, run_exact_case
from parity.store import REPOSITORY
from parity.suites.contracts import check_contract
from scheduler.limits import Layout
from scheduler.policies import make_policy, policy_class, policy_names
from scheduler.policies.aging import Aging
from scheduler.policies.least_slack import LeastSlack
from scheduler.policy.base import Policy
from scheduler.records import ServiceLevel

Cells = dict[str, tuple[Verdict, str]]


def real_verdicts(policies: list[str], tick: Callable[[str], None]) -> dict[str, tuple[Verdict, str]]:
    """Parity on llama.cpp: a fixed case per policy, the families in turn."""
    families, cells = list(load_families()), {}
    for index, name in enumerate(policies):
        family = families[index % len(families)]
        try:
            cells[name] = judge_outcome(run_case(landmark(family, Layout.UNIFIED, policy=name)))
        except (UsageError, ImportError, RuntimeError) as error:
            cells[name] = (Verdict.UNKNOWN, f"{family}: {error}")
        tick(f"{name} on {family}")
    return cells


def judge_outcome(outcome: Outcome) -> tuple[Verdict, str]:
    """A run in which nobody finished proves nothing."""
    case: Case = outcome.case
    if outcome.verdict is Verdict.PASS and not outcome.sessions:
        return Verdict.UNKNOWN, f"{case.family}: no session was compared"
    said = f"{case.family} {outcome.bit_identical}/{outcome.sessions}"
    if outcome.verdict is not Verdict.PASS:
        said += f": {outcome.reason or '; '.join(outcome.problems) or 'other bits than alone'}"
    return outcome.verdict, said


STOP_TOKEN = 1 << 29  # no token of a prompt, and never sampled by chance
TICKS = 60  # of the pressure that no starvation-free policy may give way to for ever


@dataclass(frozen=True, slots=True)
class PolicyCheck:
    """One check of one policy; no ``findings`` is a pass."""

    policy: str
    name: str
    findings: tuple[Finding, ...]

    @property
    def said(self) -> str:
        """Everything that was found, on one line."""
        return "; ".join(found.text if found.checker == self.name else str(found) for found in self.findings)

    @property
    def verdict(self) -> Verdict:
        return Verdict.FAIL if self.findings else Verdict.PASS


def busy_case(
    policy: str, *, hidden: Callable[[int], int] = lambda index: 9, faults: tuple[Fault, ...] = ()
) -> Case:
    """Ten sessions of three clients with objectives in a pool that holds four of
    them; nobody's length is known.
    """
    slo = ServiceLevel(ttft_ms=400.0, tbt_ms=80.0)
    sessions = tuple(
        Session(
            prompt=tokens_of(7, 6) + tokens_of(50 + index, 2 + 5 * (index % 4)),
            max_tokens=9,
            arrival_step=2 * index,
            client_id="abc"[index % 3],
            priority=index % 2,
            slo=slo,
            stop_token_ids=(STOP_TOKEN,),
            hidden_output_tokens=hidden(index),
        )
        for index in range(10)
    )
    return Case(
        family="llama",
        model="llama",
        sessions=sessions,
        policy=policy,
        pool_cells=90,
        num_sequences=9,
        max_num_batched_tokens=12,
        max_num_seqs=5,
        prefix_block_tokens=4,
        faults=faults,
    )


def crowded_case(policy: str, *, hidden: Callable[[int], int] = lambda index: 9) -> Case:
    """The busy case with everybody there from the start, so that long before any
    length shows somebody is chosen.
    """
    busy = busy_case(policy, hidden=hidden)
    return replace(busy, sessions=tuple(replace(session, arrival_step=0) for session in busy.sessions))


def pressure_case(policy: str) -> Case:
    """One request of low priority, and one of a higher priority every tick in a
    lane that does one request a tick.
    """
    low = Session(prompt=tokens_of(1, 1), max_tokens=1, priority=4, client_id="low")
    high = tuple(
        Session(prompt=tokens_of(2 + tick, 1), max_tokens=1, arrival_step=tick, client_id="high")
        for tick in range(TICKS)
    )
    return Case(
        family="llama",
        model="llama",
        sessions=(low, *high),
        policy=policy,
        max_num_batched_tokens=1,
        max_num_seqs=1,
        prefix_cache=False,
    )


def parity_cases(policy: str) -> list[Case]:
    """Fixed cases of every kind of memory and layout: shares, chunks, preemptions, cancels, failed steps."""
    unified, streams = Layout.UNIFIED, Layout.STREAMS
    shapes = [(family, unified) for family in ("llama", "gemma2", "falcon_h1", "qwen3next")]
    shapes += [("llama", streams), ("qwen3next", streams)]
    made = [landmark(family, layout, policy=policy) for family, layout in shapes]
    failing = (Fault(kind=FaultKind.DECODE_ERROR, step=5), Fault(kind=FaultKind.NO_SLOT, step=11))
    made += [
        busy_case(policy),
        busy_case(policy, faults=failing),
        landmark("llama", Layout.STOCK, policy=policy),
    ]
    return made


def option_cases(policy: str) -> list[Case]:
    """The busy case once for every value that is drawn for an option of the policy."""
    return [
        within_limits(replace(busy_case(policy), policy_options=((name, value),)))
        for name, values in option_values(policy).items()
        for value in values
    ]


def check_parity(policy: str) -> Iterable[Finding]:
    """Every session gives what it gives alone, twice; no illegal plan, no lost cell, no standstill."""
    for case in [*parity_cases(policy), *option_cases(policy)]:
        outcome = run_exact_case(case)
        if outcome.verdict is not Verdict.PASS:
            said = outcome.problems or (outcome.reason or f"{len(outcome.divergences)} divergences",)
            options = "".join(f" {name}={value}" for name, value in case.policy_options)
            yield Finding("parity", f"{case.family} {case.layout.value}{options}: {'; '.join(said)}")


def check_decides(policy: str) -> Iterable[Finding]:
    """On the fixed case of every family and layout it decides otherwise than fcfs, without which that case
    would prove nothing of it.
    """
    for family in load_families():
        for layout in Layout:
            if not policy_mattered(landmark(family, layout, policy=policy)):
                yield Finding("decides", f"{family} {layout.value}: never decided otherwise than fcfs")


def check_plans(policy: str) -> Iterable[Finding]:
    """Plans are logical."""
    yield from check_logical_plans(replay(busy_case(policy)).run)


def check_hidden(policy: str) -> Iterable[Finding]:
    """Changing every hidden length changes no plan before a result shows it."""
    for crowd in (busy_case, crowded_case):
        whole = replay(crowd(policy)).run
        for hidden in (lambda index: 1 + index % 9, lambda index: 9 - index % 9, lambda index: 4):
            yield from check_hidden_truth(whole, replay(crowd(policy, hidden=hidden)).run)


def check_service(policy: str) -> Iterable[Finding]:
    """Published service is completed service, with failed steps and preemptions in between."""
    faults = (
        Fault(kind=FaultKind.DECODE_ERROR, step=0),
        Fault(kind=FaultKind.DECODE_ERROR, step=7),
        Fault(kind=FaultKind.PREEMPT, step=12, session=3),
    )
    played = replay(busy_case(policy, faults=faults))
    made = played.scheduler.policy
    published = made.published_service(played.scheduler.policy_memory)
    yield from check_published_service(
        played.run, published, input_weight=made.input_weight, output_weight=made.output_weight
    )


def check_clocks(policy: str) -> Iterable[Finding]:
    """Deadlines and ages count from the original clocks, across preemptions."""
    faults = tuple(Fault(kind=FaultKind.PREEMPT, step=step, session=step % 5) for step in (6, 9, 14))
    played = replay(busy_case(policy, faults=faults))
    made = played.scheduler.policy
    if isinstance(made, Aging):
        yield from check_original_ages(played.run, made.quantum_ms)
    else:
        yield from check_original_clocks(played.run, made.cost)


def check_progress(policy: str) -> Iterable[Finding]:
    """A policy that promises no starvation serves the unfavoured client under endless
    pressure; all partitions close.
    """
    played = replay(pressure_case(policy))
    yield from played.run.findings
    client_reports(played.run, window_ms=TICKS * 10.0)
    starved = starved_clients(
        service_of(played.run, until_ms=TICKS * 10.0), start_ms=0.0, stop_ms=TICKS * 10.0
    )
    if starved and policy_class(policy).contract.starvation_free:
        yield Finding("starved", f"{', '.join(starved)} completed nothing in {TICKS} ticks")


CHECKS: dict[str, Callable[[str], Iterable[Finding]]] = {
    "contract": check_contract,
    "parity": check_parity,
    "decides": check_decides,
    "logical plans": check_plans,
    "hidden lengths": check_hidden,
    "completed service": check_service,
    "original clocks": check_clocks,
    "progress": check_progress,
}


def applies(name: str, policy: str) -> bool:
    """Whether a check has anything to look at: service that is published, keys that are slack or age,
    decisions other than the default's; of a measure there is only the contract.
    """
    if name == "contract" or policy not in policy_names():
        return name == "contract"
    kind = policy_class(policy)
    if name == "decides":
        return policy != BASELINE
    if name == "completed service":
        return kind.published_service is not Policy.published_service
    return name != "original clocks" or issubclass(kind, (LeastSlack, Aging))


def check_policy(policy: str) -> list[PolicyCheck]:
    """All checks of one policy or measure that need no other process."""
    if policy in policy_names():
        make_policy(policy)
    return [
        PolicyCheck(policy, name, tuple(check(policy)))
        for name, check in CHECKS.items()
        if applies(name, policy)
    ]


def print_digests(policies: list[str]) -> None:
    """Entry point of another process: one line per policy with the digest of its schedules."""
    for policy in policies:
        cases = [busy_case(policy), replace(busy_case(policy), layout=Layout.STOCK, pool_cells=60)]
        print(policy, *(replay(case).digest for case in cases))


def run_under_hash_seeds(code: str, seeds: Iterable[int] = (1, 2, 3)) -> list[str]:
    """What ``code`` prints in processes with different string hashes, which is
    what the order of a set hangs on.
    """
    return [
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": str(seed)},
            check=True,
            capture_output=True,
            text=True,
            cwd=REPOSITORY,
        ).stdout
        for seed in seeds
    ]


def check_hash_seeds(policies: list[str]) -> list[PolicyCheck]:
    """Every schedule is the same in processes whose sets have other orders."""
    code = f"from parity.suites.policies import print_digests; print_digests({policies!r})"
    lines = [output.splitlines() for output in run_under_hash_seeds(code)]
    checks = []
    for policy, *printed in zip(policies, *lines, strict=True):
        same = len(dict.fromkeys(printed)) == 1 and printed[0].startswith(f"{policy} ")
        why = Finding("order", "schedules differ from process to process: a set was iterated")
        checks.append(PolicyCheck(policy, "same in every process", () if same else (why,)))
    return checks
