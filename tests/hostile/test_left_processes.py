"""Nothing outlives its parent: whichever way a command is ended, its processes end and its pipe closes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from parity.errors import ExitCode
from parity.processes import Worker
from parity.store import REPOSITORY
from tests.hostile.engines import HANGS_IN

LONG_S = 60.0  # a bound, not a measurement: everything here takes a second or two

CHECK = ("check", "--family", "llama", "--family", "gemma2", "--layout", "unified", "--jobs", "2")
HANGING = (*CHECK, "--engine", "tests.hostile.engines:make_hanging")


def is_worker(process: psutil.Process) -> bool:
    try:
        return "parity.processes" in process.cmdline()
    except psutil.Error:
        return False


def run_until(
    arguments: tuple[str, ...], hangs_in: Path, ready: Callable[[list[psutil.Process]], bool]
) -> tuple[subprocess.Popen, list[psutil.Process]]:
    """A ``parity`` command and its descendants at the moment when ``ready`` holds of them."""
    command = subprocess.Popen(
        [sys.executable, "-m", "parity.cli", *arguments],
        cwd=REPOSITORY,
        env={**os.environ, HANGS_IN: str(hangs_in)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    while True:
        family = psutil.Process(command.pid).children(recursive=True)
        if ready(family):
            return command, family
        try:
            command.wait(0.05)
        except subprocess.TimeoutExpired:
            continue
        pytest.fail(f"ended early: {command.communicate()}")


def run_until_two_hang(arguments: tuple[str, ...], tmp_path: Path) -> Any:
    """The command whose two suites each wait for a worker that is in the middle of a call."""
    hangs_in = tmp_path / "hangs"
    hangs_in.mkdir()
    return run_until(arguments, hangs_in, lambda family: len([*hangs_in.iterdir()]) == 2)


def two_work(family: list[psutil.Process]) -> bool:
    """Two workers besides the one that the command itself asks for the engine's build."""
    return sum(map(is_worker, family)) >= 3


def assert_all_end(command: subprocess.Popen, family: list[psutil.Process]) -> None:
    """The processes end, and with them everything that holds the command's pipe."""
    _, alive = psutil.wait_procs(family, timeout=LONG_S)
    left = [(process.pid, process.cmdline()) for process in alive]
    for process in alive:
        process.kill()
    assert not left
    if not command.stdout.closed:
        command.communicate(timeout=LONG_S)  # waits for the end of the pipe, not only of the command


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT], ids=lambda n: n.name)
def test_no_process_of_a_check_outlives_it(number: signal.Signals, tmp_path: Path) -> None:
    command, family = run_until_two_hang(HANGING, tmp_path)
    command.send_signal(number)

    assert_all_end(command, family)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "arguments",
    [
        ("gate", "--family", "llama", "--only", "suite", "--sessions", "100000"),
        ("fuzz", "--minutes", "10", "--family", "llama"),
    ],
    ids=lambda arguments: arguments[0],
)
def test_no_process_of_a_killed_command_outlives_it(arguments: tuple[str, ...], tmp_path: Path) -> None:
    command, family = run_until(arguments, tmp_path, two_work)
    command.kill()

    assert_all_end(command, family)


def test_ended_check_says_what_it_knows_and_that_it_knows_no_more(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    command, family = run_until_two_hang((*HANGING, "--json", str(report)), tmp_path)
    command.terminate()
    said, complained = command.communicate(timeout=LONG_S)
    assert_all_end(command, family)

    assert command.returncode == ExitCode.UNKNOWN
    assert "verdict: unknown" in said and "interrupted" in said
    assert "Traceback" not in complained
    data = json.loads(report.read_text())
    assert data["verdict"] == "unknown"
    assert {layouts["unified"]["verdict"] for layouts in data["families"].values()} == {"unknown"}


def test_ended_campaign_is_unknown_and_keeps_what_it_counted(tmp_path: Path) -> None:
    totals = tmp_path / "totals.json"
    command, family = run_until(
        ("fuzz", "--exact", "--minutes", "10", "--json", str(totals)),
        tmp_path,
        lambda family: len(family) >= 3,
    )
    command.terminate()
    said, complained = command.communicate(timeout=LONG_S)
    assert_all_end(command, family)

    assert command.returncode == ExitCode.UNKNOWN
    assert "interrupted" in said and "Traceback" not in complained
    assert json.loads(totals.read_text())["cut_off"] == "interrupted"


def test_killed_process_of_the_pool_makes_a_check_unknown(tmp_path: Path) -> None:
    command, family = run_until_two_hang(HANGING, tmp_path)
    pool = [process for process in family if "multiprocessing.spawn" in " ".join(process.cmdline())]
    pool[0].kill()
    said, complained = command.communicate(timeout=LONG_S)

    assert command.returncode == ExitCode.UNKNOWN
    assert "a process of the check died" in said and "Traceback" not in complained


def test_worker_ends_with_its_caller_also_in_the_middle_of_a_call() -> None:
    code = "\n".join(
        [
            "from parity.processes import Worker",
            "worker = Worker()",
            "worker.call('parity.processes:pid_here', {})",
            "print(worker.pid, flush=True)",
            "worker.call('parity.run.faults:hang_here', {})",
        ]
    )
    caller = subprocess.Popen([sys.executable, "-c", code], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True)
    worker = psutil.Process(int(caller.stdout.readline()))
    caller.kill()

    assert_all_end(caller, [worker])


def test_worker_lives_while_its_caller_only_closes_other_files() -> None:
    worker = Worker()
    try:
        first = worker.call("parity.processes:pid_here", {})
        other = Worker()
        other.call("parity.processes:pid_here", {})
        other.close()
        assert worker.call("parity.processes:pid_here", {}) == first
    finally:
        worker.close()
