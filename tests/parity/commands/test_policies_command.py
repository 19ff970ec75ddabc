"""``parity policies``: lists contracts, ranks nothing; --check is as good as its worst verdict."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from fractions import Fraction
from types import ModuleType
from typing import Any

import pytest
from click.testing import CliRunner

import parity.commands.policies as policies_command
import scheduler.policies.orca as orca_module
import scheduler.policies.scorpio_guard as scorpio_module
import scheduler.policies.sglang_adder as sglang_module
import scheduler.policies.vtc as vtc_module
from parity.commands.policies import command, show
from parity.errors import ExitCode, UsageError
from parity.records import Finding, Verdict
from parity.suites.contracts import CONTRACT_CHECKS, check_contract, differs
from parity.suites.policies import CHECKS, applies, check_policy
from scheduler.policies import contracts, policy_names
from scheduler.policies.sglang_adder import AdderLimits
from scheduler.policies.vtc import Counters


def invoke(*arguments: str) -> Any:
    return CliRunner().invoke(command, list(arguments), standalone_mode=False, catch_exceptions=False)


def test_every_contract_is_listed_with_what_it_promises_and_leaves_out() -> None:
    result = invoke()
    assert result.return_value is ExitCode.PASS
    lines = result.output.splitlines()
    assert [line for line in lines if line in contracts()] == sorted(contracts())
    for title in ("unit", "protects", "objective", "assumes", "not reproduced", "progress"):
        assert sum(line.startswith(f"  {title} ") for line in lines) == len(contracts())
    assert max(map(len, lines)) <= 110


@pytest.mark.parametrize("word", ["faster", "slower", "best", "rank 1", "speedup", "%"])
def test_no_policy_is_called_better_than_another(word: str) -> None:
    assert word not in invoke().output


def test_an_unknown_policy_is_named_with_what_there_is() -> None:
    with pytest.raises(UsageError, match="no policy 'fastest'.*orca"):
        invoke("fastest")


@pytest.mark.parametrize(
    ("verdicts", "code"),
    [
        ([Verdict.PASS, Verdict.PASS], ExitCode.PASS),
        ([Verdict.PASS, Verdict.UNKNOWN], ExitCode.UNKNOWN),
        ([Verdict.UNKNOWN, Verdict.FAIL], ExitCode.FAIL),
        ([], ExitCode.UNKNOWN),
    ],
)
def test_the_worst_verdict_is_the_exit_code(
    verdicts: list[Verdict], code: ExitCode, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = {"orca": {str(number): (verdict, "said") for number, verdict in enumerate(verdicts)}}
    assert show(rows) is code
    said = capsys.readouterr().out
    assert f"policies: {Verdict.merge(verdicts).value};" in said
    assert said.count("FAIL: orca") == verdicts.count(Verdict.FAIL)


@pytest.mark.parametrize("name", contracts())
def test_every_policy_and_measure_has_a_contract_in_numbers_and_keeps_it(name: str) -> None:
    assert CONTRACT_CHECKS[name]
    assert check_contract(name) == []


def test_a_number_that_is_another_one_and_a_policy_that_breaks_off_are_problems(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def wrong() -> Iterator[Any]:
        yield from differs("the gap", 3, 2)

    def broken() -> None:
        raise RuntimeError("no plan")

    monkeypatch.setitem(CONTRACT_CHECKS, "orca", [wrong, broken])
    assert [str(finding) for finding in check_contract("orca")] == [
        "wrong: the gap is 3, not 2",
        "broken: RuntimeError: no plan",
    ]


@pytest.mark.parametrize(
    ("module", "name", "wrong", "policy"),
    [
        (orca_module, "declared_total", lambda request: request.num_rows, "orca"),
        (scorpio_module, "share", lambda view, tightest: Fraction(1), "scorpio_guard"),
        (sglang_module.AdderLimits, "paged", lambda self, tokens: tokens, "sglang_adder"),
        (vtc_module.Counters, "charge", lambda self, client, amount: self, "vtc"),
    ],
)
def test_a_policy_with_wrong_numbers_breaks_its_contract(
    module: type[AdderLimits] | type[Counters] | ModuleType,
    name: str,
    wrong: Callable[..., Any],
    policy: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, name, wrong)
    assert check_contract(policy)


def test_a_check_that_finds_something_turns_the_command_red(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CHECKS, "parity", lambda policy: [Finding("parity", f"{policy} changes bytes")])
    monkeypatch.setattr(policies_command, "real_verdicts", lambda policies, tick: {})
    monkeypatch.setattr(policies_command, "check_hash_seeds", lambda policies: [])
    result = invoke("--check", "orca")
    assert result.return_value is ExitCode.FAIL
    assert "FAIL: orca, parity: orca changes bytes" in result.output


@pytest.mark.parametrize("policy", policy_names())
def test_policy_passes_every_check_of_the_battery(policy: str) -> None:
    checks = check_policy(policy)
    assert [check for check in checks if check.findings] == []
    assert len(checks) >= 4


def test_checks_apply_where_there_is_something_to_look_at() -> None:
    assert [name for name in policy_names() if applies("completed service", name)] == ["vtc_completed"]
    assert [name for name in policy_names() if applies("original clocks", name)] == ["aging", "least_slack"]
