"""The gate as a command: 0 on a clean tree, 1 with a planted scheduler fault, 2 with a
model missing, 64 for bad input.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree as Xml

import pytest

from parity.report.data import check_against_schema
from parity.store import REPOSITORY

BUDGET = ("--sessions", "12", "--split-sessions", "4")
ONLY = ("--only", "suite", "--only", "split")
PARTS = ("scheduler", "parity", "manifests", "splits", "golden", "requirements", "tests")

# A prefix is shared one token further than it is equal.
FAULT = """

_exact_lookup = PrefixCache.lookup


def _lookup_one_too_far(self, chain):
    entry, count = _exact_lookup(self, chain)
    return entry, count + (entry is not None and count < min(entry.count, len(chain) - 1))


PrefixCache.lookup = _lookup_one_too_far
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of what the gate needs from the tree, which a test may break."""
    for part in PARTS:
        shutil.copytree(
            REPOSITORY / part, tmp_path / "tree" / part, ignore=shutil.ignore_patterns("__pycache__")
        )
    return tmp_path / "tree"


def gate(tree: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run the gate in a tree, every report written below ``reports``."""
    outputs = [
        word
        for kind in ("json", "junit", "markdown", "html")
        for word in (f"--{kind}", f"reports/gate.{kind}")
    ]
    environment = {**os.environ, "PYTHONPATH": str(tree), **variables}
    for name in [name for name in environment if name.startswith("PYTEST_")]:
        del environment[name]
    return subprocess.run(
        [sys.executable, "-m", "parity.cli", "gate", *words, *outputs],
        cwd=tree,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def report(tree: Path) -> dict:
    data = json.loads((tree / "reports" / "gate.json").read_text())
    check_against_schema(data)
    return data


@pytest.mark.nightly  # `make gate` shows the same on every merge
@pytest.mark.family_llama
def test_clean_tree_passes_and_every_report_is_written(checkout: Path) -> None:
    done = gate(checkout, "--family", "llama", *BUDGET, GITHUB_ACTIONS="", GITHUB_STEP_SUMMARY="")

    assert done.returncode == 0, done.stdout + done.stderr
    data = report(checkout)
    assert data["verdict"] == "pass"
    assert data["counts"]["pass"] == len(data["checks"])
    suites = {check["layout"]: check for check in data["checks"] if check["kind"] == "suite"}
    assert suites.keys() == {"unified", "streams", "stock"}
    for layout in ("unified", "streams"):
        counts = suites[layout]["counts"]
        assert counts["bit_identical"] == counts["sessions"] >= 12
        assert suites[layout]["missing_marks"] == []
    assert Xml.parse(checkout / "reports" / "gate.junit").getroot().get("failures") == "0"
    assert "# Parity gate: pass" in (checkout / "reports" / "gate.markdown").read_text()
    page = (checkout / "reports" / "gate.html").read_text()
    assert page.count("timeline: llama") == 4  # unified and stock, each as label and title
    assert "cell map: llama unified" in page


@pytest.mark.family_llama
def test_planted_scheduler_fault_fails_and_is_named(checkout: Path, tmp_path: Path) -> None:
    with (checkout / "scheduler" / "prefix.py").open("a") as file:
        file.write(FAULT)
    summary = tmp_path / "summary.md"
    done = gate(
        checkout, "--family", "llama", *BUDGET, *ONLY, GITHUB_ACTIONS="true", GITHUB_STEP_SUMMARY=str(summary)
    )

    assert done.returncode == 1, done.stdout + done.stderr
    failed = next(check for check in report(checkout)["checks"] if check["name"] == "llama unified")
    assert (failed["verdict"], failed["bits"]) == ("fail", "fail")
    failure = failed["failure"]
    text = summary.read_text()
    assert text == (checkout / "reports" / "gate.markdown").read_text()
    assert "family `llama`, layout `unified`" in text
    assert re.search(
        rf"session {failure['session']}, generated token {failure['step']}, scheduler step \d+", text
    )
    assert f"replay: `{failure['replay']}`" in text
    assert re.search(
        r"^::error file=tests/families/test_concurrent_parity.py,line=\d+,title=llama unified::",
        done.stdout,
        re.MULTILINE,
    )
    assert Xml.parse(checkout / "reports" / "gate.junit").getroot().get("failures") != "0"
    assert "its failing case" in (checkout / "reports" / "gate.html").read_text()
    again = subprocess.run(
        [sys.executable, "-m", "parity.cli", *failure["replay"].split()[1:]],
        cwd=checkout,
        env={**os.environ, "PYTHONPATH": str(checkout)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert again.returncode == 1, again.stdout + again.stderr
    assert (
        f"session {failure['session']} differs first at its generated token {failure['step']}" in again.stdout
    )


def test_missing_model_is_unknown_and_named(checkout: Path) -> None:
    done = gate(
        checkout, "--family", "qwen3next", "--row", "real", GITHUB_ACTIONS="true", GITHUB_STEP_SUMMARY=""
    )

    assert done.returncode == 2, done.stdout + done.stderr
    data = report(checkout)
    assert data["verdict"] == "unknown"
    reasons = {check["name"]: check["reason"] for check in data["checks"]}
    assert "qwen3next:real is not here" in reasons["qwen3next model real"]
    assert "no model" in reasons["qwen3next unified"]
    assert "qwen3next:real is not here" in (checkout / "reports" / "gate.markdown").read_text()
    assert "::error file=manifests/qwen3next.yaml,line=1" in done.stdout
    assert Xml.parse(checkout / "reports" / "gate.junit").getroot().get("errors") == str(len(data["checks"]))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--family", "mamba"), "unknown family 'mamba'"),
        (("--require", "llama=bit"), "unknown tier 'bit'"),
        (("--sessions", "0"), "0 is not in the range"),
        (("--row", "huge", "--family", "llama"), "has no model row 'huge'"),
    ],
)
def test_bad_input_costs_one_line_and_writes_nothing(
    words: tuple[str, ...], said: str, tmp_path: Path
) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "parity.cli", "gate", *words, "--json", str(tmp_path / "gate.json")],
        cwd=REPOSITORY, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 64, done.stdout + done.stderr
    assert said in done.stderr
    assert done.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []
