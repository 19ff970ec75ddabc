"""The locked requirements are complete, hashed, free of addresses, and what is installed."""

from __future__ import annotations

import importlib.metadata
import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

REPOSITORY = Path(__file__).resolve().parent.parent.parent
FILES = ("lock.txt", "llama.txt", "build.txt")


def load_entries(name: str) -> list[tuple[Requirement, list[str]]]:
    """Each locked requirement with its hashes."""
    text = (REPOSITORY / "requirements" / name).read_text()
    joined = re.sub(r"\\\n\s*", "", re.sub(r"^\s*#.*\n", "", text, flags=re.MULTILINE))
    entries = []
    for line in filter(None, map(str.strip, joined.splitlines())):
        requirement, *hashes = line.split("--hash=")
        entries.append((Requirement(requirement.strip()), [value.strip() for value in hashes]))
    return entries


def declared() -> list[Requirement]:
    """What pyproject.toml asks for, extras included."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    return [
        Requirement(text)
        for group in (project["dependencies"], *project["optional-dependencies"].values())
        for text in group
    ]


@pytest.mark.parametrize("name", FILES)
def test_every_entry_is_pinned_and_hashed(name: str) -> None:
    entries = load_entries(name)
    assert entries
    for requirement, hashes in entries:
        assert re.fullmatch(r"==[\w.!+]+", str(requirement.specifier)), requirement
        assert hashes and all(re.fullmatch(r"sha256:[0-9a-f]{64}", value) for value in hashes), requirement
        assert requirement.url is None


@pytest.mark.parametrize("name", FILES)
def test_lock_names_no_address_and_no_option(name: str) -> None:
    text = (REPOSITORY / "requirements" / name).read_text()
    assert "://" not in text
    assert set(re.findall(r"(?<!\S)--?[a-z][\w-]*", re.sub("#.*", "", text))) == {"--hash"}


@pytest.mark.parametrize("wanted", declared(), ids=str)
def test_lock_holds_what_the_project_asks_for(wanted: Requirement) -> None:
    name = canonicalize_name(wanted.name)
    entries = load_entries("llama.txt" if name == "llama-cpp-python" else "lock.txt")
    versions = [
        next(iter(entry.specifier)).version for entry, _ in entries if canonicalize_name(entry.name) == name
    ]
    assert versions, f"{wanted} is not locked; run make lock"
    assert all(wanted.specifier.contains(version, prereleases=True) for version in versions), versions


def test_installed_packages_are_the_locked_ones() -> None:
    entries = [entry for name in ("lock.txt", "llama.txt") for entry, _ in load_entries(name)]
    here = [entry for entry in entries if entry.marker is None or entry.marker.evaluate()]
    assert len(here) > 40
    installed = {entry.name: importlib.metadata.version(entry.name) for entry in here}
    assert installed == {entry.name: next(iter(entry.specifier)).version for entry in here}


def test_llama_cpp_python_is_locked_as_source_only() -> None:
    ((requirement, hashes),) = load_entries("llama.txt")
    assert requirement.name == "llama-cpp-python" and len(hashes) == 1
    assert "llama-cpp-python" not in {canonicalize_name(entry.name) for entry, _ in load_entries("lock.txt")}


def test_build_tools_come_from_packages() -> None:
    names = {canonicalize_name(entry.name) for entry, _ in load_entries("build.txt")}
    assert {"cmake", "ninja", "scikit-build-core"} <= names
