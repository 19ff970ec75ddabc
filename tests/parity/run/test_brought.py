"""``--scheduler`` and ``--engine``: a user's part runs the suites, a fault in it
turns them red, nonsense is named.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from parity.cases.strategies import landmark
from parity.cli import main
from parity.engines.exact import ExactEngine
from parity.errors import ExitCode
from parity.records import Tier, Verdict
from parity.run.runner import run_own_engine_case
from parity.run.under_test import OURS, Brought
from parity.store import REPOSITORY
from parity.suites.suite import run_suite
from scheduler.limits import Layout
from tests.machine.examples import make_engine

EXAMPLES = "tests.machine.examples"
ONE_SUITE = ["check", "--family", "llama", "--layout", "unified", "--sessions", "9", "--jobs", "1"]
MACHINE = ["tests/machine", "-k", "keeps_the_laws_on_the_engine", "-p", "no:cacheprovider"]


def run_main(arguments: list[str]) -> int:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    return int(caught.value.code)


@pytest.mark.parametrize(
    ("option", "bit_identical"), [("--scheduler=make_scheduler", True), ("--engine=make_engine", False)]
)
def test_check_passes_with_the_examples(option: str, bit_identical: bool, tmp_path: Path) -> None:
    name, _, factory = option.partition("=")
    path = tmp_path / "check.json"

    code = run_main([*ONE_SUITE, name, f"{EXAMPLES}:{factory}", "--json", str(path)])

    counts = json.loads(path.read_text())["families"]["llama"]["unified"]
    assert code == ExitCode.PASS
    assert counts["byte_identical"] == counts["sessions"] >= 9
    assert counts["bit_identical"] == (counts["sessions"] if bit_identical else 0)


@pytest.mark.parametrize("option", ["--scheduler=SwappingScheduler", "--engine=CountingEngine"])
def test_check_is_red_with_a_planted_fault_and_says_how_to_replay_it(
    option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    name, _, factory = option.partition("=")
    monkeypatch.chdir(tmp_path)  # where the failing case is written

    code = run_main([*ONE_SUITE, name, f"{EXAMPLES}:{factory}"])

    said = capfd.readouterr().out
    replay = next(line for line in said.splitlines() if line.startswith("replay: parity "))
    assert code == ExitCode.FAIL and "a case failed" in said
    assert run_main(replay.removeprefix("replay: parity ").split()) == ExitCode.FAIL
    file = replay.split()[3]
    for command in (["replay", file], ["bisect", file], ["trace", file, "--html", "trace.html"]):
        capfd.readouterr()
        assert run_main(command) == ExitCode.USAGE  # a file may be a stranger's: nothing is executed unasked
        assert f"it says {name} {EXAMPLES}:{factory}" in capfd.readouterr().err
        code = run_main([*command, "--as-recorded"])
        assert code == ExitCode.FAIL or command[0] == "trace", command  # a trace is judged by its notes
        assert run_main([*command, "--ours"]) == ExitCode.PASS  # ours has no such fault


@pytest.mark.parametrize("name", ["--scheduler", "--engine"])
@pytest.mark.parametrize(
    ("factory", "says"),
    [
        ("nonsense", "names no factory"),
        ("no.such.module:make", "cannot be imported"),
        (f"{EXAMPLES}:absent", "has no 'absent'"),
        (f"{EXAMPLES}:make_nothing", "lacks "),
        (f"{EXAMPLES}:LeakyCopy", "cannot make one"),
    ],
)
def test_nonsense_costs_one_line_and_exit_64(
    name: str, factory: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_main([*ONE_SUITE, name, factory]) == ExitCode.USAGE

    error = capsys.readouterr().err
    assert says in error and factory.partition(":")[0] in error and error.count("\n") == 1


def test_stock_is_refused_for_an_engine(capsys: pytest.CaptureFixture[str]) -> None:
    code = run_main(["check", "--layout", "stock", "--engine", f"{EXAMPLES}:make_engine"])

    assert code == ExitCode.USAGE and "stock is how llama.cpp places cells" in capsys.readouterr().err


def run_pytest(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-q", *arguments]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    "option", [f"--engine={EXAMPLES}:BrokenEngine", f"--scheduler={EXAMPLES}:SwappingScheduler"]
)
def test_pytest_runs_the_family_suites_with_what_is_brought(option: str) -> None:
    module = "tests/families/test_concurrent_parity.py::test_concurrent_parity"
    done = run_pytest(f"{module}[unified-llama]", option)

    assert done.returncode == 1 and "1 failed" in done.stdout, done.stdout + done.stderr
    assert option.replace("=", " ") in done.stdout  # in the line that replays the case


def test_pytest_runs_the_machine_with_what_is_brought() -> None:
    done = run_pytest(*MACHINE, "--engine", f"{EXAMPLES}:UnmadeEngine")

    assert done.returncode == 1 and "1 failed" in done.stdout and "no room" in done.stdout


def test_pytest_refuses_nonsense_in_one_line() -> None:
    done = run_pytest(*MACHINE, "--engine", f"{EXAMPLES}:make_nothing")

    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert f"object lacks limits, execute, apply in {EXAMPLES}:make_nothing" in done.stderr


def test_bits_of_an_engine_without_logits_are_unknown(tmp_path: Path) -> None:
    brought = Brought(engine=f"{EXAMPLES}:make_engine")
    result = run_suite(
        "llama", Layout.UNIFIED, tier=Tier.BITS, min_sessions=9, brought=brought, failures=tmp_path
    )

    assert result.verdict is Verdict.UNKNOWN and "offers no observe_logits" in result.reason


@pytest.mark.parametrize(("noisy", "verdict"), [(False, Verdict.PASS), (True, Verdict.FAIL)])
def test_logits_that_an_engine_shows_are_compared(noisy: bool, verdict: Verdict) -> None:
    """The tokens are the same; the logits are noisy where sessions share a batch."""
    brought = Brought(engine=f"{EXAMPLES}:{'NoisyEngine' if noisy else 'ShowingEngine'}")
    outcome = run_own_engine_case(landmark("llama", Layout.UNIFIED), brought)

    assert brought.why_no_bits() == ""
    assert outcome.verdict is verdict and outcome.byte_identical == outcome.sessions == 9
    assert (outcome.bit_identical == outcome.sessions) is not noisy


def test_nothing_brought_is_ours() -> None:
    assert (OURS.options, OURS.tier, OURS.why_no_bits()) == ("", Tier.BITS, "")
    assert OURS.engine_factory is ExactEngine
    assert Brought(engine=f"{EXAMPLES}:make_engine").engine_factory is not make_engine  # it is checked
