"""parity lock: pins come from the Hub or stay unset, and nothing else in a manifest changes."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
from huggingface_hub import constants

from parity.cli import main
from parity.errors import ExitCode
from parity.models.catalogue import find_row_file
from parity.models.families import load_family, manifests_dir
from tests.parity.models.hub.desk import FILE, FIRST, REPO, SECOND, Desk, weights

LLAMA = (manifests_dir() / "llama.yaml").read_text()


def manifest(folder: Path, *, text: str = LLAMA, file: str = FILE, **pins: object) -> Path:
    """A copy of the llama manifest whose real row is in the loopback Hub's repository."""
    head, real = text.split("  real:\n")
    values = {"revision": "null", "sha256": "null", "size_bytes": "null", **pins, "repo": REPO, "file": file}
    lines = []
    for line in real.splitlines():
        key = line.split(":")[0].strip()
        lines.append(f"    {key}: {values[key]}" if key in values else line)
    path = folder / "llama.yaml"
    path.write_text(head + "  real:\n" + "\n".join(lines) + "\n")
    return path


@pytest.fixture(autouse=True)
def hub_in_the_environment(desk: Desk, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(constants, "ENDPOINT", desk.hub.endpoint)
    template = desk.hub.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(desk.settings.cache))
    monkeypatch.setenv("HF_TOKEN", "")


def run(path: Path, *arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main([*arguments, "--manifests", str(path.parent)])
    return ended.value.code


def changed_lines(before: str, after: str) -> list[tuple[str, str]]:
    pairs = zip(before.splitlines(), after.splitlines(), strict=True)
    return [(old.strip(), new.strip()) for old, new in pairs if old != new]


def test_lock_writes_the_three_pins_and_no_other_line(desk: Desk, body: bytes, tmp_path: Path, capsys):
    path = manifest(tmp_path)
    before = path.read_text()
    assert run(path, "lock") == ExitCode.PASS
    assert changed_lines(before, path.read_text()) == [
        ("revision: null", f'revision: "{FIRST}"'),
        ("sha256: null", f"sha256: {hashlib.sha256(body).hexdigest()}"),
        ("size_bytes: null", f"size_bytes: {len(body)}"),
    ]
    row = load_family("llama", tmp_path).row("real")
    assert row.locked
    assert (row.revision, row.sha256) == (FIRST, hashlib.sha256(body).hexdigest())
    assert capsys.readouterr().out.startswith("pass: llama:real locked at revision")


def test_a_locked_row_can_be_fetched_frozen(desk: Desk, body: bytes, tmp_path: Path, capsys):
    path = manifest(tmp_path)
    assert run(path, "fetch", "--frozen") == ExitCode.UNKNOWN
    assert run(path, "lock") == ExitCode.PASS
    assert run(path, "fetch", "--frozen") == ExitCode.PASS
    assert "downloaded" in capsys.readouterr().out
    assert run(path, "fetch", "--frozen") == ExitCode.PASS
    assert "was cached" in capsys.readouterr().out


def test_what_was_fetched_is_what_the_catalogue_finds(desk: Desk, body: bytes, tmp_path: Path):
    path = manifest(tmp_path)
    run(path, "lock")
    family = load_family("llama", tmp_path)
    assert find_row_file(family, family.row("real")) is None
    assert run(path, "fetch", "--frozen") == ExitCode.PASS
    assert find_row_file(family, family.row("real")).read_bytes() == body


def test_frozen_fetch_refuses_an_unlocked_row_and_asks_nobody(desk: Desk, tmp_path: Path, capsys):
    assert run(manifest(tmp_path), "fetch", "--frozen") == ExitCode.UNKNOWN
    line = capsys.readouterr().out
    for word in ("unknown", "llama:real", "unlocked", "revision", "sha256", "parity lock"):
        assert word in line
    assert line.count("\n") == 1
    assert desk.hub.seen == []


def test_unfrozen_fetch_takes_the_head_and_says_that_it_is_not_pinned(desk: Desk, tmp_path: Path, capsys):
    desk.hub.repositories[REPO].commits[SECOND] = {FILE: weights(2)}
    path = manifest(tmp_path)
    before = path.read_text()
    assert run(path, "fetch") == ExitCode.PASS
    line = capsys.readouterr().out
    assert SECOND in line and "unlocked" in line
    assert path.read_text() == before


def test_lock_again_changes_nothing(desk: Desk, tmp_path: Path, capsys):
    path = manifest(tmp_path)
    run(path, "lock")
    locked = path.read_text()
    capsys.readouterr()
    assert run(path, "lock") == ExitCode.PASS
    assert path.read_text() == locked
    assert f"is locked at revision {FIRST}" in capsys.readouterr().out


def test_lock_keeps_a_pin_when_the_branch_moves_and_update_follows_it(desk: Desk, tmp_path: Path):
    path = manifest(tmp_path)
    run(path, "lock")
    locked = path.read_text()
    desk.hub.repositories[REPO].commits[SECOND] = {FILE: weights(2, 1000)}
    assert run(path, "lock") == ExitCode.PASS
    assert path.read_text() == locked
    assert run(path, "lock", "--update") == ExitCode.PASS
    row = load_family("llama", tmp_path).row("real")
    assert (row.revision, row.size_bytes) == (SECOND, 1000)
    assert row.sha256 == hashlib.sha256(weights(2, 1000)).hexdigest()


def test_lock_fails_when_the_hub_contradicts_a_pin(desk: Desk, body: bytes, tmp_path: Path, capsys):
    path = manifest(tmp_path, revision=f'"{FIRST}"', sha256="a" * 64, size_bytes=len(body))
    before = path.read_text()
    assert run(path, "lock") == ExitCode.FAIL
    assert hashlib.sha256(body).hexdigest() in capsys.readouterr().out
    assert path.read_text() == before


def test_lock_never_invents_a_digest_that_the_hub_does_not_publish(desk: Desk, tmp_path: Path, capsys):
    desk.hub.repositories[REPO].small = frozenset({FILE})
    path = manifest(tmp_path)
    before = path.read_text()
    assert run(path, "lock") == ExitCode.UNKNOWN
    assert "is unlocked" in capsys.readouterr().out
    assert path.read_text() == before


def test_lock_offline_leaves_the_row_unlocked(
    desk: Desk, tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    path = manifest(tmp_path)
    before = path.read_text()
    assert run(path, "lock") == ExitCode.UNKNOWN
    line = capsys.readouterr().out
    assert "is unlocked" in line and "HF_HUB_OFFLINE" in line
    assert path.read_text() == before and desk.hub.seen == []


def test_lock_of_a_misspelt_file_names_the_near_ones(desk: Desk, tmp_path: Path, capsys):
    assert run(manifest(tmp_path, file="tiny-q8_1.gguf"), "lock") == ExitCode.UNKNOWN
    assert f"did you mean {FILE}" in capsys.readouterr().out


def test_lock_of_a_gated_repository_names_the_token(desk: Desk, tmp_path: Path, capsys):
    desk.hub.repositories[REPO].token, desk.hub.repositories[REPO].gated = "hf_right", True
    assert run(manifest(tmp_path), "lock") == ExitCode.UNKNOWN
    line = capsys.readouterr().out
    assert REPO in line and "HF_TOKEN" in line


@pytest.mark.parametrize("command", ["lock", "fetch"])
def test_an_unknown_family_is_bad_input(tmp_path: Path, capsys, command: str):
    assert run(manifest(tmp_path), command, "--family", "mistake") == ExitCode.USAGE
    assert "mistake" in capsys.readouterr().err


def test_fetch_verdict_is_the_worst_of_its_rows(desk: Desk, body: bytes, tmp_path: Path, capsys):
    """One row contradicted (fail), one gone (unknown): the exit code is the failure, and both are told."""
    manifest(tmp_path, revision=f'"{FIRST}"', sha256="a" * 64, size_bytes=len(body))
    text = (manifests_dir() / "gemma2.yaml").read_text()
    gemma = tmp_path / "gemma2.yaml"
    gemma.write_text(text)
    assert run(gemma, "fetch", "--frozen") == ExitCode.FAIL
    verdicts = [line.split()[:2] for line in capsys.readouterr().out.splitlines()]
    assert verdicts == [["fail:", "llama:real"], ["unknown:", "gemma2:real"]]


def test_confirm_without_a_package_row_is_unknown(tmp_path: Path, capsys):
    (tmp_path / "gemma2.yaml").write_text((manifests_dir() / "gemma2.yaml").read_text())
    assert run(tmp_path / "gemma2.yaml", "fetch", "--confirm") == ExitCode.UNKNOWN
    assert "no package row" in capsys.readouterr().out
