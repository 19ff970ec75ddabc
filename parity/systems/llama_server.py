"""llama-server as a system under test: three builds of it, one set of options, what it says of itself.

``stock`` is built by ``make llama-server`` from the locked commit and runs on the wheel's own libllama;
``faults`` is the same with faults planted (``make llama-server FAULTS=1``); ``wheel`` is the newer,
unmodified one in the package xllamacpp (the extra ``servers``), which needs no compiler.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import sys
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import httpx

from parity.errors import UsageError
from parity.store import REPOSITORY, file_sha256
from parity.systems.server_faults import FAULT_VARIABLE, FAULTS
from parity.systems.server_process import START_TIMEOUT_S, ServerProcess


class LlamaServerBuild(Enum):
    """Which llama-server."""

    STOCK = "stock"
    FAULTS = "faults"
    WHEEL = "wheel"


PROGRAMS = {LlamaServerBuild.STOCK: "llama-server", LlamaServerBuild.FAULTS: "llama-server-faults"}
HOW_TO_GET = {
    LlamaServerBuild.STOCK: "make llama-server",
    LlamaServerBuild.FAULTS: "make llama-server FAULTS=1",
    LlamaServerBuild.WHEEL: "install the extra: pip install 'samebytes[servers]'",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaServerOptions:
    """Options that both kinds of llama-server take.

    ``n_slots`` sessions run at once; ``n_ctx`` cells are one pool where ``kv_unified``, else each slot has
    ``n_ctx / n_slots`` of its own. ``cache_ram_mib`` bounds the prompts that are kept outside the slots, 0
    keeps none; ``n_ctx_checkpoints`` bounds the states that are kept per slot for sliding windows and
    recurrent layers. ``flash_attention`` is ``on``, ``off`` or ``auto``.
    """

    model: Path
    n_slots: int = 8
    n_ctx: int = 4096
    kv_unified: bool = False
    n_threads: int = 1
    n_batch: int = 2048
    n_ubatch: int = 512
    flash_attention: str = "auto"
    kv_type: str = "f16"
    cache_ram_mib: int = 8192
    n_ctx_checkpoints: int = 32
    swa_full: bool = False

    def __post_init__(self) -> None:
        if self.flash_attention not in ("on", "off", "auto"):
            raise UsageError("flash_attention is on, off or auto", why=f"it is {self.flash_attention!r}")
        for name in ("n_slots", "n_ctx", "n_threads", "n_batch", "n_ubatch"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} must be at least 1", why=f"it is {getattr(self, name)}")

    def arguments(self) -> list[str]:
        """The command line, without the program; the port is the system's choice."""
        pairs = {
            "--model": self.model,
            "--host": "127.0.0.1",
            "--port": 0,
            "--parallel": self.n_slots,
            "--ctx-size": self.n_ctx,
            "--threads": self.n_threads,
            "--threads-batch": self.n_threads,
            "--batch-size": self.n_batch,
            "--ubatch-size": self.n_ubatch,
            "--flash-attn": self.flash_attention,
            "--cache-type-k": self.kv_type,
            "--cache-type-v": self.kv_type,
            "--cache-ram": self.cache_ram_mib,
            "--ctx-checkpoints": self.n_ctx_checkpoints,
        }
        flags = ["--kv-unified" if self.kv_unified else "--no-kv-unified", "--metrics", "--slots"]
        if self.swa_full:
            flags.append("--swa-full")
        return [str(part) for pair in pairs.items() for part in pair] + flags


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaServerFacts:
    """What a running llama-server says of itself: ``build`` (``b0-unknown`` outside a git checkout), slots,
    context of one slot in tokens, path of the model file.
    """

    build: str
    model_path: str
    n_slots: int
    n_ctx_slot: int


def llama_server_program(build: LlamaServerBuild) -> tuple[str, ...]:
    """The first words of the command. Raises ``UsageError`` where the build is not here.

    A stock build is looked for as ``SAMEBYTES_LLAMA_SERVER`` says, then beside this Python.
    """
    if build is LlamaServerBuild.WHEEL:
        if importlib.util.find_spec("xllamacpp") is None:
            raise UsageError("package xllamacpp is not installed", todo=HOW_TO_GET[build])
        return (sys.executable, "-m", "parity.systems.xllama")
    variable = {LlamaServerBuild.STOCK: "SAMEBYTES_LLAMA_SERVER"}.get(build, "SAMEBYTES_LLAMA_SERVER_FAULTS")
    named = os.environ.get(variable)
    path = Path(named) if named else Path(sys.executable).parent / PROGRAMS[build]
    if not os.access(path, os.X_OK) or path.is_dir():
        raise UsageError(
            f"no {PROGRAMS[build]}",
            where=variable if named else str(path.parent),
            why=f"{path} is not a program" if named else "",
            todo=HOW_TO_GET[build],
        )
    return (str(path),)


def describe_llama_server(build: LlamaServerBuild) -> str:
    """What tells one build from another, for a record of it: the package's version, else the
    digest of the program. What the server itself says is no help: neither was built from a git
    checkout. Raises ``UsageError``.
    """
    program = llama_server_program(build)
    if build is LlamaServerBuild.WHEEL:
        return f"xllamacpp {importlib.metadata.version('xllamacpp')}"
    return f"{PROGRAMS[build]} sha256:{file_sha256(Path(program[0]))[:12]}"


def open_llama_server(
    options: LlamaServerOptions,
    *,
    build: LlamaServerBuild = LlamaServerBuild.STOCK,
    fault: str | None = None,
    log: Path | None = None,
    start_timeout_s: float = START_TIMEOUT_S,
) -> ServerProcess:
    """Start a llama-server and wait until it answers; see ``ServerProcess``.

    ``fault`` names one of ``server_faults.FAULTS`` and needs the build with faults. Raises
    ``UsageError``, ``ServerDied``.
    """
    if fault is not None and build is not LlamaServerBuild.FAULTS:
        raise UsageError("a fault needs the build with faults", todo=HOW_TO_GET[LlamaServerBuild.FAULTS])
    if fault is not None and fault not in {known.name for known in FAULTS}:
        raise UsageError(f"no fault {fault!r}", todo=f"choose {', '.join(known.name for known in FAULTS)}")
    paths = [str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])]
    return ServerProcess(
        [*llama_server_program(build), *options.arguments()],
        log=log,
        # Always given, so that a variable of the caller's plants nothing.
        environment={FAULT_VARIABLE: fault or "", "PYTHONPATH": os.pathsep.join(paths)},
        start_timeout_s=start_timeout_s,
    )


def llama_server_facts(url: str) -> LlamaServerFacts:
    """Ask ``/props``. Raises ``httpx.HTTPError``, ``KeyError`` where the answer is not llama-server's."""
    props = httpx.get(f"{url}/props", timeout=30.0, trust_env=False).raise_for_status().json()
    return LlamaServerFacts(
        build=props["build_info"],
        model_path=props["model_path"],
        n_slots=props["total_slots"],
        n_ctx_slot=props["default_generation_settings"]["n_ctx"],
    )
