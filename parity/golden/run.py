"""Running golden cases on llama.cpp, in worker processes; and the search for prompts with large margins."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from parity.engines.numerics import NumericsProfile
from parity.golden.cases import MAX_TOKENS, PLANS, GoldenMode, ModePlan, golden_case
from parity.golden.record import Golden, GoldenProvenance, GoldenSession, ReferenceAnswer
from parity.plain_data import read_record
from parity.processes import shared_worker
from parity.records import Tier, Verdict
from parity.reference import Kernel, Weights, load_weights, run_reference
from parity.reference.comparison import expect_logits
from parity.run.explain import explain_outcome
from parity.run.judge import OracleAnswers, judge, question
from parity.run.oracle import Question
from parity.run.profiles import engine_fingerprint, profile_of
from parity.run.runner import Runner, known_family, known_model, process_runner
from scheduler.limits import Layout

OPENINGS = (
    "The harbour light was out and the pilot counted the waves. ",
    "Two clerks share one ledger, and neither may see the other's page. ",
    "Rain fell on the tin roof until the meeting ended. ",
    "A baker starts before the town wakes and leaves when it does. ",
    "Our train was late, so we read the same notice four times. ",
)
ENDINGS = (
    "Then she asked for",
    "He wrote down",
    "Nobody answered",
    "It cost",
    "Please bring",
    "We found",
    "Number",
)


@dataclass(frozen=True, slots=True)
class GoldenRun:
    """What a golden case gave: the record, and problems that come before any comparison with a file."""

    golden: Golden
    problems: tuple[str, ...]
    marks: dict[str, int]


def run_golden(
    family: str,
    mode: GoldenMode,
    prompts: tuple[str, ...],
    *,
    layout: Layout = Layout.UNIFIED,
    tier: Tier = Tier.BITS,
) -> GoldenRun:
    """Run one golden case; what ``tier`` asks for must be as alone. A crash of
    the engine raises ``WorkerDied``.
    """
    choice = profile_of(family)
    answer = shared_worker(choice.profile.environment).call(
        "parity.golden.run:run_golden_here",
        {
            "family": family,
            "mode": mode.value,
            "prompts": prompts,
            "profile": choice.profile.to_json(),
            "layout": layout.value,
            "tier": tier.value,
        },
    )
    facts = engine_fingerprint()
    provenance = GoldenProvenance(
        model=answer["model"],
        engine=f"llama-cpp-python {facts['version']}",
        build=facts["system"],
        cpu=facts["cpu"],
        numerics=choice.profile.for_layout(layout).to_json(),
    )
    sessions = tuple(read_record(GoldenSession, item) for item in answer["sessions"])
    problems = list(answer["problems"])
    problems += [
        f"the mode exercised nothing: mark {mark} is zero"
        for mark in PLANS[mode].marks
        if layout is Layout.UNIFIED and not answer["marks"].get(mark)
    ]
    golden = Golden(family=family, mode=mode.value, reason="", provenance=provenance, sessions=sessions)
    return GoldenRun(golden, tuple(problems), answer["marks"])


def run_golden_here(arguments: dict[str, Any]) -> dict[str, Any]:
    """In the worker: run a mode's case twice, judge it against the oracle, return what every session gave."""
    profile, mode = NumericsProfile.from_json(arguments["profile"]), GoldenMode(arguments["mode"])
    runner, family = process_runner(1), known_family(arguments["family"])
    file = known_model(family.name)
    model = runner.model(file, profile)
    tokens = tuple(tuple(model.tokenize(text)) for text in arguments["prompts"])
    case = replace(golden_case(family.name, mode, tokens), layout=Layout(arguments["layout"]))
    if case.layout is Layout.STREAMS:
        case = replace(case, num_sequences=8, pool_cells=400)
    layout_profile = profile.for_layout(case.layout)
    engine = runner.engine(case, file, family, layout_profile)
    first = runner.attempt(case, engine, family, layout_profile, file)
    second = runner.attempt(case, engine, family, layout_profile, file)
    oracle = runner.oracle(case, file, family, layout_profile)
    outcome = judge(case, first, second, OracleAnswers(case, oracle))
    reached = outcome.verdict_for(Tier(arguments["tier"])) is Verdict.PASS
    problems = [] if reached else [explain_outcome(outcome)]
    sessions, weights = [], load_weights(file.path)
    for index, text in enumerate(arguments["prompts"]):
        answer, data = first.answers[index], b"".join(map(model.token_bytes, first.answers[index].tokens))
        said, wrong = ask_reference(weights, tokens[index], answer.tokens)
        problems += [f"session {index}: {line}" for line in wrong]
        sessions.append(
            {
                "prompt": text,
                "tokens": answer.tokens,
                "text": data.decode("utf-8", "backslashreplace"),
                "data": data.hex(),
                "digests": [digest[:16] for digest in answer.digests],
                "margin": min(oracle.solo(question(case, index)).margins),
                "reference": asdict(said),
            }
        )
    return {"model": file.sha256, "sessions": sessions, "problems": problems, "marks": dict(outcome.marks)}


def ask_reference(
    weights: Weights, prompt: Sequence[int], answer: Sequence[int]
) -> tuple[ReferenceAnswer, tuple[str, ...]]:
    """What the float64 reference picks along an engine's ``answer``; and a line for the first token that it
    does not pick, unless that is a tie: nearer to its best than float32 rounding may move both. Half cells
    may move them much further, but a token that they decide would not hold in every layout.
    """
    sequence = [*prompt, *answer[:-1]]
    logits = run_reference(weights, sequence).logits[len(prompt) - 1 :]
    picked = logits.argmax(axis=-1).tolist()
    second, best = np.sort(logits, axis=-1)[:, -2:].T
    ties, wrong = [], []
    differing = [step for step, token in enumerate(answer) if picked[step] != token]
    if differing:
        widest = expect_logits(weights, sequence, Kernel.PLAIN).widest[len(prompt) - 1 :]
    for step in differing:
        gap = logits[step, picked[step]] - logits[step, answer[step]]
        if gap <= 2 * widest[step]:
            ties.append(f"generated token {step}: {picked[step]} or {answer[step]}, {gap:.2g} apart")
        else:
            wrong.append(
                f"the float64 reference picks token {picked[step]} where generated token "
                f"{step} is {answer[step]}, {gap:.2g} below it"
            )
    margin = float((best - second).min())
    return ReferenceAnswer(tokens=tuple(picked), margin=margin, ties=tuple(ties)), tuple(wrong[:1])


# -- searching prompts


def search_prompts(family: str) -> dict[GoldenMode, tuple[str, ...]]:
    """Prompts of every mode whose smallest margin is the largest among the candidates tried."""
    choice = profile_of(family)
    found = shared_worker(choice.profile.environment).call(
        "parity.golden.run:search_prompts_here", {"family": family, "profile": choice.profile.to_json()}
    )
    return {GoldenMode(mode): tuple(texts) for mode, texts in found.items()}


def search_prompts_here(arguments: dict[str, Any]) -> dict[str, list[str]]:
    """In the worker: alone, greedy, no memo on disk."""
    profile, family = NumericsProfile.from_json(arguments["profile"]), known_family(arguments["family"])
    runner, file = Runner(remember=False), known_model(arguments["family"])
    model = runner.model(file, profile)
    oracle = None

    def margin(text: str) -> float:
        nonlocal oracle
        prompt = tuple(model.tokenize(text))
        if oracle is None:
            oracle = runner.oracle(
                golden_case(family.name, GoldenMode.SHORT, (prompt,)), file, family, profile
            )
        return min(oracle.solo(Question(prompt=prompt, max_tokens=MAX_TOKENS)).margins)

    return {mode.value: _best_prompts(mode, plan, margin) for mode, plan in PLANS.items()}


def _best_prompts(mode: GoldenMode, plan: ModePlan, margin: Callable[[str], float]) -> list[str]:
    chosen: list[str] = []
    for index in range(plan.count):
        start = f"{chosen[0]}. " if plan.continues_first and chosen else ""
        texts = (start + _candidate(mode, plan, index, number) for number in range(plan.candidates))
        chosen.append(max(texts, key=margin))
    return chosen


def _candidate(mode: GoldenMode, plan: ModePlan, index: int, number: int) -> str:
    """The ``number``-th text for session ``index``: an opening, as often as needed, an ending, a number."""
    tail = f"{ENDINGS[(index + number) % len(ENDINGS)]} {number}"
    opening = OPENINGS[(list(GoldenMode).index(mode) + index) % len(OPENINGS)]
    repeats = max(0, -(-(plan.min_bytes - len(tail)) // len(opening)))
    return repeats * opening + tail
