"""Runs the contract tests of policies in another process and counts them by policy."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

from parity.store import REPOSITORY

FOLDER = Path("tests") / "scheduler" / "policies"
TOO_LONG = FOLDER / "test_outputs.py"  # the property over random workloads: the fixed cases stand for it here


@dataclass(slots=True)
class Tally:
    """Contract tests that a policy ran in; ``failed`` names those that did not pass."""

    passed: int = 0
    failed: tuple[str, ...] = ()


class ContractTests:
    """The tests' process. ``by_policy`` waits for it."""

    def __init__(self, process: subprocess.Popen | None, report: Path) -> None:
        self._process, self._report = process, report

    def by_policy(self) -> dict[str, Tally]:
        """Counts by policy; empty when there are no tests here, or when they could not be run."""
        if self._process is None:
            return {}
        self._process.communicate()
        try:
            return count_tests(self._report.read_text(encoding="utf-8"))
        except (OSError, ElementTree.ParseError):
            return {}


def count_tests(junit: str) -> dict[str, Tally]:
    """Counts by policy from a JUnit report whose tests have ``policy`` properties."""
    counts: dict[str, Tally] = {}
    for test in ElementTree.fromstring(junit).iter("testcase"):
        policies = [item.get("value", "") for item in test.iter("property") if item.get("name") == "policy"]
        wrong = any(test.find(tag) is not None for tag in ("failure", "error", "skipped"))
        for policy in policies:
            count = counts.setdefault(policy, Tally())
            if wrong:
                count.failed += (test.get("name", ""),)
            else:
                count.passed += 1
    return counts


@contextmanager
def contract_tests() -> Iterator[ContractTests]:
    """Start the contract tests; the process is ended with the context."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "contract-tests.xml"
        if not (REPOSITORY / FOLDER).is_dir():
            yield ContractTests(None, report)
            return
        arguments = [
            sys.executable,
            "-m",
            "pytest",
            str(FOLDER),
            f"--ignore={TOO_LONG}",
            "-q",
            "-p",
            "no:cacheprovider",
            f"--junitxml={report}",
        ]
        process = subprocess.Popen(
            arguments, cwd=REPOSITORY, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            yield ContractTests(process, report)
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
