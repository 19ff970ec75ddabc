"""YAML that means harm: one clear line, in bounded time and memory, whatever it holds."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from parity.cli import main
from parity.errors import ExitCode, UsageError
from parity.models.families import load_family, manifests_dir
from parity.schemas import load_checked_yaml

GOOD = (manifests_dir() / "llama.yaml").read_text()
BOMB = "a0: &a0 [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"a{i}: &a{i} [{','.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 10)
)
HOSTILE = {
    "alias bomb": (BOMB, "anchors and aliases"),
    "list that holds itself": ("a: &x [*x]\n", "anchors and aliases"),
    "key that is itself": ("? &x {a: *x}\n: 1\n", "anchors and aliases"),
    "merge of itself": ("a: &x {<<: *x}\n", "anchors and aliases"),
    "merge key": ("<<: {family: llama}\n", "not valid YAML"),
    "deep flow": ("[" * 100_000, "more than 32 levels"),
    "deep block": ("".join(" " * i + "a:\n" for i in range(200)), "more than 32 levels"),
    "list as key": ("? [a, b]\n: 1\n", "a key must be a word"),
    "key twice": ("family: a\nfamily: b\n", "key 'family' is given twice"),
    "number of 5000 digits": (f"family: {'9' * 5000}\n", "not valid YAML"),
    "date that is none": ("family: 2024-99-99\n", "not valid YAML"),
    "python object": ("family: !!python/object/apply:os.system [id]\n", "could not determine a constructor"),
    "not a number": (GOOD.replace("width: 64", "width: .nan"), "nan is not of type 'integer'"),
    "infinite": (GOOD.replace("width: 64", "width: .inf"), "inf is not of type 'integer'"),
    "number as text": (GOOD.replace("width: 64", "width: '64'"), "'64' is not of type 'integer'"),
    "long text": (GOOD.replace("family: llama", f"family: {'A' * 100_000}"), "manifest is not valid"),
    "nothing": ("", "manifest is not valid"),
    "two documents": ("a: 1\n---\nb: 2\n", "not valid YAML"),
    "too large": ("# " + "x" * 300_000, "file is too large"),
    "control characters": ("a: \x00\n", "not valid YAML"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_manifest_is_one_short_line(name: str, tmp_path: Path) -> None:
    text, said = HOSTILE[name]
    path = tmp_path / "llama.yaml"
    path.write_text(text)
    with pytest.raises(UsageError) as caught:
        load_family("llama", tmp_path)
    assert said in caught.value.line
    assert str(path) in caught.value.line
    assert "\n" not in caught.value.line and len(caught.value.line) < 600 + len(str(path))


def test_alias_bomb_costs_no_memory(tmp_path: Path) -> None:
    """In a process that may take 10 CPU seconds and 2 GiB of addresses; the bomb is 9^10 values."""
    (tmp_path / "llama.yaml").write_text(BOMB)
    command = [sys.executable, "-c", "from parity.cli import main; main()"]
    done = subprocess.run(
        [*command, "lock", "--family", "llama", "--manifests", str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=lambda: (
            resource.setrlimit(resource.RLIMIT_CPU, (10, 10)),
            resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30)),
        ),
    )
    assert done.returncode == ExitCode.USAGE, done.stderr
    assert done.stderr.count("\n") == 1


def test_unreadable_manifest_is_bad_input(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "llama.yaml").mkdir()
    with pytest.raises(SystemExit) as ended:
        main(["fetch", "--manifests", str(tmp_path)])
    assert ended.value.code == ExitCode.USAGE and capsys.readouterr().err.count("\n") == 1


@given(
    place=st.integers(0, len(GOOD) - 1),
    size=st.integers(0, 30),
    insert=st.text("[]{}:&*!|>-'\"%@`#,? \n\tabc019.~<\x07é", max_size=12),
)
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_damaged_manifest_is_read_or_refused(tmp_path: Path, place: int, size: int, insert: str) -> None:
    path = tmp_path / "llama.yaml"
    path.write_text(GOOD[:place] + insert + GOOD[place + size :])
    try:
        load_family("llama", tmp_path)
    except UsageError as error:
        assert "\n" not in error.line and len(error.line) < 1000


def test_plain_manifests_are_read_as_safe_load_reads_them() -> None:
    for path in sorted(manifests_dir().glob("*.yaml")):
        schema = "lock" if path.name == "lock.yaml" else "manifest"
        assert load_checked_yaml(path, schema=schema) == yaml.safe_load(path.read_text())
