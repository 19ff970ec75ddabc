"""A candidate against main in one run: right, wrong, dead, and main itself at fault. Each by the command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from parity.commands.gate import command as gate
from parity.errors import ExitCode, UsageError
from parity.report.data import check_against_schema
from tests.parity.endpoint.conftest import Rounded
from tests.parity.endpoint.stand_in import StandIn, running
from tests.parity.endpoint.wrong_servers import MovesTooFar, OneAtATime, SwapsNeighbours

SIZES = {"prompts": 14, "max-tokens": 8, "rounds": 1, "concurrency": 8, "disconnects": 2}
SMALL = [text for name, value in SIZES.items() for text in (f"--{name}", str(value))]
DEAD = "http://127.0.0.1:9"


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reports and cases are written where the command is called."""
    monkeypatch.chdir(tmp_path)
    for variable in ("GITHUB_ACTIONS", "GITHUB_STEP_SUMMARY"):
        monkeypatch.delenv(variable, raising=False)


def pair(candidate: str, main: str) -> tuple[ExitCode, dict]:
    """The gate's exit code and its one check, after every report was written."""
    outputs = [
        word for kind in ("json", "junit", "markdown", "html") for word in (f"--{kind}", f"gate.{kind}")
    ]
    words = ["--system", candidate, "--baseline", main, "--model", "toy", *SMALL, *outputs]
    code = gate.main(words, standalone_mode=False)
    data = json.loads(Path("gate.json").read_text())
    check_against_schema(data)
    (check,) = data["checks"]
    for kind in ("junit", "markdown", "html"):
        assert "toy" in Path(f"gate.{kind}").read_text()
    return code, check


def of_servers(candidate: StandIn, main: StandIn) -> tuple[ExitCode, dict]:
    with running(candidate) as one, running(main) as other:
        return pair(one, other)


def test_build_that_rounds_as_main_does_passes() -> None:
    code, check = of_servers(Rounded(), Rounded())
    assert (code, check["kind"], check["verdict"]) == (ExitCode.PASS, "system", "pass"), check
    assert "compatible with rounding" in check["explanation"]
    assert "3 runs of a known-good server" in check["explanation"]


@pytest.mark.parametrize("fault", [SwapsNeighbours, pytest.param(MovesTooFar, marks=pytest.mark.nightly)])
def test_faulty_build_fails_and_the_prompt_is_named(fault: type[StandIn]) -> None:
    code, check = of_servers(fault(), Rounded())
    assert (code, check["verdict"]) == (ExitCode.FAIL, "fail")
    assert check["reason"].startswith("prompt "), check["reason"]
    assert "parity replay parity-cases/system-" in check["explanation"]


@pytest.mark.nightly
def test_what_is_not_proved_is_no_pass() -> None:
    code, check = of_servers(OneAtATime(), StandIn())
    assert (code, check["verdict"]) == (ExitCode.UNKNOWN, "unknown")
    assert check["reason"]


@pytest.mark.nightly
def test_main_at_fault_proves_nothing_of_the_candidate() -> None:
    code, check = of_servers(StandIn(), SwapsNeighbours())
    assert code is ExitCode.UNKNOWN
    assert check["reason"].startswith("the baseline's server is at fault itself: ")


def test_dead_candidate_fails_and_dead_main_is_unknown() -> None:
    with running(StandIn()) as url:
        code, check = pair(DEAD, url)
        assert code is ExitCode.FAIL and check["reason"].startswith("the candidate's server: ")
        code, check = pair(url, DEAD)
        assert code is ExitCode.UNKNOWN and check["reason"].startswith("the baseline's server: ")
        code, check = pair("/nowhere/llama-server -m x.gguf", url)
        assert code is ExitCode.FAIL and "exited with 127" in check["reason"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--system", DEAD, "--baseline", DEAD], "--system without --baseline or --model"),
        (["--baseline", DEAD], "--baseline without --system"),
        (["--prompts", "3"], "--prompts without --system"),
        (
            ["--system", DEAD, "--baseline", DEAD, "--model", "x", "--family", "llama"],
            "--family with --system",
        ),
        (["--system", "'", "--baseline", DEAD, "--model", "x"], "no command line in --system"),
    ],
)
def test_option_that_would_change_nothing_is_refused(words: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        gate.main([*words, "--json", "gate.json"], standalone_mode=False)
