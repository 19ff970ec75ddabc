"""Both doors to the black-box check, ``parity check --endpoint`` and ``parity check-endpoint``: the same
options, exit codes, duration, baselines, and a server that gives nothing but text.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from parity.commands.check import OURS_ALONE
from parity.commands.check import command as check
from parity.commands.check_endpoint import command as check_endpoint
from parity.errors import ExitCode, UsageError
from tests.parity.endpoint.stand_in import StandIn, running
from tests.parity.endpoint.test_endpoint_check import forget_seed, swap_neighbours

SIZES = {"prompts": 6, "prompt-tokens": 60, "max-tokens": 24, "rounds": 1, "concurrency": 6, "disconnects": 0}
SMALL = [text for name, value in SIZES.items() for text in (f"--{name}", str(value))]
NIGHTLY_S, NIGHTLY_CLIENTS = 60, 64


class TextOnly(StandIn):
    """A server that ignores what it does not know: no token ids, no log probabilities."""

    shows_logprobs = False


@pytest.fixture
def text_only() -> Iterator[str]:
    """The address of a server that gives text alone."""
    with running(TextOnly()) as url:
        yield url


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Case files of faults are written where the command is called."""
    monkeypatch.chdir(tmp_path)


def by_check(url: str, *more: str) -> ExitCode:
    return check.main(["--endpoint", url, "--model", "llama", *SMALL, *more], standalone_mode=False)


def by_check_endpoint(url: str, *more: str) -> ExitCode:
    return check_endpoint.main([url, "--model", "llama", *SMALL, *more], standalone_mode=False)


def test_both_doors_have_the_same_options() -> None:
    """All but how the server is named, and what is for our own engine."""
    names = {parameter.name for parameter in check.params} - set(OURS_ALONE) - {"endpoint"}
    assert names == {parameter.name for parameter in check_endpoint.params} - {"url"}
    assert "Another name of `parity check --endpoint URL`" in check_endpoint.help


@pytest.mark.parametrize("door", [by_check, by_check_endpoint])
def test_default_is_what_the_server_gives(
    door: Callable[..., Any], url: str, text_only: str, tmp_path: Path
) -> None:
    report = tmp_path / "report.json"
    for address, tier in ((url, "bits"), (text_only, "bytes")):
        assert door(address, "--json", str(report)) is ExitCode.PASS
        found = json.loads(report.read_text())
        assert (found["tier"], found["logprobs"] == "") == (tier, tier == "bits")
        assert found["compared"] == found["prompts"] and found["differ_under_load"] == 0


@pytest.mark.parametrize("door", [by_check, by_check_endpoint])
def test_tier_that_is_asked_for_is_never_lowered(door: Callable[..., Any], text_only: str) -> None:
    assert door(text_only, "--tier", "bits") is ExitCode.UNKNOWN
    assert door(text_only, "--tier", "bytes") is ExitCode.PASS


@pytest.mark.parametrize(("door", "fault"), [(by_check, swap_neighbours), (by_check_endpoint, forget_seed)])
def test_server_that_mixes_up_is_exit_1_and_leaves_a_case(
    door: Callable[..., Any], fault: Callable[..., Any], start: Any, tmp_path: Path
) -> None:
    assert door(start(change=fault), "--cases", str(tmp_path / "cases")) is ExitCode.FAIL
    assert len(list((tmp_path / "cases").glob("system-*.json"))) == 1


def test_option_that_would_change_nothing_is_refused(url: str) -> None:
    with pytest.raises(UsageError, match="--chat without --endpoint"):
        check.main(["--chat"], standalone_mode=False)
    with pytest.raises(UsageError, match="--sessions with --endpoint"):
        by_check(url, "--sessions", "7")
    with pytest.raises(UsageError, match="rounding without --endpoint"):
        check.main(["--tier", "rounding"], standalone_mode=False)
    with pytest.raises(UsageError, match="no JSON in --extra-body"):
        by_check(url, "--extra-body", "{")


def test_calibrated_file_is_the_baseline_of_the_next_check(url: str, tmp_path: Path) -> None:
    noise = tmp_path / "noise.json"
    for seed in ("1", "2"):
        assert by_check_endpoint(url, "--seed", seed, "--calibrate", str(noise)) is ExitCode.PASS
    assert json.loads(noise.read_text())["runs"] == 2
    report = tmp_path / "report.json"
    assert by_check(url, "--baseline", str(noise), "--json", str(report)) is ExitCode.PASS
    assert json.loads(report.read_text())["limit"]["is_measured"]
    with pytest.raises(UsageError, match="measured with settings"):
        by_check(url, "--baseline", str(noise), "--max-tokens", "5")


def test_faulty_server_is_no_baseline(start: Any, tmp_path: Path) -> None:
    noise = tmp_path / "noise.json"
    assert by_check_endpoint(start(change=swap_neighbours), "--calibrate", str(noise)) is ExitCode.FAIL
    assert not noise.exists()


def test_rounds_go_on_for_the_duration(
    text_only: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock that adds a second at every look: one round is asked for, and three seconds of them."""
    ticks = itertools.count()
    monkeypatch.setattr("parity.endpoint.check.monotonic", lambda: float(next(ticks)))
    report = tmp_path / "report.json"
    assert by_check_endpoint(text_only, "--duration", "3", "--json", str(report)) is ExitCode.PASS
    assert json.loads(report.read_text())["load_rounds"] == 3


@pytest.mark.nightly
def test_streaming_clients_for_a_minute_lose_nothing_and_get_their_solo_texts(
    url: str, tmp_path: Path
) -> None:
    report, clients = tmp_path / "report.json", str(NIGHTLY_CLIENTS)
    load = ["--prompts", clients, "--concurrency", clients, "--stream", "--duration", str(NIGHTLY_S)]
    code = check_endpoint.main(
        [url, "--model", "llama", "--tier", "bits", *load, "--json", str(report)], standalone_mode=False
    )
    found = json.loads(report.read_text())
    assert code is ExitCode.PASS, found
    assert found["failed"] == 0 and found["compared"] == found["prompts"] >= NIGHTLY_CLIENTS
