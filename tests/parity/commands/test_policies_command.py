"""``parity policies``: lists contracts, ranks nothing; --check is as good as its worst verdict."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

import parity.commands.policies as policies_command
from parity.commands.policies import command, judge_tests, show
from parity.errors import ExitCode, UsageError
from parity.records import Verdict
from parity.suites.policies import CHECKS, Tally, applies, check_policy, count_tests
from scheduler.policies import contracts, policy_names

REPORT = """<testsuites><testsuite>
<testcase name="one"><properties><property name="policy" value="orca"/></properties></testcase>
<testcase name="two"><properties><property name="policy" value="orca"/>
<property name="policy" value="vtc"/></properties><failure>wrong</failure></testcase>
<testcase name="three"><properties><property name="policy" value="aging"/></properties><skipped/></testcase>
<testcase name="four"/></testsuite></testsuites>"""


def invoke(*arguments: str):
    return CliRunner().invoke(command, list(arguments), standalone_mode=False, catch_exceptions=False)


def test_every_contract_is_listed_with_what_it_promises_and_leaves_out():
    result = invoke()
    assert result.return_value is ExitCode.PASS
    lines = result.output.splitlines()
    assert [line for line in lines if line in contracts()] == sorted(contracts())
    for title in ("unit", "protects", "objective", "assumes", "not reproduced", "progress"):
        assert sum(line.startswith(f"  {title} ") for line in lines) == len(contracts())
    assert max(map(len, lines)) <= 110


@pytest.mark.parametrize("word", ["faster", "slower", "best", "rank 1", "speedup", "%"])
def test_no_policy_is_called_better_than_another(word):
    assert word not in invoke().output


def test_an_unknown_policy_is_named_with_what_there_is():
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
def test_the_worst_verdict_is_the_exit_code(verdicts, code, capsys):
    rows = {"orca": {str(number): (verdict, "said") for number, verdict in enumerate(verdicts)}}
    assert show(rows) is code
    said = capsys.readouterr().out
    assert f"policies: {Verdict.merge(verdicts).value};" in said
    assert said.count("FAIL: orca") == verdicts.count(Verdict.FAIL)


def test_contract_tests_are_counted_by_policy_and_a_skip_is_no_pass():
    counts = count_tests(REPORT)
    assert counts == {
        "orca": Tally(1, ("two",)),
        "vtc": Tally(0, ("two",)),
        "aging": Tally(0, ("three",)),
    }
    assert judge_tests(counts["orca"])[0] is Verdict.FAIL


def test_a_policy_whose_contract_no_test_ran_is_unknown():
    assert judge_tests(Tally())[0] is Verdict.UNKNOWN
    assert judge_tests(Tally(passed=2)) == (Verdict.PASS, "2")


def test_a_check_that_finds_something_turns_the_command_red(monkeypatch):
    monkeypatch.setitem(CHECKS, "parity", lambda policy: [f"{policy} changes bytes"])
    monkeypatch.setattr(policies_command, "real_verdicts", lambda policies, tick: {})
    monkeypatch.setattr(policies_command, "check_hash_seeds", lambda policies: [])
    monkeypatch.setattr(policies_command, "contract_tests", _NoTests)
    result = invoke("--check", "orca")
    assert result.return_value is ExitCode.FAIL
    assert "FAIL: orca, parity: orca changes bytes" in result.output
    assert "unknown: orca, contract tests: no contract test ran" in result.output


class _NoTests:
    """A machine without the tests."""

    def __enter__(self):
        return self

    def __exit__(self, *error) -> None:
        return None

    def by_policy(self) -> dict:
        return {}


@pytest.mark.parametrize("policy", policy_names())
def test_policy_passes_every_check_of_the_battery(policy):
    checks = check_policy(policy)
    assert [check for check in checks if check.problems] == []
    assert len(checks) >= 4


def test_checks_apply_where_there_is_something_to_look_at():
    assert [name for name in policy_names() if applies("completed service", name)] == ["vtc_completed"]
    assert [name for name in policy_names() if applies("original clocks", name)] == ["aging", "least_slack"]
