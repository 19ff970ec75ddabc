"""fetch_file against a Hub on loopback: what is pinned arrives whole, once, or one line says why not."""

from __future__ import annotations

import hashlib
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
from huggingface_hub import hf_hub_download

from parity.errors import ExitCode, UsageError
from parity.models.hub import fetch_file, place_of
from parity.models.hub_file import HubSettings
from tests.parity.models.hub.desk import FILE, FIRST, REPO, SECOND, Desk, leftovers, pinned, refused, weights
from tests.parity.models.hub.server import Fault


def test_fetch_brings_the_pinned_bytes_and_reports_progress(desk: Desk, body: bytes):
    fetched = desk.fetch(pinned(body))
    assert fetched.path.read_bytes() == body
    assert not fetched.was_cached
    assert fetched.path.is_file() and not fetched.path.is_symlink()
    assert desk.progress[0] == (0, len(body)) and desk.progress[-1] == (len(body), len(body))
    assert leftovers(desk) == []


def test_fetch_of_a_cached_file_asks_nobody(desk: Desk, body: bytes):
    first = desk.fetch(pinned(body))
    answered = len(desk.hub.seen)
    second = desk.fetch(pinned(body))
    assert second.was_cached and second.path == first.path
    assert len(desk.hub.seen) == answered


def test_fetched_file_is_found_by_huggingface_hub_itself(desk: Desk, body: bytes):
    fetched = desk.fetch(pinned(body))
    found = hf_hub_download(REPO, FILE, revision=FIRST, cache_dir=desk.settings.cache, local_files_only=True)
    assert Path(found) == fetched.path


def test_fetch_uses_what_huggingface_hub_downloaded(desk: Desk, body: bytes):
    theirs = hf_hub_download(
        REPO, FILE, revision=FIRST, cache_dir=desk.settings.cache, endpoint=desk.hub.endpoint
    )
    ours = desk.fetch(pinned(body))
    assert ours.was_cached and ours.path == Path(theirs)


def test_fetch_keeps_the_pinned_revision_when_the_branch_moves(desk: Desk, body: bytes):
    desk.hub.repositories[REPO].commits[SECOND] = {FILE: weights(2)}
    assert desk.fetch(pinned(body)).path.read_bytes() == body


def test_fetch_of_a_vanished_revision_says_to_lock_again(desk: Desk, body: bytes):
    desk.hub.repositories[REPO].commits = {SECOND: {FILE: weights(2)}}
    refused(desk, pinned(body), ExitCode.UNKNOWN, FIRST, "404", "parity lock --update")


def test_fetch_of_a_new_revision_with_old_content_transfers_nothing(desk: Desk, body: bytes):
    desk.fetch(pinned(body))
    desk.hub.repositories[REPO].commits[SECOND] = {FILE: body}
    fetched = desk.fetch(pinned(body, revision=SECOND))
    assert fetched.was_cached and fetched.path.read_bytes() == body and SECOND in fetched.path.parts
    assert len(desk.hub.requests("storage", "GET")) == 1


def test_fetch_of_a_new_revision_never_takes_old_content_for_new(desk: Desk, body: bytes):
    desk.fetch(pinned(body))
    fresh = weights(2, len(body))
    desk.hub.repositories[REPO].commits[SECOND] = {FILE: fresh}
    assert desk.fetch(pinned(fresh, revision=SECOND)).path.read_bytes() == fresh
    assert desk.fetch(pinned(body)).path.read_bytes() == body


def test_fetch_refuses_a_digest_that_the_hub_contradicts_before_any_byte(desk: Desk, body: bytes):
    target = replace(pinned(body), sha256="a" * 64)
    refused(desk, target, ExitCode.FAIL, "a" * 64, hashlib.sha256(body).hexdigest(), "parity lock")
    assert desk.hub.requests("storage", "GET") == []


def test_fetch_refuses_a_size_that_the_hub_contradicts(desk: Desk, body: bytes):
    refused(
        desk, replace(pinned(body), size_bytes=len(body) + 1), ExitCode.FAIL, str(len(body)), "parity lock"
    )


def test_fetch_removes_a_download_with_the_wrong_digest(desk: Desk, body: bytes):
    desk.hub.faults.append(Fault(body=weights(3, len(body))))
    refused(desk, pinned(body), ExitCode.FAIL, "removed", hashlib.sha256(weights(3, len(body))).hexdigest())
    assert leftovers(desk) == []
    assert desk.fetch(pinned(body)).path.read_bytes() == body


def test_fetch_removes_a_body_that_is_too_long(desk: Desk, body: bytes):
    desk.hub.faults.append(Fault(body=body + b"more"))
    refused(desk, pinned(body), ExitCode.FAIL, "longer")
    assert leftovers(desk) == []


def test_fetch_replaces_a_damaged_cached_file(desk: Desk, body: bytes):
    path = desk.fetch(pinned(body)).path
    path.write_bytes(b"damaged")
    fetched = desk.fetch(pinned(body))
    assert not fetched.was_cached and fetched.path.read_bytes() == body
    assert len(desk.said) == 1 and "damaged" in desk.said[0]


def test_fetch_keeps_a_cached_file_when_the_lock_is_what_is_wrong(desk: Desk, body: bytes):
    path = desk.fetch(pinned(body)).path
    refused(desk, replace(pinned(body), sha256="b" * 64), ExitCode.FAIL, "b" * 64)
    assert path.read_bytes() == body


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("token, status", [(None, "401"), ("hf_wrong", "403")])
def test_fetch_of_a_gated_repository_says_what_to_do_and_does_not_retry(
    desk: Desk, body: bytes, token: str | None, status: str, gated: bool
):
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
    assert desk.clock.slept_s == [] and len(desk.hub.seen) == 1


def test_fetch_sends_the_token_to_the_hub_and_never_to_the_storage_host(desk: Desk, body: bytes):
    desk.hub.repositories[REPO].token = "hf_right"
    desk.hub.faults.append(Fault(cut_after_bytes=1000))
    assert (
        desk.fetch(pinned(body), settings=replace(desk.settings, token="hf_right")).path.read_bytes() == body
    )
    assert {seen.authorised for seen in desk.hub.seen if seen.host == "hub"} == {True}
    assert [seen.authorised for seen in desk.hub.seen if seen.host == "storage"] == [False, False]


def test_fetch_of_a_missing_file_is_one_line(desk: Desk, body: bytes):
    refused(desk, pinned(body, file="absent.gguf"), ExitCode.UNKNOWN, "absent.gguf", REPO, "404")


def test_fetch_of_a_missing_repository_is_one_line(desk: Desk, body: bytes):
    refused(
        desk,
        pinned(body, repo="maker/absent"),
        ExitCode.UNKNOWN,
        "maker/absent",
        settings=replace(desk.settings, token="hf_any"),
    )


def test_fetch_checks_free_disk_before_it_transfers(desk: Desk, body: bytes):
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


def test_fetch_onto_a_full_device_is_one_line(desk: Desk, body: bytes):
    """/dev/full answers every write with ENOSPC, like a disk that filled up after the check."""
    blobs = desk.settings.cache / f"models--{REPO.replace('/', '--')}" / "blobs"
    blobs.mkdir(parents=True)
    (blobs / f"{pinned(body).sha256}.incomplete").symlink_to("/dev/full")
    refused(desk, pinned(body), ExitCode.UNKNOWN, "disk full", "HF_HOME")


def test_fetch_waits_for_the_process_that_holds_the_files_lock(desk: Desk, body: bytes):
    place = place_of(pinned(body), desk.settings)
    said: list[str] = []
    with ExitStack() as other:
        other.enter_context(place.locked(said.append))
        assert said == []

        def let_go(line: str) -> None:
            said.append(line)
            assert desk.hub.requests("storage", "GET") == []
            other.close()

        fetched = fetch_file(
            pinned(body), settings=desk.settings, policy=desk.policy, report=lambda *_: None, say=let_go
        )
    assert fetched.path.read_bytes() == body
    assert len(said) == 1 and "another process" in said[0]


def test_offline_fetch_with_a_cache_works_and_asks_nobody(desk: Desk, body: bytes):
    path = desk.fetch(pinned(body)).path
    answered = len(desk.hub.seen)
    assert desk.fetch(pinned(body), settings=replace(desk.settings, offline=True)).path == path
    assert len(desk.hub.seen) == answered


def test_offline_fetch_without_a_cache_is_unknown(desk: Desk, body: bytes):
    refused(
        desk,
        pinned(body),
        ExitCode.UNKNOWN,
        "HF_HUB_OFFLINE",
        REPO,
        settings=replace(desk.settings, offline=True),
    )
    assert desk.hub.seen == []


def test_offline_fetch_of_a_damaged_file_is_a_failure(desk: Desk, body: bytes):
    desk.fetch(pinned(body)).path.write_bytes(b"damaged")
    refused(
        desk,
        pinned(body),
        ExitCode.FAIL,
        hashlib.sha256(b"damaged").hexdigest(),
        settings=replace(desk.settings, offline=True),
    )


@pytest.mark.parametrize("missing", ["revision", "sha256", "size_bytes"])
def test_fetch_of_an_unlocked_file_is_unknown_and_names_what_is_missing(
    desk: Desk, body: bytes, missing: str
):
    refused(
        desk, replace(pinned(body), **{missing: None}), ExitCode.UNKNOWN, "unlocked", missing, "parity lock"
    )


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
def test_a_pin_that_cannot_be_one_is_refused(body: bytes, change: dict[str, object]):
    with pytest.raises(UsageError):
        replace(pinned(body), **change)


def test_an_endpoint_that_is_no_address_is_refused(tmp_path: Path):
    with pytest.raises(UsageError, match="HF_ENDPOINT"):
        HubSettings(endpoint="localhost:80", cache=tmp_path)
