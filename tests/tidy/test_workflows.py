"""The workflows are valid, pinned, least-privileged, and run the lines that a person types."""

from __future__ import annotations

import importlib
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

REPOSITORY = Path(__file__).resolve().parent.parent.parent
PROGRAMS = Path(sys.executable).parent
WORKFLOWS = sorted((REPOSITORY / ".github/workflows").glob("*.yml"))
ACTIONS = sorted((REPOSITORY / ".github/actions").glob("*/action.yml"))
FAMILIES = ["llama", "deepseek2", "gemma2", "falcon_h1", "qwen3next"]

LINTERS = {
    "schema": [str(PROGRAMS / "check-jsonschema"), "--builtin-schema", "vendor.github-workflows"],
    "security": [str(PROGRAMS / "zizmor"), "--offline", "--quiet", "--strict-collection"],
}
BAD_WORKFLOW = {
    "schema": "on: push\njobs:\n  a:\n    runs-on: x\n    step: []\n",
    "security": "on: pull_request\npermissions: {}\njobs:\n  a:\n    runs-on: x\n    steps:\n"
    "      - run: echo ${{ github.event.pull_request.title }}\n",
}


def load(path: Path) -> dict[Any, Any]:
    """A workflow's content; YAML reads its key ``on`` as true."""
    return yaml.safe_load(path.read_text())


def jobs(path: Path) -> dict[str, dict[str, Any]]:
    return load(path)["jobs"]


def steps(path: Path) -> list[dict[str, Any]]:
    """Every step of a workflow or of an action."""
    content = load(path)
    lists = (
        [content["runs"]["steps"]]
        if "runs" in content
        else [job.get("steps", []) for job in jobs(path).values()]
    )
    return [step for each in lists for step in each]


def commands(path: Path) -> list[list[str]]:
    """Words of every command line in the steps that calls make or parity."""
    lines = [line.strip() for step in steps(path) for line in step.get("run", "").splitlines()]
    words = [shlex.split(line) for line in lines if re.match(r"(make|\S*parity)\s", line)]
    return words


def files(path: Path) -> str:
    """Identifier of a parameter."""
    return f"{path.parent.name}/{path.name}"


def test_the_expected_workflows_exist() -> None:
    assert [path.name for path in WORKFLOWS] == ["gate.yml", "nightly.yml", "parity.yml", "regenerate.yml"]
    triggers = {path.name: set(load(path)[True]) for path in WORKFLOWS}
    assert triggers == {
        "gate.yml": {"pull_request", "push"},
        "nightly.yml": {"schedule", "workflow_dispatch"},
        "parity.yml": {"workflow_call"},
        "regenerate.yml": {"workflow_dispatch"},
    }


@pytest.mark.parametrize("linter", LINTERS)
def test_linter_accepts_the_workflows(linter: str) -> None:
    done = subprocess.run(
        [*LINTERS[linter], *map(str, WORKFLOWS)], cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("linter", LINTERS)
def test_linter_rejects_a_bad_workflow(linter: str, tmp_path: Path) -> None:
    path = tmp_path / ".github/workflows/bad.yml"
    path.parent.mkdir(parents=True)
    path.write_text(BAD_WORKFLOW[linter])
    done = subprocess.run(
        [*LINTERS[linter], str(path)], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode != 0
    assert {"schema": "'step' was unexpected", "security": "template-injection"}[
        linter
    ] in done.stdout + done.stderr


@pytest.mark.parametrize("path", [*WORKFLOWS, *ACTIONS], ids=files)
def test_every_action_is_pinned_to_a_commit(path: Path) -> None:
    used = re.findall(r"^ *(?:- )?uses: (\S+)(.*)", path.read_text(), re.MULTILINE)
    assert used or path.name == "action.yml"
    for action, comment in used:
        assert action.startswith("./") or re.fullmatch(r"[\w./-]+@[0-9a-f]{40}", action), action
        assert action.startswith("./") or re.fullmatch(r" # v\d+\.\d+\.\d+", comment), action
        if action.startswith("./"):
            local = REPOSITORY / action.removeprefix("./").removeprefix("samebytes/")
            assert local.is_file() or (local / "action.yml").is_file(), action


@pytest.mark.parametrize("path", WORKFLOWS, ids=files)
def test_jobs_may_only_read_and_always_end(path: Path) -> None:
    assert load(path)["permissions"] == {"contents": "read"}
    for name, job in jobs(path).items():
        writes = [scope for scope, level in job.get("permissions", {}).items() if level == "write"]
        assert writes == (["contents", "pull-requests"] if path.name == "regenerate.yml" else []), name
        assert "uses" in job or job["timeout-minutes"] <= 350, name
    for step in steps(path):
        if "checkout" in step.get("uses", ""):
            assert step["with"]["persist-credentials"] is False


@pytest.mark.parametrize("path", [*WORKFLOWS, *ACTIONS], ids=files)
def test_no_expression_is_pasted_into_a_script(path: Path) -> None:
    pasted = [step["run"] for step in steps(path) if "${{" in step.get("run", "")]
    assert pasted == []


@pytest.mark.parametrize("path", [*WORKFLOWS, *ACTIONS], ids=files)
def test_nothing_is_retried_or_allowed_to_fail(path: Path) -> None:
    assert not re.search(r"continue-on-error|\|\| true|--reruns|retry", path.read_text())


def test_family_matrices_are_the_families() -> None:
    matrices = [
        job["strategy"]["matrix"]["family"]
        for path in WORKFLOWS
        for job in jobs(path).values()
        if "family" in job.get("strategy", {}).get("matrix", {})
    ]
    assert matrices == [FAMILIES, FAMILIES]
    regenerate = load(REPOSITORY / ".github/workflows/regenerate.yml")
    assert regenerate[True]["workflow_dispatch"]["inputs"]["family"]["options"] == FAMILIES
    manifests = {path.stem for path in (REPOSITORY / "manifests").glob("*.yaml")} - {"lock"}
    assert manifests == set(FAMILIES)


def test_verdict_needs_every_other_job_of_the_gate() -> None:
    gate = jobs(REPOSITORY / ".github/workflows/gate.yml")
    assert set(gate["verdict"]["needs"]) == set(gate) - {"verdict"}
    assert gate["verdict"]["if"] == "${{ always() }}"


@pytest.mark.parametrize(
    "results", ["success success success", "success skipped success", "success success cancelled"]
)
def test_verdict_is_green_only_when_all_succeeded(results: str) -> None:
    (step,) = jobs(REPOSITORY / ".github/workflows/gate.yml")["verdict"]["steps"]
    # GitHub runs a script as bash -e.
    done = subprocess.run(
        ["bash", "-e", "-c", step["run"]], env={"RESULTS": results}, capture_output=True, check=False
    )
    assert (done.returncode == 0) == (set(results.split()) == {"success"})


@pytest.mark.parametrize("path", [*WORKFLOWS, *ACTIONS], ids=files)
def test_lines_are_those_of_local_use(path: Path) -> None:
    """Every make target exists, every parity command exists and has every option that is passed."""
    targets = set(re.findall(r"^([a-z-]+):", (REPOSITORY / "Makefile").read_text(), re.MULTILINE))
    for program, first, *words in commands(path):
        if program == "make":
            assert first in targets
            passed = [shlex.split(word[12:]) for word in words if word.startswith("PARITY_ARGS=")]
            for arguments in passed:
                check_options({"gate": "gate", "parity": "check"}[first], bare(arguments))
        else:
            check_options(first, words)


def bare(words: list[str]) -> list[str]:
    """Words without the shell's ``${NAME:+...}`` around an option."""
    return [re.sub(r"^\$\{\w+:\+(--[\w-]+)$", r"\1", word) for word in words]


def test_callers_scheduler_and_engine_run_the_machine_and_the_familys_suites() -> None:
    path = REPOSITORY / ".github/workflows/parity.yml"
    lines = [words for words in commands(path) if "--engine" in words[-1]]
    assert [words[1] for words in lines] == ["test", "parity"]
    assert all("--scheduler $SCHEDULER" in words[-1] for words in lines)


def test_callers_pair_of_servers_is_one_command_and_nothing_named_is_red() -> None:
    path = REPOSITORY / ".github/workflows/parity.yml"
    (line,) = [words for words in commands(path) if "--system" in words]
    given = dict(zip(line[2:-1:2], line[3::2], strict=True))
    assert (given["--system"], given["--baseline"], given["--model"]) == ("$SYSTEM", "$BASELINE", "$MODEL")
    conditions = {name: job["if"] for name, job in jobs(path).items()}
    assert conditions == {
        "asked": "inputs.family == '' && inputs.system == ''",
        "gate": "inputs.family != ''",
        "system": "inputs.system != ''",
    }
    (step,) = jobs(path)["asked"]["steps"]
    assert subprocess.run(["bash", "-e", "-c", step["run"]], capture_output=True, check=False).returncode == 1


def check_options(name: str, words: list[str]) -> None:
    """Assert that the subcommand ``name`` has the options among ``words``."""
    command = importlib.import_module(f"parity.commands.{name}").command
    known = {option for parameter in command.params for option in parameter.opts}
    assert {word for word in words if word.startswith("--")} <= known, name


def test_make_gate_passes_options_that_the_command_has() -> None:
    recipe = (REPOSITORY / "Makefile").read_text().partition("\ngate:")[2].partition("\n\n")[0]
    check_options("gate", re.findall(r"--[a-z-]+", recipe))
