"""One small case file per fault that was ever found or planted: green now, and
red where the fault is put back.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from parity.campaign.rerun import Rerun
from parity.mutants import all_mutants
from parity.records import Case, Verdict
from parity.run.contained import run_case
from parity.run.runner import run_exact_case

FILES = sorted(Path(__file__).parent.glob("*.json"))
PLANTED = {mutant.name for mutant in all_mutants()}
NAMED = [path for path in FILES if path.stem in PLANTED]  # a file that is named like a mutant is a case of it


def load(path: Path) -> Case:
    return Case.from_json(path.read_text(), where=str(path))


def test_there_are_regression_cases() -> None:
    assert len(FILES) >= 10 and NAMED


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_regression_case_is_green_on_llama_cpp(path: Path) -> None:
    outcome = run_case(load(path))
    assert outcome.verdict is Verdict.PASS, (outcome.reason, outcome.problems, outcome.divergences)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_regression_case_is_green_on_the_exact_engine(path: Path) -> None:
    outcome = run_exact_case(load(path))
    assert outcome.verdict is Verdict.PASS, (outcome.reason, outcome.problems, outcome.divergences)


@pytest.mark.parametrize("path", NAMED, ids=lambda path: path.stem)
def test_regression_case_is_red_where_its_fault_is_put_back(path: Path) -> None:
    assert Rerun(exact=True, mutant=path.stem)(load(path)).verdict is Verdict.FAIL


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_regression_file_is_written_as_campaigns_write_it(path: Path) -> None:
    assert load(path).to_json() == path.read_text()
