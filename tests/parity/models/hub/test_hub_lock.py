"""parity lock: pins come from the Hub or stay unset, and no manifest changes."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import yaml
from huggingface_hub import constants

from parity.cli import main
from parity.errors import ExitCode, UsageError
from parity.models.catalogue import find_row_file, resolve_model
from parity.models.families import load_family, manifests_dir
from parity.models.lock_file import LOCK_FILE, PINS, save_lock
from tests.parity.models.hub.desk import FILE, FIRST, REPO, SECOND, Desk, weights


def manifest(folder: Path, *, family: str = "llama", file: str = FILE, **pins: object) -> Path:
    """A copy of a family's manifest whose real row is in the loopback Hub's repository, with ``pins``."""
    content = yaml.safe_load((manifests_dir() / f"{family}.yaml").read_text())
    row = {key: value for key, value in content["rows"]["real"].items() if key not in PINS}
    content["rows"]["real"] = {**row, "repo": REPO, "file": file, **pins}
    path = folder / f"{family}.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


@pytest.fixture(autouse=True)
def hub_in_the_environment(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", desk.hub.endpoint)
    template = desk.hub.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(desk.settings.cache))
    monkeypatch.setenv("HF_TOKEN", "")


def run(path: Path, *arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main([*arguments, "--manifests", str(path.parent)])
    return ended.value.code


def locked_text(path: Path) -> str:
    return (path.parent / LOCK_FILE).read_text()


def test_lock_writes_the_three_pins_and_no_manifest(
    desk: Desk, body: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = manifest(tmp_path)
    before = path.read_text()
    assert run(path, "lock") == ExitCode.PASS
    assert path.read_text() == before
    digest = hashlib.sha256(body).hexdigest()
    assert yaml.safe_load(locked_text(path)) == {
        "llama": {
            "real": {"repo": REPO, "file": FILE, "revision": FIRST, "sha256": digest, "size_bytes": len(body)}
        }
    }
    row = load_family("llama", tmp_path).row("real")
    assert (row.locked, row.revision, row.sha256, row.size_bytes) == (True, FIRST, digest, len(body))
    assert capsys.readouterr().out.startswith("pass: llama:real locked at revision")


def test_lock_keeps_the_other_families_entries(desk: Desk, tmp_path: Path) -> None:
    manifest(tmp_path)
    path = manifest(tmp_path, family="gemma2")
    assert run(path, "lock") == ExitCode.PASS
    both = locked_text(path)
    desk.hub.repositories[REPO].commits[SECOND] = {FILE: weights(2, 1000)}
    assert run(path, "lock", "--update", "--family", "gemma2") == ExitCode.PASS
    now, before = yaml.safe_load(locked_text(path)), yaml.safe_load(both)
    assert now["llama"] == before["llama"] and now["gemma2"]["real"]["revision"] == SECOND


@pytest.mark.parametrize("change", [{"file": "other.gguf"}, {"sha256": "a" * 64}, {"revision": "b" * 40}])
def test_a_lock_holds_only_for_the_file_and_the_pins_that_the_manifest_names(
    desk: Desk, tmp_path: Path, change: dict[str, str]
) -> None:
    run(manifest(tmp_path), "lock")
    assert load_family("llama", tmp_path).row("real").size_bytes is not None
    manifest(tmp_path, **change)
    row = load_family("llama", tmp_path).row("real")
    assert row.sha256 == change.get("sha256") and row.size_bytes is None


def test_a_digest_by_hand_is_a_pin_that_lock_completes(desk: Desk, body: bytes, tmp_path: Path) -> None:
    digest = hashlib.sha256(body).hexdigest()
    path = manifest(tmp_path, sha256=digest)
    assert load_family("llama", tmp_path).row("real").locked
    assert run(path, "fetch", "--frozen") == ExitCode.PASS
    assert run(path, "lock") == ExitCode.PASS
    row = load_family("llama", tmp_path).row("real")
    assert (row.revision, row.sha256, row.size_bytes) == (FIRST, digest, len(body))


@pytest.mark.parametrize("update", [[], ["--update"]])
def test_lock_never_moves_a_digest_by_hand(
    desk: Desk, tmp_path: Path, update: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    path = manifest(tmp_path, sha256="a" * 64)
    assert run(path, "lock", *update) == ExitCode.FAIL
    assert not (tmp_path / LOCK_FILE).exists()
    assert "contradicts the Hub" in capsys.readouterr().out


@pytest.mark.parametrize(
    "text", ["[]", "llama: {real: {}}", "llama: {real: {revision: 1}}", "a: &x [*x]", "x: .nan"]
)
def test_a_lock_that_is_none_is_bad_input(
    tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = manifest(tmp_path)
    (tmp_path / LOCK_FILE).write_text(text)
    assert run(path, "lock") == ExitCode.USAGE
    told = capsys.readouterr().err
    assert LOCK_FILE in told and told.count("\n") == 1


def test_a_locked_row_can_be_fetched_frozen(
    desk: Desk, body: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = manifest(tmp_path)
    assert run(path, "fetch", "--frozen") == ExitCode.UNKNOWN
    assert run(path, "lock") == ExitCode.PASS
    assert run(path, "fetch", "--frozen") == ExitCode.PASS
    assert "downloaded" in capsys.readouterr().out
    assert run(path, "fetch", "--frozen") == ExitCode.PASS
    assert "was cached" in capsys.readouterr().out


def test_what_was_fetched_is_what_the_catalogue_finds(desk: Desk, body: bytes, tmp_path: Path) -> None:
    path = manifest(tmp_path)
    run(path, "lock")
    family = load_family("llama", tmp_path)
    assert find_row_file(family, family.row("real")) is None
    assert run(path, "fetch", "--frozen") == ExitCode.PASS
    assert find_row_file(family, family.row("real")).read_bytes() == body


def test_catalogue_says_what_is_wrong_with_a_hub_row(
    desk: Desk, body: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = manifest(tmp_path)
    monkeypatch.setattr("parity.models.families.manifests_dir", lambda: tmp_path)
    with pytest.raises(UsageError, match="llama:real is unlocked.*parity lock"):
        resolve_model("llama:real")
    run(path, "lock")
    with pytest.raises(UsageError, match="llama:real is not here.*parity fetch"):
        resolve_model("llama:real")
    run(path, "fetch", "--frozen")
    with pytest.raises(UsageError, match="not a usable GGUF file"):  # right bytes, but they are no model
        resolve_model("llama:real")
    family = load_family("llama", tmp_path)
    find_row_file(family, family.row("real")).write_bytes(b"damaged")
    digest = hashlib.sha256(b"damaged").hexdigest()
    with pytest.raises(UsageError, match=f"llama:real has the wrong digest.*{digest}.*parity fetch"):
        resolve_model("llama:real")


def test_frozen_fetch_refuses_an_unlocked_row_and_asks_nobody(
    desk: Desk, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(manifest(tmp_path), "fetch", "--frozen") == ExitCode.UNKNOWN
    line = capsys.readouterr().out
    for word in ("unknown", "llama:real", "unlocked", "sha256", "parity lock"):
        assert word in line
    assert line.count("\n") == 1
    assert desk.hub.seen == []


def test_unfrozen_fetch_takes_the_head_and_says_that_it_is_not_pinned(
    desk: Desk, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    desk.hub.repositories[REPO].commits[SECOND] = {FILE: weights(2)}
    path = manifest(tmp_path)
    before = path.read_text()
    assert run(path, "fetch") == ExitCode.PASS
    line = capsys.readouterr().out
    assert SECOND in line and "unlocked" in line
    assert path.read_text() == before and not (tmp_path / LOCK_FILE).exists()


def test_lock_again_changes_nothing(desk: Desk, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = manifest(tmp_path)
    run(path, "lock")
    locked = locked_text(path)
    capsys.readouterr()
    assert run(path, "lock") == ExitCode.PASS
    assert locked_text(path) == locked
    assert f"is locked at revision {FIRST}" in capsys.readouterr().out


def test_lock_keeps_a_pin_when_the_branch_moves_and_update_follows_it(desk: Desk, tmp_path: Path) -> None:
    path = manifest(tmp_path)
    run(path, "lock")
    locked = locked_text(path)
    desk.hub.repositories[REPO].commits[SECOND] = {FILE: weights(2, 1000)}
    assert run(path, "lock") == ExitCode.PASS
    assert locked_text(path) == locked
    assert run(path, "lock", "--update") == ExitCode.PASS
    row = load_family("llama", tmp_path).row("real")
    assert (row.revision, row.size_bytes) == (SECOND, 1000)
    assert row.sha256 == hashlib.sha256(weights(2, 1000)).hexdigest()


def test_lock_fails_when_the_hub_contradicts_a_pin(
    desk: Desk, body: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = manifest(tmp_path)
    lock = {"llama": {"real": {"repo": REPO, "file": FILE, "revision": FIRST, "sha256": "a" * 64}}}
    lock["llama"]["real"]["size_bytes"] = len(body)
    save_lock(tmp_path, lock)
    before = locked_text(path)
    assert run(path, "lock") == ExitCode.FAIL
    assert hashlib.sha256(body).hexdigest() in capsys.readouterr().out
    assert locked_text(path) == before


def test_lock_never_invents_a_digest_that_the_hub_does_not_publish(
    desk: Desk, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    desk.hub.repositories[REPO].small = frozenset({FILE})
    path = manifest(tmp_path)
    assert run(path, "lock") == ExitCode.UNKNOWN
    assert "is unlocked" in capsys.readouterr().out
    assert not (tmp_path / LOCK_FILE).exists()


def test_lock_offline_leaves_the_row_unlocked(
    desk: Desk, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    path = manifest(tmp_path)
    assert run(path, "lock") == ExitCode.UNKNOWN
    line = capsys.readouterr().out
    assert "is unlocked" in line and "HF_HUB_OFFLINE" in line
    assert not (tmp_path / LOCK_FILE).exists() and desk.hub.seen == []


def test_lock_of_a_misspelt_file_names_the_near_ones(
    desk: Desk, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(manifest(tmp_path, file="tiny-q8_1.gguf"), "lock") == ExitCode.UNKNOWN
    assert f"did you mean {FILE}" in capsys.readouterr().out


def test_lock_of_a_gated_repository_names_the_token(
    desk: Desk, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    desk.hub.repositories[REPO].token, desk.hub.repositories[REPO].gated = "hf_right", True
    assert run(manifest(tmp_path), "lock") == ExitCode.UNKNOWN
    line = capsys.readouterr().out
    assert REPO in line and "HF_TOKEN" in line


@pytest.mark.parametrize("command", ["lock", "fetch"])
def test_an_unknown_family_is_bad_input(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    assert run(manifest(tmp_path), command, "--family", "mistake") == ExitCode.USAGE
    assert "mistake" in capsys.readouterr().err


def test_fetch_verdict_is_the_worst_of_its_rows(
    desk: Desk, body: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One row contradicted (fail), one gone (unknown): the exit code is the failure, and both are told."""
    manifest(tmp_path, revision=FIRST, sha256="a" * 64, size_bytes=len(body))
    assert run(manifest(tmp_path, family="gemma2"), "fetch", "--frozen") == ExitCode.FAIL
    verdicts = [line.split()[:2] for line in capsys.readouterr().out.splitlines()]
    assert verdicts == [["fail:", "llama:real"], ["unknown:", "gemma2:real"]]


def test_confirm_without_a_package_row_is_unknown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "gemma2.yaml").write_text((manifests_dir() / "gemma2.yaml").read_text())
    assert run(tmp_path / "gemma2.yaml", "fetch", "--confirm") == ExitCode.UNKNOWN
    assert "no package row" in capsys.readouterr().out
