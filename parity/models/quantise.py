"""Quantised variants of generated models, made by llama.cpp's own quantiser on demand and kept."""

from __future__ import annotations

import importlib.metadata
import json
import os
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock
from gguf import LlamaFileType

from parity.errors import UsageError
from parity.models.builder import replaced_file
from parity.store import cache_dir, file_sha256, save_text, sidecar, verified_sha256

FILE_TYPES = {
    "q8_0": LlamaFileType.MOSTLY_Q8_0,
    "q4_0": LlamaFileType.MOSTLY_Q4_0,
    "q4_k_m": LlamaFileType.MOSTLY_Q4_K_M,
}


def quantised_file(
    *, source_sha256: str, stem: str, file_type: str, make_source: Callable[[], Path]
) -> tuple[Path, str]:
    """Path and SHA-256 of a generated model quantised to ``file_type``, a key of ``FILE_TYPES``.

    The file's bytes depend on llama.cpp, so no manifest can pin them: they are named by source and
    version, their digest is recorded beside them when they are made and checked (cheaply, see
    ``verified_sha256``) each time they are used.
    """
    version = importlib.metadata.version("llama-cpp-python")
    path = cache_dir("models") / f"{stem}-{file_type}-{source_sha256[:12]}-{version}.gguf"
    with FileLock(f"{path}.lock"):
        if not (path.exists() and sidecar(path).exists()):
            _quantise(make_source(), path, file_type=file_type, source_sha256=source_sha256, version=version)
        recorded = json.loads(sidecar(path).read_text())["sha256"]
        found = verified_sha256(path)
    if found != recorded:
        raise UsageError(
            "quantised model has changed",
            where=str(path),
            why=f"SHA-256 is {found}, made was {recorded}",
            todo="remove it, it will be made again",
        )
    return path, found


def _quantise(source: Path, path: Path, *, file_type: str, source_sha256: str, version: str) -> None:
    from parity.engines.llama import quantise_model

    with replaced_file(path) as target:
        quantise_model(source, target, int(FILE_TYPES[file_type]), os.cpu_count() or 1)
        digest = file_sha256(target)
    save_text(
        sidecar(path),
        json.dumps(
            {
                "sha256": digest,
                "source_sha256": source_sha256,
                "file_type": file_type,
                "llama_cpp_python": version,
            },
            indent=1,
        ),
    )
