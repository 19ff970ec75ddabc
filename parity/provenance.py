"""What a run holds for: seed, commit, llama.cpp build, processor."""

from __future__ import annotations

import subprocess

from parity.profiles import engine_fingerprint
from parity.records import Provenance
from parity.store import REPOSITORY


def commit_id() -> str:
    """The checkout's commit, with ``+`` where it has changes; ``unknown`` outside a checkout."""
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
