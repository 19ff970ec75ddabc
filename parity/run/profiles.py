"""The numerics self-test: which profile is exact for a model on this CPU and build, and what each costs."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import platform
import random
import subprocess
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

from parity.engines.numerics import NumericsProfile, profile_candidates
from parity.errors import UsageError
from parity.models import resolve_model
from parity.models.gguf import read_header
from parity.processes import CallFailed, Worker, WorkerDied, shared_worker
from parity.records import Case, Provenance, Session
from parity.store import REPOSITORY, SHIPPED, cache_dir, file_sha256, save_text

FORMAT = 3
JUDGING_CODE = ("scheduler", "parity/engines", "parity/run", "parity/checkers")
REBUILD = "rebuild llama-cpp-python with CMAKE_ARGS=-DGGML_LLAMAFILE=OFF (`make setup` does)"


@dataclass(frozen=True, slots=True)
class Trial:
    """One candidate's self-test: sessions compared, bit-identical ones, generated
    tokens per second in the pool.

    ``problem`` says why there is no judgement: the worker was ended, the engine aborted, our own code failed.
    """

    profile: NumericsProfile
    sessions: int
    bit_identical: int
    tokens_per_s: float
    problem: str = ""

    @property
    def exact(self) -> bool:
        return self.sessions > 0 and self.bit_identical == self.sessions and not self.problem

    @property
    def is_judgement(self) -> bool:
        """Whether the candidate was judged; an accident says nothing about it and is never remembered."""
        return self.sessions > 0 and not self.problem


@dataclass(frozen=True, slots=True)
class ProfileChoice:
    """The fastest exact candidate, or the default one with the reason why tier ``bits`` is unknown."""

    profile: NumericsProfile
    trials: tuple[Trial, ...]
    reason: str = ""

    @property
    def exact(self) -> bool:
        return not self.reason


def self_test_cases(family: str, model: str) -> list[Case]:
    """Small cases that mix widths: wide prefills beside decodes, lone rows, and many decodes in one call."""
    rng = random.Random(f"self-test {family}")

    def sessions(lengths: list[int]) -> tuple[Session, ...]:
        return tuple(
            Session(
                prompt=tuple(rng.randrange(3, 250) for _ in range(length)), max_tokens=10, arrival_step=2 * i
            )
            for i, length in enumerate(lengths)
        )

    return [
        Case(
            family=family,
            model=model,
            sessions=sessions([3, 90, 17, 60, 41, 8, 130, 33]),
            max_num_batched_tokens=96,
            prefix_cache=False,
        ),
        Case(
            family=family,
            model=model,
            sessions=sessions([12, 1, 30]),
            max_num_batched_tokens=5,
            prefix_cache=False,
        ),
        Case(
            family=family,
            model=model,
            sessions=sessions([5, 2, 9, 1, 7, 3, 4, 11, 6, 8, 2, 10, 5, 3, 1, 4]),
            max_num_batched_tokens=63,
            prefix_cache=False,
        ),
    ]


def probe_here(arguments: dict[str, Any]) -> dict[str, Any]:
    """In the worker: run the self-test's cases under one profile."""
    from parity.run.runner import process_runner

    profile = NumericsProfile.from_json(arguments["profile"])
    runner = process_runner(arguments["n_threads"])
    sessions = identical = tokens = 0
    elapsed_s = 0.0
    for case in self_test_cases(arguments["family"], arguments["model"]):
        begin = perf_counter()
        outcome = runner.run(case, profile)
        elapsed_s += perf_counter() - begin
        if outcome.crashed or outcome.problems:
            # The run itself went wrong, so what its sessions gave does not judge the kernels.
            raise RuntimeError(outcome.reason or outcome.problems[0])
        sessions += outcome.sessions
        identical += outcome.bit_identical
        tokens += sum(session.max_tokens for session in case.sessions)
    return {"sessions": sessions, "bit_identical": identical, "tokens_per_s": tokens / elapsed_s}


def engine_fingerprint_here(arguments: dict[str, Any]) -> dict[str, str]:
    """In the worker: build facts of the library."""
    from parity.engines.llama import build_facts

    return build_facts()


@functools.cache
def engine_fingerprint() -> dict[str, str]:
    """Build facts of llama.cpp and of this CPU, for provenance and for what is remembered.

    Raises ``UsageError`` when llama_cpp is missing.
    """
    facts = shared_worker(()).call("parity.run.profiles:engine_fingerprint_here", {})
    return {**facts, "cpu": cpu_name()}


def cpu_name() -> str:
    """Model name of the processor, with its feature flags digested."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}".strip()
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    values = {key.strip(): value.strip() for key, value in fields.items()}
    flags = hashlib.blake2b(
        values.get("flags", values.get("Features", "")).encode(), digest_size=4
    ).hexdigest()
    return f"{values.get('model name', platform.machine())} flags {flags}"


def try_profile(model: str, family: str, profile: NumericsProfile, *, n_threads: int = 1) -> Trial:
    """Self-test one candidate in a process of its own, because its environment is read once."""
    worker = Worker(profile.environment)
    try:
        answer = worker.call(
            "parity.run.profiles:probe_here",
            {"model": model, "family": family, "profile": profile.to_json(), "n_threads": n_threads},
        )
        return Trial(profile, answer["sessions"], answer["bit_identical"], answer["tokens_per_s"])
    except (WorkerDied, CallFailed) as error:
        return Trial(profile, 0, 0, 0.0, str(error))
    finally:
        worker.close()


def try_all(model: str) -> tuple[Trial, ...]:
    """Self-test every candidate for a model."""
    file = resolve_model(model)
    types = tensor_types(file.path)
    quantised = any(name not in ("F32", "F16", "BF16") for name in types)
    candidates = profile_candidates(quantised=quantised, k_quants=any(name.endswith("_K") for name in types))
    return tuple(try_profile(model, file.family, candidate) for candidate in candidates)


def tensor_types(path: Path) -> list[str]:
    """Names of the tensor types in a GGUF, sorted."""
    return sorted({tensor.type.name for tensor in read_header(path).tensors})


@functools.cache
def code_version() -> str:
    """Digest of the source that a self-test's judgement rests on: scheduler, engines, run and checkers."""
    digest = hashlib.blake2b(digest_size=16)
    for folder in JUDGING_CODE:
        for path in sorted((REPOSITORY / folder).rglob("*.py")):
            digest.update(f"{path.relative_to(REPOSITORY)}\0{file_sha256(path)}\n".encode())
    return digest.hexdigest()


@functools.cache
def profile_of(model: str) -> ProfileChoice:
    """The remembered choice for a model, this build, this CPU and this code; found by the self-test if there
    is none. Only judgements are remembered: with one accident among the trials, the next process tries again.
    """
    file = resolve_model(model)
    identity = json.dumps([FORMAT, file.sha256, engine_fingerprint(), code_version()], sort_keys=True)
    path = cache_dir("profiles") / f"{hashlib.blake2b(identity.encode(), digest_size=16).hexdigest()}.json"
    trials = load_trials(path)
    if trials is None:
        trials = try_all(model)
        if all(trial.is_judgement for trial in trials):
            save_text(path, json.dumps([trial_to_data(trial) for trial in trials]))
    return choose(trials)


def load_trials(path: Path) -> tuple[Trial, ...] | None:
    """Trials in a file of the cache; None if it is absent, unreadable or holds anything but judgements."""
    try:
        trials = tuple(
            Trial(NumericsProfile.from_json(item.pop("profile")), **item)
            for item in json.loads(path.read_text())
        )
        return trials if trials and all(trial.is_judgement for trial in trials) else None
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


def trial_to_data(trial: Trial) -> dict[str, Any]:
    """JSON-able form of a trial, which ``load_trials`` reads."""
    return {
        "profile": trial.profile.to_json(),
        "sessions": trial.sessions,
        "bit_identical": trial.bit_identical,
        "tokens_per_s": trial.tokens_per_s,
    }


def choose(trials: tuple[Trial, ...]) -> ProfileChoice:
    """The fastest exact trial; without one the first, with the reason; an accident is no judgement."""
    exact = [trial for trial in trials if trial.exact]
    if exact:
        return ProfileChoice(max(exact, key=lambda trial: trial.tokens_per_s).profile, trials)
    if not trials:
        raise UsageError("no numerics profile to try", why="the model has no tensors")
    accidents = [
        f"{trial.profile.name}: {trial.problem or 'it compared nothing'}"
        for trial in trials
        if not trial.is_judgement
    ]
    if accidents:
        return ProfileChoice(
            trials[0].profile, trials, f"the self-test did not finish: {'; '.join(accidents)}; run it again"
        )
    facts = engine_fingerprint()
    why = (
        "llamafile SGEMM is on" if "LLAMAFILE = 1" in facts["system"] else "no candidate is exact on this CPU"
    )
    return ProfileChoice(trials[0].profile, trials, f"{why}; {REBUILD}")


# -- What a run holds for: seed, commit, llama.cpp build, processor.


def commit_id() -> str:
    """The checkout's commit, with ``+`` where it has changes; the version where samebytes is installed."""
    if SHIPPED != REPOSITORY:
        return f"samebytes-{importlib.metadata.version('samebytes')}"
    try:
        head = subprocess.run(
            ["git", "rev-parse", "--short=12", "HEAD"],
            cwd=REPOSITORY,
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        changed = subprocess.run(
            ["git", "status", "--porcelain", "--untracked-files=no"],
            cwd=REPOSITORY,
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head + ("+" if changed else "")


def provenance(*, seed: int = 0) -> Provenance:
    """Provenance of a run in this checkout. Raises ``UsageError`` when llama_cpp is missing."""
    facts = engine_fingerprint()
    return Provenance(
        commit=commit_id(),
        engine=f"llama-cpp-python {facts['version']}",
        engine_build=facts["system"],
        cpu=facts["cpu"],
        seed=seed,
    )


def provenance_line(seed: int | None) -> str:
    """First line of every run that draws something."""
    return f"seed {'derandomised' if seed is None else seed}, {engine_line()}"


def engine_line() -> str:
    """Commit, llama.cpp build and processor."""
    held = provenance()
    return f"commit {held.commit}, {held.engine}, {held.engine_build} {held.cpu}"
