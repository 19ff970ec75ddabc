"""fetch_file against a Hub on loopback: what is pinned arrives whole, once, or one line says why not."""

from __future__ import annotations

import errno
import hashlib
import os
from dataclasses import replace
from pathlib import Path

import pytest
from huggingface_hub import file_download, hf_hub_download

from parity.errors import ExitCode, UsageError
from parity.models import hub
from parity.models.hub import HubSettings, Progress
from tests.parity.models.hub.desk import FILE, FIRST, REPO, SECOND, Desk, leftovers, pinned, refused, weights
from tests.parity.models.hub.server import Fault


def test_fetch_brings_the_pinned_bytes_and_tells_a_log(
    desk: Desk, body: bytes, capfd: pytest.CaptureFixture[str]
) -> None:
    fetched = desk.fetch(pinned(body))
    assert fetched.path.read_bytes() == body
    assert not fetched.was_cached
    assert leftovers(desk) == []
    lines = capfd.readouterr().err.split("\n")
    lines = [line for line in lines if line]
    assert "100%" in lines[-1] and "\r" not in lines[-1]


def test_progress_in_a_log_is_a_line_now_and_then(capfd: pytest.CaptureFixture[str]) -> None:
    with Progress(total=1000, desc="x", disable=None) as progress:
        for _ in range(1000):
            progress.update(1)
    assert len(capfd.readouterr().err.splitlines()) <= 3


@pytest.mark.parametrize("missing", [("revision",), ("size_bytes",), ("revision", "size_bytes")])
def test_a_digest_alone_is_a_pin(desk: Desk, body: bytes, missing: tuple[str, ...]) -> None:
    target = replace(pinned(body), **dict.fromkeys(missing))
    assert desk.fetch(target).path.read_bytes() == body
    answered = len(desk.hub.seen)
    assert desk.fetch(target).was_cached
    assert desk.fetch(target, settings=replace(desk.settings, offline=True)).was_cached
    assert len(desk.hub.seen) == answered


def test_a_digest_alone_refuses_other_content_and_follows_a_corrected_pin(desk: Desk, body: bytes) -> None:
    """The default branch moves: the old pin says so, the new one is fetched beside the old file."""
    old = replace(pinned(body), revision=None, size_bytes=None)
    desk.fetch(old)
    desk.hub.repositories[REPO].commits[SECOND] = {FILE: weights(2)}
    new = replace(pinned(weights(2)), revision=None, size_bytes=None)
    assert desk.fetch(new).path.read_bytes() == weights(2)
    assert desk.fetch(old).path.read_bytes() == body  # still there, under its digest
    assert desk.said == []
    refused(desk, replace(old, sha256="a" * 64), ExitCode.FAIL, "a" * 64)


@pytest.mark.parametrize("revision", [FIRST, None])
@pytest.mark.parametrize("size", [True, False])
def test_a_mirror_that_names_no_commit_serves_what_a_digest_pins(
    desk: Desk, body: bytes, revision: str | None, size: bool
) -> None:
    desk.hub.names_commits = False
    desk.hub.faults.append(Fault(cut_after_bytes=1000))
    target = replace(pinned(body, revision=revision), **({} if size else {"size_bytes": None}))
    fetched = desk.fetch(target)
    assert not fetched.was_cached and fetched.path.read_bytes() == body
    answered = len(desk.hub.seen)
    assert desk.fetch(target).was_cached
    assert len(desk.hub.seen) == answered
    assert [seen.authorised for seen in desk.hub.seen if seen.host == "storage"] == [False, False]


def test_a_mirror_that_names_no_commit_is_not_believed(desk: Desk, body: bytes) -> None:
    desk.hub.names_commits = False
    desk.hub.faults.append(Fault(body=weights(3, len(body))))
    refused(desk, pinned(body), ExitCode.FAIL, hashlib.sha256(weights(3, len(body))).hexdigest())
    path = desk.fetch(pinned(body)).path
    path.write_bytes(b"damaged")
    assert desk.fetch(pinned(body)).path.read_bytes() == body


def test_a_mirror_never_passes_the_token_on(desk: Desk, body: bytes) -> None:
    desk.hub.names_commits, desk.hub.repositories[REPO].token = False, "hf_right"
    desk.fetch(pinned(body), settings=replace(desk.settings, token="hf_right"))
    assert {(seen.host, seen.authorised) for seen in desk.hub.seen} == {("hub", True), ("storage", False)}


def test_fetch_of_a_cached_file_asks_nobody(desk: Desk, body: bytes) -> None:
    first = desk.fetch(pinned(body))
    answered = len(desk.hub.seen)
    second = desk.fetch(pinned(body))
    assert second.was_cached and second.path == first.path
    assert len(desk.hub.seen) == answered


def test_fetched_file_is_found_by_huggingface_hub_itself(desk: Desk, body: bytes) -> None:
    fetched = desk.fetch(pinned(body))
    found = hf_hub_download(REPO, FILE, revision=FIRST, cache_dir=desk.settings.cache, local_files_only=True)
    assert Path(found) == fetched.path


def test_fetch_uses_what_huggingface_hub_downloaded(desk: Desk, body: bytes) -> None:
    theirs = hf_hub_download(
        REPO, FILE, revision=FIRST, cache_dir=desk.settings.cache, endpoint=desk.hub.endpoint
    )
    ours = desk.fetch(pinned(body))
    assert ours.was_cached and ours.path == Path(theirs)


def test_fetch_keeps_the_pinned_revision_when_the_branch_moves(desk: Desk, body: bytes) -> None:
    desk.hub.repositories[REPO].commits[SECOND] = {FILE: weights(2)}
    assert desk.fetch(pinned(body)).path.read_bytes() == body


def test_fetch_of_a_vanished_revision_says_to_lock_again(desk: Desk, body: bytes) -> None:
    desk.hub.repositories[REPO].commits = {SECOND: {FILE: weights(2)}}
    refused(desk, pinned(body), ExitCode.UNKNOWN, FIRST, "404", "parity lock --update")


def test_fetch_of_a_new_revision_with_old_content_transfers_nothing(desk: Desk, body: bytes) -> None:
    desk.fetch(pinned(body))
    desk.hub.repositories[REPO].commits[SECOND] = {FILE: body}
    fetched = desk.fetch(pinned(body, revision=SECOND))
    assert fetched.was_cached and fetched.path.read_bytes() == body
    assert len(desk.hub.requests("storage", "GET")) == 1


def test_fetch_of_a_new_revision_never_takes_old_content_for_new(desk: Desk, body: bytes) -> None:
    desk.fetch(pinned(body))
    fresh = weights(2, len(body))
    desk.hub.repositories[REPO].commits[SECOND] = {FILE: fresh}
    assert desk.fetch(pinned(fresh, revision=SECOND)).path.read_bytes() == fresh
    assert desk.fetch(pinned(body)).path.read_bytes() == body


def test_fetch_refuses_a_digest_that_the_hub_contradicts_before_any_byte(desk: Desk, body: bytes) -> None:
    target = replace(pinned(body), sha256="a" * 64)
    refused(desk, target, ExitCode.FAIL, "a" * 64, hashlib.sha256(body).hexdigest(), "parity lock")
    assert desk.hub.requests("storage", "GET") == []


def test_fetch_refuses_a_size_that_the_hub_contradicts(desk: Desk, body: bytes) -> None:
    refused(
        desk, replace(pinned(body), size_bytes=len(body) + 1), ExitCode.FAIL, str(len(body)), "parity lock"
    )


def test_fetch_removes_a_download_with_the_wrong_digest(desk: Desk, body: bytes) -> None:
    desk.hub.faults.append(Fault(body=weights(3, len(body))))
    refused(desk, pinned(body), ExitCode.FAIL, "removed", hashlib.sha256(weights(3, len(body))).hexdigest())
    assert leftovers(desk) == []
    assert desk.fetch(pinned(body)).path.read_bytes() == body


def test_fetch_removes_a_body_that_is_too_long(desk: Desk, body: bytes) -> None:
    desk.hub.faults.append(Fault(body=body + b"more"))
    refused(desk, pinned(body), ExitCode.UNKNOWN, "not served whole", str(len(body)))
    assert leftovers(desk) == []


def test_fetch_replaces_a_damaged_cached_file(desk: Desk, body: bytes) -> None:
    path = desk.fetch(pinned(body)).path
    path.write_bytes(b"damaged")
    fetched = desk.fetch(pinned(body))
    assert not fetched.was_cached and fetched.path.read_bytes() == body
    assert len(desk.said) == 1 and "damaged" in desk.said[0]


def test_fetch_replaces_a_damaged_plain_file_where_a_link_would_be(desk: Desk, body: bytes) -> None:
    """As huggingface_hub leaves it where links cannot be made, and our own older versions did."""
    path = desk.fetch(pinned(body)).path
    path.resolve().unlink()
    path.unlink()
    path.write_bytes(b"damaged")
    assert desk.fetch(pinned(body)).path.read_bytes() == body
    assert path.read_bytes() == body


def test_fetch_keeps_a_cached_file_when_the_lock_is_what_is_wrong(desk: Desk, body: bytes) -> None:
    path = desk.fetch(pinned(body)).path
    refused(desk, replace(pinned(body), sha256="b" * 64), ExitCode.FAIL, "b" * 64)
    assert path.read_bytes() == body


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("token, status", [(None, "401"), ("hf_wrong", "403")])
def test_fetch_of_a_gated_repository_says_what_to_do_and_does_not_retry(
    desk: Desk, body: bytes, token: str | None, status: str, gated: bool, slept_s: list[float]
) -> None:
    desk.hub.repositories[REPO].token, desk.hub.repositories[REPO].gated = "hf_right", gated
    line = refused(
        desk,
        pinned(body),
        ExitCode.UNKNOWN,
        REPO,
        status,
        "HF_TOKEN",
        "licence",
        settings=replace(desk.settings, token=token),
    )
    assert token is None or token not in line
    assert slept_s == [] and len(desk.hub.seen) == 1


def test_fetch_sends_the_token_to_the_hub_and_never_to_the_storage_host(desk: Desk, body: bytes) -> None:
    desk.hub.repositories[REPO].token = "hf_right"
    desk.hub.faults.append(Fault(cut_after_bytes=1000))
    assert (
        desk.fetch(pinned(body), settings=replace(desk.settings, token="hf_right")).path.read_bytes() == body
    )
    assert {seen.authorised for seen in desk.hub.seen if seen.host == "hub"} == {True}
    assert [seen.authorised for seen in desk.hub.seen if seen.host == "storage"] == [False, False]


def test_fetch_of_a_missing_file_is_one_line(desk: Desk, body: bytes) -> None:
    refused(desk, pinned(body, file="absent.gguf"), ExitCode.UNKNOWN, "absent.gguf", REPO, "404")


def test_fetch_of_a_missing_repository_is_one_line(desk: Desk, body: bytes) -> None:
    refused(
        desk,
        pinned(body, repo="maker/absent"),
        ExitCode.UNKNOWN,
        "maker/absent",
        settings=replace(desk.settings, token="hf_any"),
    )


def test_fetch_checks_free_disk_before_it_transfers(desk: Desk, body: bytes) -> None:
    refused(
        desk,
        pinned(body),
        ExitCode.UNKNOWN,
        "disk full",
        str(len(body)),
        "HF_HOME",
        free_bytes=lambda folder: len(body) - 1,
    )
    assert desk.hub.requests("storage", "GET") == []
    assert desk.fetch(pinned(body), free_bytes=lambda folder: len(body)).path.read_bytes() == body


@pytest.mark.parametrize("names_commits", [True, False])
def test_fetch_onto_a_disk_that_fills_up_is_one_line(
    desk: Desk, body: bytes, monkeypatch: pytest.MonkeyPatch, names_commits: bool
) -> None:
    def full(*arguments: object, **options: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    desk.hub.names_commits = names_commits
    for module in (file_download, hub):
        monkeypatch.setattr(module, "http_get", full)
    refused(desk, pinned(body), ExitCode.UNKNOWN, "disk full", "HF_HOME")
    assert leftovers(desk) == []


def test_a_cache_that_cannot_be_written_is_bad_input(desk: Desk, body: bytes, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    settings = replace(desk.settings, cache=tmp_path / "file" / "cache")
    with pytest.raises(UsageError, match="the Hub cache cannot be written.*HF_HOME"):
        desk.fetch(pinned(body), settings=settings)


def test_offline_fetch_with_a_cache_works_and_asks_nobody(desk: Desk, body: bytes) -> None:
    path = desk.fetch(pinned(body)).path
    answered = len(desk.hub.seen)
    assert desk.fetch(pinned(body), settings=replace(desk.settings, offline=True)).path == path
    assert len(desk.hub.seen) == answered


def test_offline_fetch_without_a_cache_is_unknown(desk: Desk, body: bytes) -> None:
    refused(
        desk,
        pinned(body),
        ExitCode.UNKNOWN,
        "HF_HUB_OFFLINE",
        REPO,
        settings=replace(desk.settings, offline=True),
    )
    assert desk.hub.seen == []


def test_offline_fetch_of_a_damaged_file_is_a_failure(desk: Desk, body: bytes) -> None:
    desk.fetch(pinned(body)).path.write_bytes(b"damaged")
    refused(
        desk,
        pinned(body),
        ExitCode.FAIL,
        hashlib.sha256(b"damaged").hexdigest(),
        settings=replace(desk.settings, offline=True),
    )


def test_fetch_of_an_unlocked_file_is_unknown_and_asks_nobody(desk: Desk, body: bytes) -> None:
    refused(desk, replace(pinned(body), sha256=None), ExitCode.UNKNOWN, "unlocked", "sha256", "parity lock")
    assert desk.hub.seen == []


@pytest.mark.parametrize(
    "change",
    [
        {"repo": "a/b/c"},
        {"file": "../up.gguf"},
        {"file": "/etc/hosts"},
        {"file": ""},
        {"revision": "main"},
        {"sha256": "ab"},
        {"size_bytes": 0},
    ],
)
def test_a_pin_that_cannot_be_one_is_refused(body: bytes, change: dict[str, object]) -> None:
    with pytest.raises(UsageError):
        replace(pinned(body), **change)


def test_an_endpoint_that_is_no_address_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="HF_ENDPOINT"):
        HubSettings(endpoint="localhost:80", cache=tmp_path)
