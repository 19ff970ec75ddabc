"""The gate's page in a real browser: it opens without a word on the console and asks for nothing."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.parity.gate.gate_results import FAILED, UNKNOWN
from tests.parity.report.test_report import page

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
QUIET = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run",
         "--disable-component-update", "--disable-sync", "--enable-logging=stderr")  # fmt: skip


def opened(path: Path, folder: Path) -> tuple[list[str], list[str]]:
    """Lines on the console, and addresses that the page asked for."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    assert browser, f"none of {', '.join(BROWSERS)} is in PATH"
    log = folder / "net.json"
    words = [browser, *QUIET, f"--user-data-dir={folder / 'profile'}", f"--log-net-log={log}"]
    done = subprocess.run(
        [*words, f"--screenshot={folder / 'page.png'}", path.as_uri()],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0 and (folder / "page.png").stat().st_size > 10_000, done.stderr
    events = json.loads(log.read_text())["events"]
    started = [event["params"] for event in events if "initiator" in event.get("params", {})]
    # "not an origin" is the browser itself: its clock, its updates.
    asked = sorted({start["url"] for start in started if start["initiator"] != "not an origin"})
    return [line for line in done.stderr.splitlines() if "CONSOLE" in line], asked


@pytest.mark.nightly
def test_page_opens_in_a_browser_without_console_lines_and_without_requests(tmp_path: Path) -> None:
    (tmp_path / "gate.html").write_text(page(FAILED, UNKNOWN))
    assert opened(tmp_path / "gate.html", tmp_path) == ([], [])


@pytest.mark.nightly
def test_page_that_loads_and_complains_is_noticed(tmp_path: Path) -> None:
    spoilt = page().replace("</body>", "<script>console.error('x')</script><img src=http://127.0.0.1:9/a>")
    (tmp_path / "gate.html").write_text(spoilt)
    console, asked = opened(tmp_path / "gate.html", tmp_path)
    assert console and asked == ["http://127.0.0.1:9/a"]
