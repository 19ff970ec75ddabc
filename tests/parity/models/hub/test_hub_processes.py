"""Whole processes: the environment is honoured, workers share one download, a killed fetch harms nobody."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from parity.errors import ExitCode
from tests.parity.models.hub.desk import FIRST, REPO, Desk, pinned
from tests.parity.models.hub.server import Fault
from tests.parity.models.hub.test_hub_lock import manifest

PARITY = [sys.executable, "-c", "from parity.cli import main; main()"]


@pytest.fixture
def locked(body: bytes, tmp_path: Path) -> Path:
    """A folder of manifests with one locked row."""
    folder = tmp_path / "manifests"
    folder.mkdir()
    target = pinned(body)
    manifest(folder, revision=FIRST, sha256=target.sha256, size_bytes=target.size_bytes)
    return folder


def environment(desk: Desk, **values: str) -> dict[str, str]:
    """Ours without any Hub variable, then a Hub home whose cache is the desk's."""
    ours = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGINGFACE_"))}
    hub = {"HF_ENDPOINT": desk.hub.endpoint, "HF_HOME": str(desk.settings.cache.parent / "home")}
    return {**ours, "HF_HUB_DISABLE_TELEMETRY": "1", **hub, **values}


def start(folder: Path, env: dict[str, str]) -> subprocess.Popen[str]:
    command = [*PARITY, "fetch", "--frozen", "--manifests", str(folder)]
    return subprocess.Popen(command, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def test_fetch_honours_the_hub_variables(desk: Desk, body: bytes, locked: Path) -> None:
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


def test_two_workers_that_ask_for_one_file_download_it_once(desk: Desk, locked: Path) -> None:
    # The body is withheld until both workers have asked twice, for the pins' sake and to download.
    desk.hub.faults.append(Fault(wait_for=lambda: desk.hub.wait_until_seen("hub", "HEAD", 4)))
    workers = [start(locked, environment(desk)) for _ in range(2)]
    told = [worker.communicate(timeout=60) for worker in workers]
    assert [worker.returncode for worker in workers] == [ExitCode.PASS, ExitCode.PASS], told
    assert len(desk.hub.requests("storage", "GET")) == 1


def test_a_killed_fetch_leaves_nothing_that_is_taken_for_a_file_and_no_lock(
    desk: Desk, body: bytes, locked: Path
) -> None:
    arrived, released = threading.Event(), threading.Event()

    def stall() -> None:
        arrived.set()
        assert released.wait(timeout=60)

    desk.hub.faults.append(Fault(cut_after_bytes=200_000, stall=stall))
    first = start(locked, environment(desk))
    assert arrived.wait(timeout=60)
    first.send_signal(signal.SIGKILL)
    first.communicate(timeout=60)
    released.set()
    home = desk.settings.cache.parent / "home" / "hub"
    assert list(home.rglob("*.gguf")) == []
    second = start(locked, environment(desk))
    out, err = second.communicate(timeout=60)
    assert second.returncode == ExitCode.PASS, out + err
    assert [path.read_bytes() for path in home.rglob("*.gguf")] == [body]
