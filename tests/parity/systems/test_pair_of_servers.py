"""The gate's pair with real llama-servers that it starts: stock against stock, and with a planted fault.

Nightly: both programs are compiled by ``make llama-server`` and ``make llama-server FAULTS=1``.
"""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from parity.commands.gate import command as gate
from parity.errors import ExitCode
from parity.models import resolve_model
from parity.systems.llama_server import LlamaServerBuild, LlamaServerOptions, llama_server_program
from parity.systems.server_faults import FAULT_VARIABLE

pytestmark = pytest.mark.nightly

SMALL = "--prompts 10 --max-tokens 12 --rounds 1 --concurrency 8".split()


def command_line(build: LlamaServerBuild, fault: str = "") -> str:
    """Starts a llama-server with one pool for four slots."""
    options = LlamaServerOptions(model=resolve_model("llama").path, n_slots=4, n_ctx=2048, kv_unified=True)
    planted = f"{FAULT_VARIABLE}={fault}"
    return shlex.join(["env", planted, *llama_server_program(build), *options.arguments()])


@pytest.mark.parametrize("fault", ["", "prefix_one_long", "neighbour_logits"])
def test_candidate_against_stock(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    build = LlamaServerBuild.FAULTS if fault else LlamaServerBuild.STOCK
    pair = ["--system", command_line(build, fault), "--baseline", command_line(LlamaServerBuild.STOCK)]
    code = gate.main([*pair, "--model", "llama", *SMALL, "--json", "gate.json"], standalone_mode=False)
    (check,) = json.loads(Path("gate.json").read_text())["checks"]
    assert code is (ExitCode.FAIL if fault else ExitCode.PASS), check["explanation"]
    assert check["reason"].startswith("prompt ") if fault else "compatible with" in check["explanation"]
