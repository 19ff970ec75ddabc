"""Mutation testing: each mutation in a tree of its own, against commands that must notice it.

A tree is a copy of the checkout's files with one file replaced, so that worker processes see the mutated file
too and the checkout is never touched, whatever the tests write.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, wait
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import yaml

from parity.campaign.mutations import Mutation
from parity.errors import UsageError
from parity.store import REPOSITORY, save_text

EQUIVALENT = Path(__file__).with_name("equivalent.yaml")
LAST_LINES = 6
TIMEOUT_FACTOR = 4.0  # a mutated run that takes this many times the clean run hangs


class Fate(StrEnum):
    """What became of a mutation."""

    KILLED = "killed"
    TIMEOUT = "timeout"  # noticed, by never ending
    SURVIVED = "survived"
    EQUIVALENT = "equivalent"  # survived, and argued to change nothing that can be seen


@dataclass(frozen=True, slots=True)
class Judged:
    """One mutation's fate; ``killer`` is the command that noticed it, ``said`` the end of what it printed."""

    key: str
    path: str
    line: int
    operator: str
    patch: str
    fate: Fate
    killer: str
    said: str
    seconds: float


def load_equivalent(path: Path = EQUIVALENT) -> dict[str, str]:
    """Reasons of the mutations that were judged equivalent, by key. Raises ``UsageError``."""
    entries = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    for key, entry in entries.items():
        if not isinstance(entry, dict) or not entry.get("reason") or not entry.get("patch"):
            raise UsageError(
                f"mutation {key} has no patch or no reason",
                where=str(path),
                todo="say why it changes nothing",
            )
    return {key: entry["reason"] for key, entry in entries.items()}


def tracked_files(root: Path = REPOSITORY) -> list[str]:
    """Every file that a clean checkout would have, and new ones that git does not ignore."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    try:
        listed = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise UsageError(
            "the checkout's files cannot be listed", where=str(root), why=str(error), todo="run in a checkout"
        ) from error
    return [name for name in listed.splitlines() if (root / name).is_file()]


@contextmanager
def mutated_tree(mutation: Mutation | None) -> Iterator[Path]:
    """A tree with one file replaced (None: none), removed afterwards."""
    with tempfile.TemporaryDirectory(prefix="samebytes-mutate-") as name:
        folder = Path(name)
        for file in tracked_files():
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(REPOSITORY / file, folder / file)
        if mutation is not None:
            save_text(folder / mutation.path, mutation.source)
        yield folder


def run_commands(folder: Path, commands: Sequence[str], *, timeout_s: float) -> tuple[Fate, str, str]:
    """Run shell commands in a tree until one notices: fate, that command, the end of its output."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(folder),
        "PYTHONDONTWRITEBYTECODE": "1",
        "SAMEBYTES_CACHE": os.environ.get("SAMEBYTES_CACHE", str(Path.home() / ".cache" / "samebytes")),
    }
    for command in commands:
        process = subprocess.Popen(
            command,
            shell=True,
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        try:
            said, _ = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            return Fate.TIMEOUT, command, f"longer than {timeout_s:.0f} s"
        finally:
            end_group(process)
        if process.returncode != 0:
            return Fate.KILLED, command, "\n".join(said.splitlines()[-LAST_LINES:])
    return Fate.SURVIVED, "", ""


def end_group(process: subprocess.Popen) -> None:
    """End a command with everything that it started."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


def judge_mutation(order: Mapping[str, Any]) -> dict[str, Any]:
    """What an executor is given: one mutation as data in, its fate as data out."""
    mutation = Mutation(**order["mutation"])
    started = time.monotonic()
    with mutated_tree(mutation) as folder:
        fate, killer, said = run_commands(folder, order["commands"], timeout_s=order["timeout_s"])
    seconds = round(time.monotonic() - started, 2)
    judged = Judged(
        mutation.key,
        mutation.path,
        mutation.line,
        mutation.operator,
        mutation.patch,
        fate,
        killer,
        said,
        seconds,
    )
    return asdict(judged)


def measure_baseline(commands: Sequence[str], *, timeout_s: float) -> float:
    """Seconds of the commands on the unchanged tree. Raises ``UsageError`` when they fail there."""
    started = time.monotonic()
    with mutated_tree(None) as folder:
        fate, command, said = run_commands(folder, commands, timeout_s=timeout_s)
    if fate is not Fate.SURVIVED:
        raise UsageError(
            f"{command!r} does not pass without a mutation",
            where="--tests",
            why=said.splitlines()[-1] if said else fate.value,
            todo="mend that first, or name other commands",
        )
    return time.monotonic() - started


def load_state(path: Path) -> dict[str, Judged]:
    """Judged mutations of an earlier run, by key; a last line that was cut short is left out."""
    judged = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            data = json.loads(line)
            judged[data["key"]] = Judged(**{**data, "fate": Fate(data["fate"])})
        except (ValueError, TypeError, KeyError):
            continue
    return judged


def run_mutations(
    mutations: Sequence[Mutation],
    executor: Executor,
    *,
    commands: Sequence[str],
    jobs: int,
    timeout_s: float,
    state: Path | None,
    on_judged: Callable[[Judged], None],
) -> list[Judged]:
    """Judge every mutation, those that ``state`` has as killed not again; results in the order of the list.

    ``state`` gets a line for each as it comes, so an interrupted run goes on where it stopped. Survivors are
    always tried again: the tests may have learnt something.
    """
    known = load_state(state) if state is not None else {}
    done: dict[str, Judged] = {}
    waiting = []
    for mutation in mutations:
        old = known.get(mutation.key)
        if old is not None and old.fate in (Fate.KILLED, Fate.TIMEOUT):
            done[mutation.key] = old
            on_judged(old)
        else:
            waiting.append(mutation)
    equivalent = load_equivalent()
    pending: dict[Future, str] = {}
    if state is not None and known:
        save_text(state, "".join(json.dumps(asdict(item)) + "\n" for item in known.values()))
    with open(state or os.devnull, "a", encoding="utf-8") as file:
        while waiting or pending:
            while waiting and len(pending) < jobs:
                mutation = waiting.pop(0)
                order = {"mutation": asdict(mutation), "commands": list(commands), "timeout_s": timeout_s}
                pending[executor.submit(judge_mutation, order)] = mutation.key
            finished, _ = wait(pending, return_when=FIRST_COMPLETED)
            for future in finished:
                data = future.result()
                fate = Fate(data["fate"])
                if fate is Fate.SURVIVED and data["key"] in equivalent:
                    fate = Fate.EQUIVALENT
                    data["said"] = equivalent[data["key"]]
                judged = done[pending.pop(future)] = Judged(**{**data, "fate": fate})
                file.write(json.dumps(asdict(judged)) + "\n")
                file.flush()
                on_judged(judged)
    return [done[mutation.key] for mutation in mutations]
