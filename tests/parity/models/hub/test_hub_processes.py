"""Whole processes: the environment is honoured, workers share one download, a killed fetch is resumed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from parity.errors import ExitCode
from tests.parity.models.hub.desk import FIRST, REPO, Desk, leftovers, pinned
from tests.parity.models.hub.server import Fault
from tests.parity.models.hub.test_hub_lock import manifest

PARITY = [sys.executable, "-c", "from parity.cli import main; main()"]


@pytest.fixture
def locked(body: bytes, tmp_path: Path) -> Path:
    """A folder of manifests with one locked row."""
    folder = tmp_path / "manifests"
    folder.mkdir()
    target = pinned(body)
    manifest(folder, revision=f'"{FIRST}"', sha256=target.sha256, size_bytes=target.size_bytes)
    return folder


def environment(desk: Desk, **values: str) -> dict[str, str]:
    """Ours without any Hub variable, then a Hub home whose cache is the desk's."""
    ours = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGINGFACE_"))}
    hub = {"HF_ENDPOINT": desk.hub.endpoint, "HF_HOME": str(desk.settings.cache.parent / "home")}
    return {**ours, "HF_HUB_DISABLE_TELEMETRY": "1", **hub, **values}


def start(folder: Path, env: dict[str, str]) -> subprocess.Popen[str]:
    command = [*PARITY, "fetch", "--frozen", "--manifests", str(folder)]
    return subprocess.Popen(command, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def test_fetch_honours_the_hub_variables(desk: Desk, body: bytes, locked: Path):
    desk.hub.repositories[REPO].token = "hf_right"
    refused = start(locked, environment(desk, HF_HOME=str(locked / "refused")))
    granted = start(locked, environment(desk, HF_TOKEN="hf_right"))
    out, err = refused.communicate(timeout=60)
    assert refused.returncode == ExitCode.UNKNOWN and "HF_TOKEN" in out and "Traceback" not in err
    out, err = granted.communicate(timeout=60)
    assert granted.returncode == ExitCode.PASS, out + err
    stored = desk.settings.cache.parent / "home" / "hub"
    assert [path.read_bytes() for path in stored.rglob("*.gguf")] == [body]
    assert "hf_right" not in out + err
    answered = len(desk.hub.seen)
    offline = start(locked, environment(desk, HF_HUB_OFFLINE="1"))
    empty = start(locked, environment(desk, HF_HUB_OFFLINE="1", HF_HOME=str(locked / "empty")))
    assert "was cached" in offline.communicate(timeout=60)[0] and offline.returncode == ExitCode.PASS
    assert "HF_HUB_OFFLINE" in empty.communicate(timeout=60)[0] and empty.returncode == ExitCode.UNKNOWN
    assert len(desk.hub.seen) == answered


def test_two_workers_that_ask_for_one_file_download_it_once(desk: Desk, locked: Path):
    # The body is withheld until both workers have asked for the file: neither ends before the other begins.
    desk.hub.faults.append(Fault(wait_for=lambda: desk.hub.wait_until_seen("hub", "HEAD", 2)))
    workers = [start(locked, environment(desk)) for _ in range(2)]
    told = [worker.communicate(timeout=60) for worker in workers]
    assert [worker.returncode for worker in workers] == [ExitCode.PASS, ExitCode.PASS], told
    assert len(desk.hub.requests("storage", "GET")) == 1
    assert sorted("downloaded" in out for out, _ in told) == [False, True]


def test_a_killed_fetch_is_resumed_and_its_lock_does_not_stay(desk: Desk, body: bytes, locked: Path):
    arrived, released = threading.Event(), threading.Event()

    def stall() -> None:
        arrived.set()
        assert released.wait(timeout=60)

    desk.hub.faults.append(Fault(cut_after_bytes=200_000, stall=stall))
    first = start(locked, environment(desk))
    # A progress line comes after its bytes are in the file: 60 % of 300,000 bytes, and the rest never comes.
    said = ""
    while "60 %" not in said:
        line = first.stderr.readline()
        assert line, f"ended early: {said}"
        said += line
    assert arrived.wait(timeout=60)
    first.send_signal(signal.SIGKILL)
    first.communicate(timeout=60)
    released.set()
    home = desk.settings.cache.parent / "home" / "hub"
    (partial,) = home.rglob("*.incomplete")
    kept = partial.stat().st_size
    assert 0 < kept <= 200_000
    assert list(home.rglob("*.gguf")) == []
    second = start(locked, environment(desk))
    out, err = second.communicate(timeout=60)
    assert second.returncode == ExitCode.PASS, out + err
    assert desk.hub.requests("storage", "GET")[-1].range == f"bytes={kept}-"
    assert [path.read_bytes() for path in home.rglob("*.gguf")] == [body]
    assert leftovers(desk) == []
