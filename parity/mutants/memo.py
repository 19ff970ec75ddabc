"""Mutants of the oracle and its memo. Every run has a memo folder and an oracle of
its own, thrown away afterwards.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import parity.run.oracle as oracle_module
from parity.engines.numerics import ROW
from parity.mutants import cases, sharing_cases
from parity.mutants.mutant import Complaint, Killer, Place, Reach, Trial, mutant, replaced
from parity.mutants.rows import DIFFERS
from parity.mutants.seam import in_method
from parity.mutants.trials import complaints_of
from parity.records import Case
from parity.run.oracle import Oracle, Question
from parity.run.runner import Runner


def memo_trial(*runs: Case) -> Trial:
    """Cases one after the other, each in a runner of its own, with one memo folder."""

    def run() -> tuple[Complaint, ...]:
        with tempfile.TemporaryDirectory() as folder:

            def into_folder(original: Any) -> Callable[..., Path]:
                def cache_dir(*parts: str) -> Path:
                    path = Path(folder, *parts)
                    path.mkdir(parents=True, exist_ok=True)
                    return path

                return cache_dir

            with replaced(oracle_module, "cache_dir", into_folder):
                return tuple(c for case in runs for c in complaints_of(Runner(n_threads=1).run(case, ROW)))

    return Trial(
        name=f"{runs[0].family} memo", family=runs[0].family, place=Place.REAL, case=runs[0], run=run
    )


# With flash attention llama.cpp casts an f32 cache to f16, so only plain attention tells the two apart.
STREAMS_CASE = cases.mixed("llama", **cases.STREAMS)


@mutant(
    in_method(Question, "key"),
    part="oracle",
    killers=DIFFERS,
    trials=(memo_trial(sharing_cases.shared_prefix("llama", prefix_cache=False)),),
)
def oracle_memo_by_the_first_tokens(original: Callable[..., Any], reach: Reach) -> Callable[..., Any]:
    """Answers are remembered by the beginning of their prompt."""

    def key(self: Question) -> str:
        if len(self.prompt) > 8:
            reach()
        return original(replace(self, prompt=self.prompt[:8]))

    return key


@mutant(
    in_method(Question, "key"),
    part="oracle",
    killers=(Killer.BYTES,),
    trials=(memo_trial(cases.one_prompt_two_limits("llama")),),
)
def oracle_memo_without_the_limit(original: Callable[..., Any], reach: Reach) -> Callable[..., Any]:
    """Answers are remembered whatever their number of tokens was."""

    def key(self: Question) -> str:
        reach()
        return original(replace(self, max_tokens=1))

    return key


@mutant(
    in_method(Question, "key"),
    part="oracle",
    killers=(Killer.BYTES,),
    trials=(memo_trial(cases.seeded("llama")),),
)
def oracle_memo_without_the_seed(original: Callable[..., Any], reach: Reach) -> Callable[..., Any]:
    """Answers are remembered whatever their seed and session were."""

    def key(self: Question) -> str:
        if self.sampling.temperature:
            reach()
        return original(replace(self, request_id="", sampling=replace(self.sampling, seed=0)))

    return key


@mutant(
    in_method(Question, "key"),
    part="oracle",
    killers=(Killer.BYTES,),
    trials=(memo_trial(cases.one_prompt_two_temperatures("llama")),),
)
def oracle_memo_without_temperature_and_top_p(
    original: Callable[..., Any], reach: Reach
) -> Callable[..., Any]:
    """Answers are remembered whatever their temperature and their cut-off by mass were."""

    def key(self: Question) -> str:
        if self.sampling.temperature:
            reach()
        sampling = replace(self.sampling, temperature=1.0 if self.sampling.temperature else 0.0, top_p=1.0)
        return original(replace(self, sampling=sampling))

    return key


@mutant(
    in_method(Question, "key"),
    part="oracle",
    killers=(Killer.BYTES,),
    trials=(memo_trial(cases.one_prompt_with_and_without_a_stop("llama")),),
)
def oracle_memo_without_the_stop_tokens(original: Callable[..., Any], reach: Reach) -> Callable[..., Any]:
    """Answers are remembered whatever tokens they were to stop at."""

    def key(self: Question) -> str:
        if self.stop_token_ids:
            reach()
        return original(replace(self, stop_token_ids=()))

    return key


@mutant(
    in_method(Oracle, "__init__"),
    part="oracle",
    killers=(Killer.BITS,),
    trials=(memo_trial(STREAMS_CASE, replace(STREAMS_CASE, kv_type="f32")),),
)
def oracle_memo_without_the_kv_type(original: Callable[..., Any], reach: Reach) -> Callable[..., Any]:
    """Answers of f16 and of f32 caches are remembered together."""

    def init(self: Oracle, *arguments: Any, **rest: Any) -> None:
        original(self, *arguments, **rest)
        self._folder = "one"
        reach()

    return init


@mutant(
    in_method(Oracle, "_run"),
    part="oracle",
    killers=(Killer.INTERNAL, *DIFFERS),
    trials=(memo_trial(cases.mixed("llama")), memo_trial(cases.mixed("qwen3next"))),
)
def oracle_context_not_cleared(original: Callable[..., Any], reach: Reach) -> Callable[..., Any]:
    """The session alone is not alone: the context still holds the one before it."""

    def run(self: Oracle, question: Question) -> Any:
        clear, self._context.clear = self._context.clear, reach
        try:
            return original(self, question)
        finally:
            self._context.clear = clear

    return run
