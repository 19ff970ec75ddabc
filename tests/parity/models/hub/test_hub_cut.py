"""Rows with ``layers``: a part of a large file is transferred, made a model, and pinned by its own digest."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from parity.errors import ExitCode, UsageError
from parity.models import resolve_model
from parity.models.families import load_family
from parity.models.hub import HubFile
from parity.models.hub_cut import HubCut, cut_path, fetch_cut, make_cut
from parity.models.lock_file import LOCK_FILE
from parity.models.slice import LayerRange, slice_model
from parity.models.tiny import BUILDERS
from parity.models.unavailable import Unavailable
from tests.parity.models.hub.desk import FILE, FIRST, REPO, SECOND, Desk
from tests.parity.models.hub.server import Fault
from tests.parity.models.hub.test_hub_lock import hub_in_the_environment, manifest, run

__all__ = ["hub_in_the_environment"]
SOURCE = HubFile(repo=REPO, file=FILE, revision=FIRST)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAMEBYTES_CACHE", str(tmp_path / "own"))


@pytest.fixture(params=["llama"])
def whole(request: pytest.FixtureRequest, desk: Desk) -> Path:
    """The model that the Hub has under ``FILE``."""
    path = resolve_model(request.param).path
    desk.hub.repositories[REPO].commits[FIRST][FILE] = path.read_bytes()
    return path


def cut_locally(source: Path, layers: LayerRange, folder: Path) -> bytes:
    slice_model(source, layers, folder / "expected.gguf")
    return (folder / "expected.gguf").read_bytes()


def cut(start: int, stop: int, sha256: str | None = None) -> HubCut:
    return HubCut(source=SOURCE, layers=LayerRange(start=start, stop=stop), sha256=sha256)


@pytest.mark.parametrize("whole", BUILDERS, indirect=True)
@pytest.mark.parametrize("names_commits", [True, False])
def test_cut_is_the_slice_of_the_whole_file(
    desk: Desk, whole: Path, tmp_path: Path, names_commits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As in a large file, the header is a small part: a block that is read ahead is not most of the file.
    monkeypatch.setattr("parity.models.hub_cut.HEADER_BLOCK_BYTES", 4096)
    desk.hub.names_commits = names_commits
    made = make_cut(cut(2, 4), desk.settings)
    assert made.path.read_bytes() == cut_locally(whole, LayerRange(start=2, stop=4), tmp_path)
    assert made.path == cut_path(made.sha256)
    assert (made.revision, made.size_bytes) == (FIRST, made.path.stat().st_size)
    sent = sum(seen.sent for seen in desk.hub.seen)
    assert sent < made.size_bytes + 200_000 < whole.stat().st_size
    assert {seen.status for seen in desk.hub.requests("storage", "GET")} == {206}
    assert [path.name for path in made.path.parent.iterdir() if path.suffix == ".gguf"] == [made.path.name]


def test_pinned_cut_is_fetched_once_and_verified(desk: Desk, whole: Path, tmp_path: Path) -> None:
    body = cut_locally(whole, LayerRange(start=0, stop=2), tmp_path)
    pinned = cut(0, 2, hashlib.sha256(body).hexdigest())
    assert fetch_cut(pinned, desk.settings).path.read_bytes() == body
    answered = len(desk.hub.seen)
    assert fetch_cut(pinned, desk.settings).was_cached
    assert fetch_cut(pinned, replace(desk.settings, offline=True)).was_cached
    assert len(desk.hub.seen) == answered
    cut_path(pinned.sha256).write_bytes(b"damaged")
    assert not fetch_cut(pinned, desk.settings).was_cached
    assert cut_path(pinned.sha256).read_bytes() == body


def test_cut_of_other_weights_is_a_failure_and_removed(desk: Desk, whole: Path, tmp_path: Path) -> None:
    body = cut_locally(whole, LayerRange(start=0, stop=2), tmp_path)
    pinned = cut(0, 2, hashlib.sha256(body).hexdigest())
    files = desk.hub.repositories[REPO].commits[FIRST]
    files[FILE] = files[FILE][:-4] + b"\0\0\0\1"
    with pytest.raises(Unavailable, match="were removed") as caught:
        fetch_cut(pinned, desk.settings)
    assert caught.value.code is ExitCode.FAIL
    assert list(cut_path(pinned.sha256).parent.glob("*.gguf")) == []


def test_cut_survives_a_cut_connection_and_a_rate_limit(desk: Desk, whole: Path, tmp_path: Path) -> None:
    made = make_cut(cut(1, 3), desk.settings).path.read_bytes()
    desk.hub.faults += [Fault(), Fault(cut_after_bytes=100), Fault(status=429, headers={"Retry-After": "3"})]
    assert make_cut(cut(1, 3), desk.settings).path.read_bytes() == made


def test_server_that_ignores_ranges_is_refused_before_the_whole_file_comes(desk: Desk, whole: Path) -> None:
    desk.hub.faults.append(Fault(ignores_range=True))
    with pytest.raises(Unavailable, match="does not serve ranges"):
        make_cut(cut(0, 2), desk.settings)


@pytest.mark.parametrize(
    ("whole", "layers", "said"),
    [
        ("llama", (4, 7), "layers 4:7 are not in the model"),
        ("qwen3next", (0, 3), "recurrent layers only"),
        ("qwen3next", (3, 4), "attention layers only"),
        ("gemma2", (1, 2), "no window layer"),
    ],
    indirect=["whole"],
)
def test_cut_that_is_no_model_is_bad_input(
    desk: Desk, whole: Path, layers: tuple[int, int], said: str
) -> None:
    with pytest.raises(UsageError, match=said):
        make_cut(cut(*layers), desk.settings)
    assert list(cut_path("0").parent.glob("*.gguf")) == []


def test_file_that_is_no_model_is_bad_input(desk: Desk) -> None:
    with pytest.raises(UsageError, match=f"not a usable GGUF file in {REPO}"):
        make_cut(cut(0, 2), desk.settings)


@pytest.mark.parametrize("offline", [True, False])
def test_unlocked_or_offline_cut_is_unknown(desk: Desk, whole: Path, offline: bool) -> None:
    settings = replace(desk.settings, offline=offline)
    with pytest.raises(Unavailable, match="HF_HUB_OFFLINE" if offline else "unlocked") as caught:
        fetch_cut(cut(0, 2, "a" * 64 if offline else None), settings)
    assert caught.value.code is ExitCode.UNKNOWN and desk.hub.seen == []


def test_commands_lock_fetch_and_resolve_a_cut(
    desk: Desk,
    whole: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = manifest(tmp_path, layers="2:4", n_layer=2)
    monkeypatch.setattr("parity.models.families.manifests_dir", lambda: tmp_path)
    with pytest.raises(UsageError, match="is unlocked"):
        resolve_model("llama:real")
    assert run(path, "fetch", "--frozen") == ExitCode.UNKNOWN
    assert run(path, "lock") == ExitCode.PASS
    body = cut_locally(whole, LayerRange(start=2, stop=4), tmp_path)
    digest = hashlib.sha256(body).hexdigest()
    entry = yaml.safe_load((tmp_path / LOCK_FILE).read_text())["llama"]["real"]
    assert entry == {
        "repo": REPO,
        "file": FILE,
        "layers": "2:4",
        "revision": FIRST,
        "sha256": digest,
        "size_bytes": len(body),
    }
    assert run(path, "fetch", "--frozen") == ExitCode.PASS
    assert "was cached" in capsys.readouterr().out
    assert resolve_model("llama:real").path.read_bytes() == body
    # The branch moves: the lock stays until it is told to follow.
    desk.hub.repositories[REPO].commits[SECOND] = {FILE: resolve_model("llama:wide").path.read_bytes()}
    assert run(path, "lock") == ExitCode.PASS
    assert load_family("llama", tmp_path).row("real").sha256 == digest
    assert run(path, "lock", "--update") == ExitCode.PASS
    row = load_family("llama", tmp_path).row("real")
    assert row.revision == SECOND and row.sha256 != digest
    # A pin by hand is never moved.
    manifest(tmp_path, layers="2:4", n_layer=2, sha256=digest)
    assert run(path, "lock", "--update") == ExitCode.FAIL
    # Other layers are another model: the lock does not hold for them.
    manifest(tmp_path, layers="0:2", n_layer=2)
    assert not load_family("llama", tmp_path).row("real").locked


@pytest.mark.parametrize("layers", ["0:3", "2:2", "4:2"])
def test_layers_that_are_not_n_layer_are_refused(tmp_path: Path, layers: str) -> None:
    manifest(tmp_path, layers=layers, n_layer=2)
    with pytest.raises(UsageError, match=r"rows\.real\.layers"):
        load_family("llama", tmp_path)
