"""The syrupy extension: one JSON file per family and mode below ``golden/``, written only with a reason.

syrupy deletes, on ``--snapshot-update``, every file that it discovered and no test used; a run of one family
would make the other families' goldens look unused. So this extension lets it discover nothing; a test of ours
finds files that nothing uses.
"""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from syrupy.data import SnapshotCollections
from syrupy.extensions.single_file import SingleFileSnapshotExtension, WriteMode
from syrupy.location import PyTestLocation

from parity.errors import UsageError
from parity.golden.cases import GOLDEN_DIR, GoldenMode, golden_dir_of, golden_path
from parity.golden.record import Golden, find_differences
from parity.store import save_text

REASON_VARIABLE = "SAMEBYTES_GOLDEN_REASON"
DIRECTORY_VARIABLE = "SAMEBYTES_GOLDEN_DIR"


def golden_dir(family: str | None = None) -> Path:
    """Where goldens are: the family's folder, or another one that a test names."""
    return Path(
        os.environ.get(DIRECTORY_VARIABLE) or (GOLDEN_DIR if family is None else golden_dir_of(family))
    )


def save_golden(golden: Golden, *, reason: str, directory: Path | None = None) -> Path:
    """Write one golden, atomically. Raises ``UsageError`` without a reason."""
    if not reason.strip():
        raise UsageError(
            "a golden is written only with a reason",
            where="--reason",
            todo='run `parity regen --accept --reason "why the outputs change"`',
        )
    path = golden_path(golden.family, GoldenMode(golden.mode), directory)
    save_text(path, replace(golden, reason=" ".join(reason.split())).to_text())
    return path


class GoldenExtension(SingleFileSnapshotExtension):
    """Stores ``Golden`` records. A test that uses it is parametrised with ids ``<family>-<mode>``."""

    _write_mode = WriteMode.TEXT
    file_extension = "json"

    def serialize(self, data: Golden, **_: Any) -> str:
        return data.to_text()

    def matches(self, *, serialized_data: str, snapshot_data: str) -> bool:
        old = Golden.from_text(snapshot_data, where="golden")
        return not find_differences(old, Golden.from_text(serialized_data, where="run"))

    def diff_lines(self, serialized_data: str, snapshot_data: str) -> list[str]:
        """What must be equal and is not, instead of a diff of two JSON texts."""
        if not snapshot_data:
            return []
        old = Golden.from_text(snapshot_data, where="golden")
        return find_differences(old, Golden.from_text(serialized_data, where="run"))

    @classmethod
    def get_location(cls, *, test_location: PyTestLocation, index: Any) -> str:
        named = re.search(r"\[(\w+)-(\w+)\]", test_location.nodeid)
        if named is None:
            raise UsageError(
                "a golden's test must be parametrised",
                where=test_location.nodeid,
                why="the file is named by its id <family>-<mode>",
            )
        return str(golden_path(named[1], GoldenMode(named[2]), golden_dir(named[1])))

    @classmethod
    def dirname(cls, *, test_location: PyTestLocation) -> str:
        return str(Path(cls.get_location(test_location=test_location, index=0)).parent)

    @classmethod
    def discovery_dirname(cls, *, test_location: PyTestLocation) -> str:
        return str(golden_dir())  # asked for every collected test, whatever it is named

    @classmethod
    def matches_test_location(cls, *, test_location: PyTestLocation, snapshot_location: str) -> bool:
        return Path(cls.get_location(test_location=test_location, index=0)) == Path(snapshot_location)

    def discover_snapshots(
        self, *, test_location: PyTestLocation, ignore_extensions: list[str] | None = None
    ) -> SnapshotCollections:
        """None: what is not discovered is never unused, and what is never unused is never deleted."""
        return SnapshotCollections()

    def delete_snapshots(self, *, snapshot_location: str, snapshot_names: set[str]) -> None:
        """Never: a golden that nothing uses is reported by a test and removed by hand."""

    @classmethod
    def write_snapshot_collection(
        cls, *, snapshot_collection: Any, name_order: dict[str, int] | None = None
    ) -> None:
        path, snapshot = Path(snapshot_collection.location), next(iter(snapshot_collection))
        golden = Golden.from_text(snapshot.data, where=str(path))
        save_golden(golden, reason=os.environ.get(REASON_VARIABLE, ""), directory=path.parent.parent)
