"""Runs a case on the exact engine: no model, no process, the same driver and the
same checkers, in milliseconds.
"""

from __future__ import annotations

import traceback
from dataclasses import replace

from parity.checkers.ends import ENGINE_FAULTS, check_ends
from parity.checkers.identity import Answer, compare_run, explain_divergence
from parity.checkers.marks import count_marks
from parity.drive import Driver, Run
from parity.engines.exact import EngineAbort, ExactEngine, ExactModel, expected_tokens, hidden_stops
from parity.numerics import ROW
from parity.records import Case, Fault, Outcome, Verdict
from parity.runner import known_family, pool_limits
from scheduler.limits import PoolLimits
from scheduler.loop import Scheduler
from scheduler.policies import make_policy

EXACT_VOCABULARY = 1 << 30  # so that a wrong row is a wrong token: two digests agree once in a billion
EXACT_WINDOW = 8


def exact_model(case: Case) -> ExactModel:
    """What the sessions of a case see on the exact engine."""
    family = known_family(case.family)
    window = EXACT_WINDOW if family.needs_shadow else None
    return ExactModel(window=window, recurrent=family.is_hybrid, vocabulary=EXACT_VOCABULARY)


def exact_limits(case: Case) -> tuple[PoolLimits, ...]:
    """Limits of a case's pools, one per stage; ``stage_cells`` gives the number of stages and their sizes."""
    limits = pool_limits(case, known_family(case.family), ROW.for_layout(case.layout))
    return tuple(replace(limits, num_cells=cells) for cells in case.stage_cells) or (limits,)


def expected_answers(case: Case) -> dict[int, Answer]:
    """What each session gives alone; a token's digest is the token itself."""
    model, stops = exact_model(case), hidden_stops(case.sessions)
    answers = {}
    for index, session in enumerate(case.sessions):
        tokens = expected_tokens(
            model,
            session.prompt,
            session.max_tokens,
            request_id=f"s{index}",
            sampling=session.sampling,
            stop_token_ids=session.stop_token_ids,
            stop=stops.get(f"s{index}"),
            stages=max(1, len(case.stage_cells)),
        )
        answers[index] = exact_answer(tokens)
    return answers


def exact_answer(tokens: tuple[int, ...]) -> Answer:
    """Tokens of the exact engine as an answer: a wrong logit and a wrong token are the same thing."""
    return Answer(tokens, tuple(map(str, tokens)))


def drive_exact(case: Case, engine: ExactEngine) -> Run:
    """One run of a case on an idle engine."""
    policy = make_policy(case.policy, **dict(case.policy_options))

    def inject(fault: Fault) -> bool:
        if fault.kind in ENGINE_FAULTS:
            engine.fail_next(fault.call)
            return True
        return False

    return Driver(case, Scheduler(engine, policy, case.step_limits()), engine, inject).drive()


def run_exact_case(case: Case) -> Outcome:
    """Run a case twice on one exact engine and judge it as a real one is judged.

    A call that would abort llama.cpp is an outcome (``crashed``); an exception of the
    scheduler or a checker is a problem.
    """
    engine = ExactEngine(exact_limits(case), exact_model(case), stops=hidden_stops(case.sessions))
    try:
        run = drive_exact(case, engine)
        problems = [*run.problems, *check_ends(run)]
        used = sum(pool.num_used() for pool in engine.pools)
        if used and not run.problems:
            problems.append(f"memory: {used} cells still have an owner after the case")
        if not problems and _signature(drive_exact(case, engine)) != _signature(run):
            problems.append("not reproducible: the case differs from itself when it runs again")
        return judge_exact(case, run, problems)
    except EngineAbort as abort:
        return Outcome(case=case, verdict=Verdict.FAIL, crashed=True, reason=str(abort))
    except Exception as error:  # a bug of ours is what a case came to, not the end of the run
        line = " ".join(f"{type(error).__name__}: {error}".split())
        return Outcome(
            case=case,
            verdict=Verdict.FAIL,
            problems=(f"internal: {line}",),
            stderr=traceback.format_exc(),
        )


def judge_exact(case: Case, run: Run, problems: list[str]) -> Outcome:
    """Compare with the definition, explain, count."""
    actual = {index: exact_answer(completion.tokens) for index, completion in run.completions.items()}
    return judge_answers(case, run, problems, expected=expected_answers(case), actual=actual)


def judge_answers(
    case: Case, run: Run, problems: list[str], *, expected: dict[int, Answer], actual: dict[int, Answer]
) -> Outcome:
    """The outcome of a run without margins: what its sessions gave against what they give alone."""
    comparisons = compare_run(run, expected, actual)
    divergences = tuple(
        explain_divergence(run, c, expected[c.session], margin=0.0, distance=lambda *_: float("inf"))
        for c in comparisons
        if c.bits_step is not None or c.bytes_step is not None
    )
    return Outcome(
        case=case,
        verdict=Verdict.FAIL if divergences or problems else Verdict.PASS,
        sessions=len(comparisons),
        bit_identical=sum(c.bits_step is None for c in comparisons),
        byte_identical=sum(c.bytes_step is None for c in comparisons),
        divergences=divergences,
        problems=tuple(problems),
        marks=count_marks(run),
    )


def _signature(run: Run) -> list:
    return [
        (index, completion.tokens, completion.reason) for index, completion in sorted(run.completions.items())
    ]
