"""The hunt: tight pools, deep trees of shared prefixes, every policy with drawn options, clients, weights,
priorities, objectives, on the exact engine. Looks for what only the scheduler can do wrong: standing still,
breaking a contract, giving other tokens than alone.
"""

from __future__ import annotations

import random
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from parity.cases.strategies import tokens_of, within_limits
from parity.checkers.giving_way import preemptions_of
from parity.checkers.marks import POLICY_MATTERED
from parity.errors import UsageError
from parity.records import Case, Fault, FaultKind, Outcome, Session, Verdict, broken_outcome
from parity.run.judge import judge
from parity.run.runner import BASELINE, ExactSystem, policy_mattered, replay
from scheduler.limits import Layout
from scheduler.policies import option_types, policy_names
from scheduler.records import ServiceLevel

FAMILIES = ("llama", "gemma2", "falcon_h1", "qwen3next", "deepseek2")
LAYOUTS = (Layout.UNIFIED, Layout.UNIFIED, Layout.UNIFIED, Layout.STREAMS, Layout.STOCK)
MARKS = (POLICY_MATTERED, "shared", "preempted", "rebuilt_lower", "escalated", "cut_shares")

# What may be drawn for a policy's own options.
OPTIONS: dict[str, dict[str, Sequence]] = {
    "aging": {"quantum_ms": (10.0, 40.0, 200.0)},
    "fastserve_mlfq": {
        "quantum_rows": (1, 2, 4),
        "levels": (2, 3, 5),
        "promote_after_ms": (50.0, 200.0),
        "max_batch": (None, 1, 2, 4),
    },
    "layer_ready": {
        "layer_ms": (1.0, 10.0),
        "facts": (
            {"s0": [["ready", 0.0], ["inflight", 40.0]], "s2": [["inflight", 150.0]]},
            {"s1": [["inflight", 25.0], ["inflight", 90.0]]},
        ),
    },
    "least_slack": {"tick_ms": (5.0, 10.0), "tokens_per_tick": (1, 8)},
    "preble_quota": {"quotas": ((2, 1), (1, 1, 1), (3, 1))},
    "sarathi": {"chunk_tokens": (1, 3, 8)},
    "sarathi_serve": {"tau": (None, 1, 3, 8)},
    "scorpio_guard": {"base_ms": (0.0, 5.0), "ms_per_session": (0.0, 4.0)},
    "sglang_adder": {
        "chunk_tokens": (None, 2, 4),
        "max_extend_tokens": (None, 4, 8),
        "max_cached_tokens": (None, 4),
        "page_tokens": (1, 4),
        "warm_tokens": (2, 6),
        "max_skips": (1, 16),
        "priority_scheduling": (False, True),
    },
    "vllm_fcfs": {"long_prefill_threshold": (0, 2, 4)},
    "vllm_priority": {"long_prefill_threshold": (0, 2, 4)},
    "vtc": {"input_weight": (1, 3), "output_weight": (1, 2)},
    "vtc_completed": {"input_weight": (1, 3), "output_weight": (1, 2)},
}


def draw_case(number: int, policies: Sequence[str]) -> Case:
    """The case of a number: the same in every process."""
    source = random.Random(number)
    count = source.randint(2, 10)
    sessions = draw_sessions(source, count)
    needs = [len(session.prompt) + session.max_tokens - 1 for session in sessions]
    cells = source.randint(max(needs), max(max(needs), min(sum(needs), 3 * max(needs))))
    family, layout = source.choice(FAMILIES), source.choice(LAYOUTS)
    policy = policies[number % len(policies)]
    stages = source.choice(((), (), (), (cells, cells + source.randint(0, 6))))
    streams = layout is Layout.STREAMS
    case = Case(
        family=family,
        model=family,
        sessions=sessions,
        layout=layout,
        pool_cells=cells,
        num_sequences=source.choice((3, 4, 6, 12, 24)),
        max_num_batched_tokens=source.choice((1, 2, 3, 4, 8, 64)),
        max_num_seqs=source.choice((1, 2, 4, 8, 16)),
        max_chunk_tokens=source.choice((1, 2, 4, 2048, 2048)),
        prefix_cache=source.random() < 0.85,
        prefix_block_tokens=source.choice((1, 1, 2, 4, 8)),
        policy=policy,
        policy_options=draw_options(source, policy, count),
        faults=draw_faults(source, count),
        stage_cells=() if streams else stages,
        steps_in_flight=source.choice((1, 1, 1, 2, 3)),
        shards=source.choice((1, 1, 1, 2, 4)),
    )
    if case.shards > 1:  # as tight as one pool is
        case = replace(case, pool_cells=max(max(needs), cells // case.shards), stage_cells=())
    return within_limits(case)


def draw_sessions(source: random.Random, count: int) -> tuple[Session, ...]:
    """Prompts that go on from prefixes of earlier ones, deep trees; arrivals together and one by one."""
    prompts: list[tuple[int, ...]] = []
    spread = source.choice((0, 0, 1, 3))
    for _ in range(count):
        own = tokens_of(source.randrange(1 << 30), source.randint(1, 8))
        if prompts and source.random() < 0.75:
            parent = prompts[source.randrange(len(prompts))]
            own = parent[: source.randint(1, len(parent))] + own[: source.randint(0, 5)]
        prompts.append(own[:16])
    return tuple(
        Session(
            prompt=prompt,
            max_tokens=source.choice((1, 2, source.randint(1, 12))),
            arrival_step=spread * index,
            client_id="abc"[source.randrange(3)],
            priority=source.randrange(4),
            slo=ServiceLevel(source.choice((None, 100.0, 1000.0)), source.choice((None, 20.0, 50.0))),
        )
        for index, prompt in enumerate(prompts)
    )


def draw_options(source: random.Random, policy: str, count: int) -> tuple:
    """Some of a policy's own options, and in one case of three a reservation that can be wrong."""
    options = {
        name: source.choice(values)
        for name, values in OPTIONS.get(policy, {}).items()
        if source.random() < 0.5
    }
    options = {name: value for name, value in options.items() if value is not None}
    if "reservation" in option_types(policy) and source.random() < 0.35:
        forecasts = {
            f"s{index}": {"point": source.randint(1, 4), "p90": source.randint(2, 8)}
            for index in range(count)
        }
        kind = source.choice(("point", "quantile", "watermark"))
        options["reservation"] = {"kind": kind, "forecasts": forecasts}
        if kind == "watermark":
            options["reservation"]["watermark_rows"] = source.randint(0, 4)
    return tuple(options.items())


def draw_faults(source: random.Random, count: int) -> tuple[Fault, ...]:
    """In one case of four, cancels and preemptions from outside, some in flight, and failed calls."""
    if source.random() < 0.75:
        return ()
    kinds = (FaultKind.CANCEL, FaultKind.PREEMPT, FaultKind.PREEMPT, FaultKind.DECODE_ERROR)
    return tuple(
        Fault(
            kind=source.choice(kinds),
            step=source.randrange(30),
            session=source.randrange(count),
            in_flight=source.random() < 0.3,
        )
        for _ in range(source.randint(1, 4))
    )


def judge_hunted(case: Case, *, ask_policy: bool = True) -> tuple[Outcome, Counter]:
    """Run a case once on the exact engine and check ends, identity, conservation, liveness and contracts;
    with ``ask_policy`` also whether its policy mattered, which takes another run.
    """
    marks: Counter[str] = Counter(dict.fromkeys(MARKS, 0))
    try:
        played = replay(case)
        outcome = judge(case, played.run, played.run, ExactSystem().alone(case))
    except Exception as error:  # a bug of ours is what the case came to, not the end of the hunt
        return broken_outcome(case, f"{type(error).__name__}: {error}", stderr=traceback.format_exc()), marks
    run = played.run
    marks["shared"] = sum(record.prefix_hits for record in run.records)
    marks["preempted"] = len(preemptions_of(run))
    marks["rebuilt_lower"] = sum(record.rebuilt_lower for record in run.records)
    marks["escalated"] = sum(record.escalations for record in run.records)
    marks["cut_shares"] = played.scheduler.memory.cut_shares
    if ask_policy and outcome.verdict is Verdict.PASS:
        marks[POLICY_MATTERED] = policy_mattered(case, played)
    return outcome, marks


@dataclass(slots=True)
class Hunt:
    """What a hunt came to: cases and marks by policy, and the failures."""

    cases: Counter = field(default_factory=Counter)
    marks: dict[str, Counter] = field(default_factory=dict)
    kinds: Counter = field(default_factory=Counter)  # cases by family and layout
    failures: list[Outcome] = field(default_factory=list)

    def has_mattered(self, policy: str) -> bool:
        """Whether a policy once decided otherwise than fcfs, which is asked only until it did."""
        return policy in self.marks and self.marks[policy][POLICY_MATTERED] > 0

    def missing(self) -> list[str]:
        """Policies that never once decided otherwise than fcfs: their suites would prove nothing of them."""
        return [name for name, marks in self.marks.items() if name != BASELINE and not marks[POLICY_MATTERED]]

    @property
    def verdict(self) -> Verdict:
        if self.failures or self.missing():
            return Verdict.FAIL
        return Verdict.PASS if self.cases else Verdict.UNKNOWN

    def add(self, outcome: Outcome, marks: Counter) -> None:
        case = outcome.case
        self.cases[case.policy] += 1
        self.marks.setdefault(case.policy, Counter()).update(marks)
        self.kinds[case.family, case.layout.value] += 1
        if outcome.verdict is not Verdict.PASS:
            self.failures.append(outcome)


def run_hunt(
    numbers: range,
    policies: Sequence[str] = (),
    *,
    most_failures: int = 1,
    hunt: Hunt | None = None,
    report: Callable[[Hunt], None] = lambda hunt: None,
) -> Hunt:
    """The cases of ``numbers``, until ``most_failures`` failed, added to ``hunt``. Raises ``UsageError``."""
    for name in policies:
        if name not in policy_names():
            raise UsageError(
                f"no policy {name!r}", where="--policy", why=f"known: {', '.join(policy_names())}"
            )
    hunt = Hunt() if hunt is None else hunt
    for number in numbers:
        case = draw_case(number, policies or policy_names())
        hunt.add(*judge_hunted(case, ask_policy=not hunt.has_mattered(case.policy)))
        report(hunt)
        if len(hunt.failures) >= most_failures:
            break
    return hunt
